// Requests that a reader drags: a chart of iterations, what each client sees, and all policies beside each other.
// `batching.js` steps the policies. The address keeps what the reader has set, so that it can be shared.
(() => {
  const { replay, latencies } = globalThis.MooncakeBatching;
  const RANGES = { // of the sliders: least, most, step, and how a value is said
    arrivalS: [0, 4, 0.01, (v) => `${v.toFixed(2)} s`],
    promptTokens: [16, 8000, 16, (v) => `${v}`],
    outputTokens: [1, 128, 1, (v) => `${v}`],
  };
  const HEADS = { arrivalS: "arrives", promptTokens: "prompt (tokens)", outputTokens: "output (tokens)" };
  const CHUNKS = [128, 256, 512, 1024, 2048];
  const CACHES = [4096, 16384, 65536];
  const MOST = 8;
  const LANE = 46, AXIS = 34, EDGE = 6;

  const say = { s: (v) => (v === null ? "–" : `${v.toFixed(2)} s`), ms: (v) => (v === null ? "–" : `${Math.round(1000 * v)} ms`) };
  const letter = (id) => String.fromCharCode(65 + id);
  const clamp = (v, [least, most, step]) => Math.min(most, Math.max(least, Number((Math.round(v / step) * step).toFixed(2))));

  const make = (space) => (tag, attributes = {}, ...children) => {
    const element = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const html = make("http://www.w3.org/1999/xhtml");
  const svg = make("http://www.w3.org/2000/svg");

  const examples = (data) => ({
    "A long prompt arrives": { requests: data.requests, cache: 65536 },
    "All at once": {
      requests: [[1600, 24], [800, 40], [400, 16], [3200, 8]].map(([promptTokens, outputTokens]) =>
        ({ arrivalS: 0, promptTokens, outputTokens })),
      cache: 65536,
    },
    "Memory runs out": {
      requests: [0, 0.2, 0.4].map((arrivalS) => ({ arrivalS, promptTokens: 1328, outputTokens: 64 })),
      cache: 4096,
    },
  });

  const fromAddress = (data) => {
    const [policy, chunk, cache, ...requests] = (location.hash.match(/^#drag=([\w;,.]+)$/)?.[1] ?? "").split(";");
    if (!(policy in data.policies) || !requests.length) return null;
    const names = Object.keys(RANGES);
    const read = requests.slice(0, MOST).map((text) => {
      const numbers = text.split(",").map(Number);
      return Object.fromEntries(names.map((name, i) => [name, clamp(numbers[i] || 0, RANGES[name])]));
    });
    return {
      policy, requests: read,
      chunk: CHUNKS.includes(Number(chunk)) ? Number(chunk) : data.chunk,
      cache: CACHES.includes(Number(cache)) ? Number(cache) : CACHES.at(-1),
    };
  };

  const setUp = (box) => {
    const data = JSON.parse(box.querySelector("script[type='application/json']").textContent);
    const first = { policy: data.policy, chunk: data.chunk, ...structuredClone(Object.values(examples(data))[0]) };
    let state = fromAddress(data) ?? first;
    let scale = null; // seconds that the chart holds; kept while a request is dragged

    const results = () => {
      const requests = state.requests.map((r, id) => ({ ...r, id, maxNewTokens: data.maxNewTokens }));
      const limits = { ...data.limits, capacityBlocks: state.cache / data.limits.blockTokens };
      return Object.fromEntries(Object.keys(data.policies).map((policy) => {
        const log = replay(policy, requests, limits, data.latency, state.chunk);
        return [policy, { log, seen: latencies(log, requests) }];
      }));
    };

    // --- controls ---------------------------------------------------------------------------------------------------
    const choice = (label, options, chosen) => {
      const select = html("select", {}, ...options.map(([value, text]) => html("option", { value }, text)));
      select.addEventListener("change", () => { chosen(select.value); });
      return [html("label", {}, `${label} `, select), select];
    };
    const button = (text, pressed) => {
      const element = html("button", { type: "button" }, text);
      element.addEventListener("click", pressed);
      return element;
    };
    const restart = (changes) => {
      state = { ...state, ...structuredClone(changes) };
      build();
    };
    const [exampleLabel, example] = choice("Example", Object.keys(examples(data)).map((n) => [n, n]),
      (name) => restart(examples(data)[name]));
    const [chunkLabel, chunk] = choice("Tokens per chunk", CHUNKS.map((n) => [n, n]),
      (value) => { state.chunk = Number(value); update(); });
    const [cacheLabel, cache] = choice("KVCache (tokens)", CACHES.map((n) => [n, n.toLocaleString("en")]),
      (value) => { state.cache = Number(value); update(); });
    const add = button("Add a request", () => {
      const last = state.requests.at(-1);
      restart({ requests: [...state.requests, { ...last, arrivalS: clamp(last.arrivalS + 0.1, RANGES.arrivalS) }] });
    });
    const remove = button("Remove the last", () => restart({ requests: state.requests.slice(0, -1) }));
    const again = button("Start again", () => { example.selectedIndex = 0; restart(first); });
    const controls = html("div", { class: "controls" }, exampleLabel, chunkLabel, cacheLabel, add, remove, again);

    // --- all policies, to choose one ----------------------------------------------------------------------------------
    const policyRows = Object.fromEntries(Object.entries(data.policies).map(([policy, name]) => {
      const radio = html("input", { type: "radio", name: `${box.id}-policy`, value: policy });
      radio.addEventListener("change", () => { state.policy = policy; update(); });
      const cells = ["mean TTFT", "longest gap", "last token"].map((label) => html("td", { "data-label": label }));
      const head = html("th", { scope: "row" }, html("label", {}, radio, ` ${name}`));
      return [policy, { radio, cells, row: html("tr", {}, head, ...cells) }];
    }));
    const heads = ["policy", "mean TTFT", "longest gap between tokens", "last token at"];
    const policies = html("table", { class: "policies" },
      html("thead", {}, html("tr", {}, ...heads.map((text) => html("th", { scope: "col" }, text)))),
      html("tbody", {}, ...Object.values(policyRows).map(({ row }) => row)));

    // --- the chart and the requests: made anew when their number changes ------------------------------------------------
    const chart = svg("svg", { role: "group" });
    const marks = ["prefill", "decode", "waiting", "stalled"].map((kind) =>
      html("span", {}, html("i", { class: kind }), ` ${kind}`));
    const legend = html("p", { class: "legend" }, ...marks, html("span", {}, "▼ arrives: drag it, or use the arrow keys"));
    const table = html("table", { class: "requests" });
    const status = html("p", { role: "status", class: "status" });
    let lanes = [], rows = [];

    const set = (i, name, value) => {
      state.requests[i][name] = clamp(value, RANGES[name]);
      update();
    };

    const lane = (i) => {
      const flag = svg("g", { class: "flag", role: "slider", tabindex: 0, "aria-label": `Arrival of ${letter(i)}` },
        svg("rect", { x: -14, y: -6, width: 28, height: 34, class: "hit" }), svg("path", { d: "M-7 0H7L0 11Z" }));
      const parts = { flag, text: svg("text", { class: "said" }), marks: svg("g") };
      parts.hit = svg("rect", { class: "hit", x: 0, height: LANE, y: 0 });
      parts.group = svg("g", { transform: `translate(0 ${i * LANE})` }, parts.hit, parts.text, parts.marks, flag);
      flag.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 0.05, ArrowUp: 0.05, ArrowLeft: -0.05, ArrowDown: -0.05, PageUp: 0.5, PageDown: -0.5 };
        const ends = { Home: RANGES.arrivalS[0], End: RANGES.arrivalS[1] };
        if (!(event.key in step) && !(event.key in ends)) return;
        event.preventDefault();
        set(i, "arrivalS", ends[event.key] ?? state.requests[i].arrivalS + step[event.key]);
      });
      parts.group.addEventListener("pointerdown", (event) => {
        const from = event.clientX, start = state.requests[i].arrivalS;
        const perPixel = scale / (chart.clientWidth - 2 * EDGE);
        const move = (moved) => set(i, "arrivalS", start + (moved.clientX - from) * perPixel);
        box.dataset.dragging = "";
        parts.group.setPointerCapture(event.pointerId);
        parts.group.addEventListener("pointermove", move);
        const end = () => {
          parts.group.removeEventListener("pointermove", move);
          delete box.dataset.dragging;
          update();
        };
        ["pointerup", "pointercancel"].forEach((kind) => parts.group.addEventListener(kind, end, { once: true }));
      });
      return parts;
    };

    const row = (i) => {
      const sliders = Object.fromEntries(Object.entries(RANGES).map(([name, [min, max, step]]) => {
        const said = `${HEADS[name]}, request ${letter(i)}`;
        const input = html("input", { type: "range", min, max, step, "aria-label": said });
        input.addEventListener("input", () => set(i, name, Number(input.value)));
        return [name, { input, output: html("output") }];
      }));
      const edits = Object.entries(sliders).map(([name, { input, output }]) =>
        html("td", { "data-label": HEADS[name] }, output, input));
      const cells = ["TTFT", "mean TBT", "longest gap"].map((label) => html("td", { "data-label": label }));
      return { sliders, cells, row: html("tr", {}, html("th", { scope: "row" }, letter(i)), ...edits, ...cells) };
    };

    const build = () => {
      scale = null;
      lanes = state.requests.map((_, i) => lane(i));
      rows = state.requests.map((_, i) => row(i));
      chart.replaceChildren(svg("g", { class: "axis" }), ...lanes.map(({ group }) => group));
      const titles = ["request", ...Object.values(HEADS), "TTFT", "mean TBT", "longest gap"];
      table.replaceChildren(
        html("thead", {}, html("tr", {}, ...titles.map((text) => html("th", { scope: "col" }, text)))),
        html("tbody", {}, ...rows.map((each) => each.row)));
      add.disabled = state.requests.length >= MOST;
      remove.disabled = state.requests.length <= 1;
      update();
    };

    // --- drawing --------------------------------------------------------------------------------------------------------
    const drawLane = (parts, i, { log, seen }, x) => {
      const request = state.requests[i];
      const bar = (kind, from, to, y, height, gap = 0) =>
        svg("rect", { class: kind, x: x(from), width: Math.max(x(to) - x(from) - gap, 0.7), y, height });
      const drawn = [];
      let at = request.arrivalS;
      for (const step of log) {
        const segment = step.segments.find((s) => s.id === i);
        if (segment) {
          const prefill = segment.kind === "prefill";
          drawn.push(bar(segment.kind, step.startS, step.endS, prefill ? 21 : 24, prefill ? 16 : 10, 0.8));
        } else if (step.running.includes(i) && !step.preempted.includes(i)) {
          drawn.push(bar("stalled", step.startS, step.endS, 27, 4));
        } else if (step.waiting.includes(i) || step.preempted.includes(i)) {
          drawn.push(bar("waiting", Math.max(step.startS, request.arrivalS), step.endS, 28.5, 1.5));
        } else if (step.startS < at && at < step.endS) {
          drawn.push(bar("waiting", at, step.endS, 28.5, 1.5));
        }
        if (step.preempted.includes(i)) drawn.push(svg("text", { x: x(step.startS) - 4, y: 34, class: "preempted" }, "×"));
      }
      const { ttftS, longestTbtS } = seen[i];
      if (ttftS !== null) drawn.push(svg("path", { class: "first", d: `M${x(request.arrivalS + ttftS)} 17v24` }));
      parts.marks.replaceChildren(...drawn);
      const refused = "refused, too large";
      parts.text.textContent = `${letter(i)}: ${ttftS === null ? refused
        : `TTFT ${say.s(ttftS)}, longest gap ${say.ms(longestTbtS)}`}`;
      const width = chart.clientWidth || 600;
      const arrow = x(request.arrivalS), fits = arrow + 14 + parts.text.getComputedTextLength() < width;
      parts.text.setAttribute("x", fits ? arrow + 12 : arrow - 12);
      parts.text.setAttribute("text-anchor", fits ? "start" : "end");
      parts.text.setAttribute("y", 13);
      parts.hit.setAttribute("width", width);
      parts.flag.setAttribute("transform", `translate(${x(request.arrivalS)} 5)`);
      for (const [name, value] of [["valuemin", 0], ["valuemax", RANGES.arrivalS[1]], ["valuenow", request.arrivalS],
        ["valuetext", `${say.s(request.arrivalS)}; ${parts.text.textContent}`]]) parts.flag.setAttribute(`aria-${name}`, value);
    };

    const drawAxis = (x, height, width) => {
      const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50].find((each) => (width * each) / scale > 44) ?? 100;
      const ticks = [];
      for (let t = 0; t <= scale; t += step) {
        ticks.push(svg("path", { d: `M${x(t)} 0V${height}` }),
          svg("text", { x: x(t), y: height + 14, "text-anchor": t ? "middle" : "start" }, Number(t.toFixed(1))));
      }
      ticks.push(svg("text", { x: width / 2, y: height + 29, "text-anchor": "middle" }, "time (s)"));
      chart.querySelector(".axis").replaceChildren(...ticks);
    };

    const draw = (all) => {
      const width = chart.clientWidth || 600, height = lanes.length * LANE;
      const ends = Object.values(all).map(({ log }) => log.at(-1)?.endS ?? 0);
      if (!("dragging" in box.dataset) || scale === null) {
        scale = Math.max(...ends, ...state.requests.map((r) => r.arrivalS + 0.1)) * 1.02;
      }
      const x = (t) => Number((EDGE + (t / scale) * (width - 2 * EDGE)).toFixed(1));
      chart.setAttribute("viewBox", `0 0 ${width} ${height + AXIS}`);
      chart.style.height = `${height + AXIS}px`;
      chart.setAttribute("aria-label", `Iterations of each request under ${data.policies[state.policy]}`);
      lanes.forEach((parts, i) => drawLane(parts, i, all[state.policy], x));
      drawAxis(x, height, width);
    };

    const fill = (all) => {
      for (const [policy, { radio, cells, row: tr }] of Object.entries(policyRows)) {
        const { seen } = all[policy];
        const ttfts = seen.map((each) => each.ttftS).filter((each) => each !== null);
        const mean = ttfts.length ? ttfts.reduce((sum, each) => sum + each, 0) / ttfts.length : null;
        const most = (name) => seen.reduce((best, each) => (each[name] === null ? best : Math.max(best ?? 0, each[name])), null);
        const said = [say.s(mean), say.ms(most("longestTbtS")), say.s(most("endS"))];
        cells.forEach((cell, i) => { cell.textContent = said[i]; });
        radio.checked = policy === state.policy;
        tr.classList.toggle("chosen", radio.checked);
      }
      rows.forEach(({ sliders, cells }, i) => {
        for (const [name, { input, output }] of Object.entries(sliders)) {
          const value = state.requests[i][name];
          input.value = value;
          output.textContent = RANGES[name][3](value);
        }
        const { ttftS, meanTbtS, longestTbtS } = all[state.policy].seen[i];
        [say.s(ttftS), say.ms(meanTbtS), say.ms(longestTbtS)].forEach((text, c) => { cells[c].textContent = text; });
      });
      chunk.value = state.chunk;
      chunk.disabled = !data.chunked.includes(state.policy);
      cache.value = state.cache;
    };

    let announcing = 0;
    const update = () => {
      const all = results();
      fill(all);
      draw(all);
      clearTimeout(announcing);
      announcing = setTimeout(() => {
        status.textContent = `${data.policies[state.policy]}. ${lanes.map(({ text }) => text.textContent).join("; ")}.`;
        const numbers = state.requests.map((r) => Object.keys(RANGES).map((name) => r[name]).join(","));
        const address = `#drag=${[state.policy, state.chunk, state.cache, ...numbers].join(";")}`;
        if (touched) history.replaceState(null, "", address);
      }, 400);
    };

    let touched = false; // an address changes only for a reader who has changed something
    ["input", "change", "click", "pointerdown", "keydown"].forEach((kind) =>
      box.addEventListener(kind, () => { touched = true; }, { capture: true }));
    const about = html("p", { class: "about" }, `Times from ${data.machine}. Each client allows ${data.maxNewTokens} tokens.`);
    box.append(controls, policies, legend, chart, table, about, status);
    new ResizeObserver(() => draw(results())).observe(box);
    build();
    if (location.hash.startsWith("#drag=")) box.scrollIntoView();
  };

  document.querySelectorAll(".batching-widget:not([data-ready])").forEach((box) => {
    box.dataset.ready = "";
    setUp(box);
  });
})();
