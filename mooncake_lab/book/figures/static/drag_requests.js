// Requests that a reader drags: a chart of iterations, what each client sees, and all policies beside each other.
// The page comes with the runs of its start. What the reader changes is run by the book's Python package, which a worker
// loads after the first change. The address keeps what the reader has set, so that it can be shared.
(() => {
  const files = document.currentScript?.src && new URL(".", document.currentScript.src); // none in a notebook
  const RANGES = { // of the sliders: least, most, step, and how a value is said
    arrives_s: [0, 4, 0.01, (v) => `${v.toFixed(2)} s`],
    prompt_tokens: [16, 8000, 16, (v) => `${v}`],
    output_tokens: [1, 128, 1, (v) => `${v}`],
  };
  const HEADS = { arrives_s: "arrives", prompt_tokens: "prompt (tokens)", output_tokens: "output (tokens)" };
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

  const cacheOf = ({ scenario: { limits } }) => limits.capacity_blocks * limits.block_size_tokens;
  const examples = (data) => ({
    "A long prompt arrives": { requests: data.scenario.requests, cache: cacheOf(data) },
    "All at once": {
      requests: [[1600, 24], [800, 40], [400, 16], [3200, 8]].map(([prompt_tokens, output_tokens]) =>
        ({ arrives_s: 0, prompt_tokens, output_tokens })),
      cache: 65536,
    },
    "Memory runs out": {
      requests: [0, 0.2, 0.4].map((arrives_s) => ({ arrives_s, prompt_tokens: 1328, output_tokens: 64 })),
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
      chunk: CHUNKS.includes(Number(chunk)) ? Number(chunk) : data.scenario.chunk_tokens,
      cache: CACHES.includes(Number(cache)) ? Number(cache) : CACHES.at(-1),
    };
  };

  const setUp = (box) => {
    const data = JSON.parse(box.querySelector("script[type='application/json']").textContent);
    const first = { policy: data.policy, chunk: data.scenario.chunk_tokens, ...structuredClone(Object.values(examples(data))[0]) };
    let state = fromAddress(data) ?? first;
    let scale = null; // seconds that the chart holds; kept while a request is dragged

    // --- runs: those of the start, and those that the worker sends ------------------------------------------------------
    const scenario = () => {
      const blocks = state.cache / data.scenario.limits.block_size_tokens;
      const limits = { ...data.scenario.limits, capacity_blocks: blocks, free_blocks: blocks };
      return JSON.stringify({ ...data.scenario, requests: state.requests, limits, chunk_tokens: state.chunk });
    };
    const atStart = { of: JSON.stringify(data.scenario), runs: data.runs };
    const NOTHING = { rows: [], mean_ttft_s: null, longest_tbt_s: null, end_s: null, until_s: 0 };
    let shown = atStart, worker = null, sent = null;
    const isCurrent = () => shown.of === scenario();
    const runOf = (policy) => (isCurrent() || sent ? shown.runs[policy] : NOTHING); // the old one until the new one is here

    const said = (text, visible = true) => {
      status.textContent = text;
      status.classList.toggle("visible", visible);
    };
    const cannot = (reason) => {
      worker?.terminate();
      worker = sent = null;
      fill();
      draw();
      said(`These requests cannot be run here: ${reason}. "Start again" brings back the first ones.`);
    };
    const compute = () => {
      const of = scenario();
      if (of === atStart.of) shown = atStart;
      if (of === shown.of || sent !== null) return; // when the runs of what was sent are here, this is called again
      if (!files || location.protocol === "file:") {
        cannot("only a page from a web server can load Python; run `make book` and `make serve-book`");
        return;
      }
      if (!worker) {
        said("Loading Python and this book's package (about 15 MB, once)…");
        worker = new Worker(new URL("drag-worker.mjs", files), { type: "module" });
        worker.onerror = () => cannot("the worker of this page could not be loaded");
        worker.onmessage = ({ data: answer }) => {
          if (answer.error) {
            cannot(answer.error);
            return;
          }
          [shown, sent] = [{ of: sent, runs: JSON.parse(answer.runs) }, null];
          said("", false);
          update();
        };
      }
      sent = of;
      worker.postMessage(of);
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
      update();
    };
    const [exampleLabel, example] = choice("Example", Object.keys(examples(data)).map((n) => [n, n]),
      (name) => restart(examples(data)[name]));
    const [chunkLabel, chunk] = choice("Tokens per chunk", CHUNKS.map((n) => [n, n]),
      (value) => { state.chunk = Number(value); update(); });
    const [cacheLabel, cache] = choice("KVCache (tokens)", CACHES.map((n) => [n, n.toLocaleString("en")]),
      (value) => { state.cache = Number(value); update(); });
    const add = button("Add a request", () => {
      const last = state.requests.at(-1);
      restart({ requests: [...state.requests, { ...last, arrives_s: clamp(last.arrives_s + 0.1, RANGES.arrives_s) }] });
    });
    const remove = button("Remove the last", () => restart({ requests: state.requests.slice(0, -1) }));
    const again = button("Start again", () => { example.selectedIndex = 0; restart(first); });
    const run = button("Run", () => update());
    const controls = html("div", { class: "controls" }, exampleLabel, chunkLabel, cacheLabel, add, remove, again, run);

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
        const ends = { Home: RANGES.arrives_s[0], End: RANGES.arrives_s[1] };
        if (!(event.key in step) && !(event.key in ends)) return;
        event.preventDefault();
        set(i, "arrives_s", ends[event.key] ?? state.requests[i].arrives_s + step[event.key]);
      });
      parts.group.addEventListener("pointerdown", (event) => {
        const from = event.clientX, start = state.requests[i].arrives_s;
        const perPixel = scale / (chart.clientWidth - 2 * EDGE);
        const move = (moved) => set(i, "arrives_s", start + (moved.clientX - from) * perPixel);
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
    };

    // --- drawing --------------------------------------------------------------------------------------------------------
    const BARS = { prefill: [21, 16, 0.8], decode: [24, 10, 0.8], stalled: [27, 4, 0], waiting: [28.5, 1.5, 0] }; // top, height, gap
    const drawLane = (parts, i, row, x) => {
      const request = state.requests[i];
      const drawn = (row?.bars ?? []).map(([kind, from, to]) => {
        const [y, height, gap] = BARS[kind];
        return svg("rect", { class: kind, x: x(from), width: Math.max(x(to) - x(from) - gap, 0.7), y, height });
      });
      for (const at of row?.preempted_s ?? []) drawn.push(svg("text", { x: x(at) - 4, y: 34, class: "preempted" }, "×"));
      if (row && row.ttft_s !== null) drawn.push(svg("path", { class: "first", d: `M${x(request.arrives_s + row.ttft_s)} 17v24` }));
      parts.marks.replaceChildren(...drawn);
      const seen = !row ? "not run yet" : row.ttft_s === null ? "refused, too large"
        : `TTFT ${say.s(row.ttft_s)}, longest gap ${say.ms(row.longest_tbt_s)}`;
      parts.text.textContent = `${letter(i)}: ${seen}`;
      const width = chart.clientWidth || 600;
      const arrow = x(request.arrives_s), fits = arrow + 14 + parts.text.getComputedTextLength() < width;
      parts.text.setAttribute("x", fits ? arrow + 12 : arrow - 12);
      parts.text.setAttribute("text-anchor", fits ? "start" : "end");
      parts.text.setAttribute("y", 13);
      parts.hit.setAttribute("width", width);
      parts.flag.setAttribute("transform", `translate(${x(request.arrives_s)} 5)`);
      for (const [name, value] of [["valuemin", 0], ["valuemax", RANGES.arrives_s[1]], ["valuenow", request.arrives_s],
        ["valuetext", `${say.s(request.arrives_s)}; ${parts.text.textContent}`]]) parts.flag.setAttribute(`aria-${name}`, value);
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

    const draw = () => {
      const width = chart.clientWidth || 600, height = lanes.length * LANE;
      if (!("dragging" in box.dataset) || scale === null) {
        const ends = Object.keys(data.policies).map((policy) => runOf(policy).until_s);
        scale = Math.max(...ends, ...state.requests.map((r) => r.arrives_s + 0.1)) * 1.02;
      }
      const x = (t) => Number((EDGE + (t / scale) * (width - 2 * EDGE)).toFixed(1));
      chart.setAttribute("viewBox", `0 0 ${width} ${height + AXIS}`);
      chart.style.height = `${height + AXIS}px`;
      chart.setAttribute("aria-label", `Iterations of each request under ${data.policies[state.policy]}`);
      lanes.forEach((parts, i) => drawLane(parts, i, runOf(state.policy).rows[i], x));
      drawAxis(x, height, width);
    };

    const fill = () => {
      for (const [policy, { radio, cells, row: tr }] of Object.entries(policyRows)) {
        const one = runOf(policy);
        [say.s(one.mean_ttft_s), say.ms(one.longest_tbt_s), say.s(one.end_s)].forEach((text, i) => { cells[i].textContent = text; });
        radio.checked = policy === state.policy;
        tr.classList.toggle("chosen", radio.checked);
      }
      rows.forEach(({ sliders, cells }, i) => {
        for (const [name, { input, output }] of Object.entries(sliders)) {
          const value = state.requests[i][name];
          input.value = value;
          output.textContent = RANGES[name][3](value);
        }
        const one = runOf(state.policy).rows[i] ?? { ttft_s: null, mean_tbt_s: null, longest_tbt_s: null };
        [say.s(one.ttft_s), say.ms(one.mean_tbt_s), say.ms(one.longest_tbt_s)].forEach((text, c) => { cells[c].textContent = text; });
      });
      chunk.value = state.chunk;
      chunk.disabled = !data.chunked.includes(state.policy);
      cache.value = state.cache;
      run.hidden = isCurrent() || sent !== null;
      box.toggleAttribute("data-stale", !isCurrent());
    };

    let announcing = 0;
    const update = () => {
      compute();
      fill();
      draw();
      clearTimeout(announcing);
      announcing = setTimeout(() => {
        if (isCurrent()) {
          said(`${data.policies[state.policy]}. ${lanes.map(({ text }) => text.textContent).join("; ")}.`, false);
        }
        const numbers = state.requests.map((r) => Object.keys(RANGES).map((name) => r[name]).join(","));
        const address = `#drag=${[state.policy, state.chunk, state.cache, ...numbers].join(";")}`;
        if (touched) history.replaceState(null, "", address);
      }, 400);
    };

    let touched = false; // an address changes only for a reader who has changed something
    ["input", "change", "click", "pointerdown", "keydown"].forEach((kind) =>
      box.addEventListener(kind, () => { touched = true; }, { capture: true }));
    const about = html("p", { class: "about" }, `Times from ${data.machine}. Each client allows ${data.scenario.max_new_tokens} tokens.`);
    box.append(controls, policies, legend, chart, table, about, status);
    new ResizeObserver(draw).observe(box);
    build();
    fill();
    draw();
    if (!run.hidden) said('"Run" loads Python and this book\'s package (about 15 MB, once) and runs these requests.');
    if (location.hash.startsWith("#drag=")) box.scrollIntoView();
  };

  document.querySelectorAll(".batching-widget:not([data-ready])").forEach((box) => {
    box.dataset.ready = "";
    setUp(box);
  });
})();
