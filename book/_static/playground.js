// The form, the table and the drawing of the playground; the simulator runs in a worker.
(() => {
  const here = new URL(".", document.currentScript.src);
  document.addEventListener("DOMContentLoaded", () => {
    const form = document.getElementById("playground");
    if (form) setUp(form, here);
  });

  const setUp = (form, here) => {
    const part = (selector) => form.querySelector(selector);
    const field = (name) => form.elements[name];
    const status = part(".playground-status"), results = part(".playground-results"), table = part("table");
    const COLOURS = 6, MOST_NODES = 256; // of one kind
    const NUMBERS = ["prefill", "decode", "requests", "speed", "ttft_slo_s", "tbt_slo_s"];
    const NAMES = ["node", "system", "placement", "admission"];
    let runs = [], worker = null, waiting = null, stopped = false;

    const label = (name, value) => [...field(name).options].find((option) => option.value === value).textContent.trim();
    const listed = (words) => new Intl.ListFormat("en").format(words);

    // one run in the worker
    const simulate = (task) => new Promise((resolve, reject) => {
      worker ??= new Worker(new URL("playground-worker.mjs", here), { type: "module" });
      waiting = reject;
      worker.onerror = () => { worker = null; reject(new Error("the simulator could not be loaded; look at the browser's console")); };
      worker.onmessage = ({ data }) => {
        if (data.kind === "status") status.textContent = data.text;
        else if (data.kind === "result") resolve(data.result);
        else reject(new Error(data.text));
      };
      worker.postMessage(task);
    });

    const settings = () => Object.fromEntries([
      ...NUMBERS.map((name) => [name, Number(field(name).value)]), ...NAMES.map((name) => [name, field(name).value]),
    ].filter(([name]) => !field(name).disabled));

    const hardware = ({ gpus, settings }) => `${gpus.toLocaleString("en")} ${label("node", settings.node)} GPUs`;

    const described = (run) => {
      const { system, prefill, decode, placement, admission, speed, ttft_slo_s, tbt_slo_s } = run.settings;
      const separate = system === "mooncake";
      const nodes = separate ? `${prefill} prefill and ${decode} decode nodes, ${label("placement", placement)}` : `${prefill} nodes`;
      const first = run.numbers.requests.toLocaleString("en"), trace = run.file ?? label("trace", run.trace);
      return `: ${label("system", system).replace(/:.*/, "")}, ${nodes}; first ${first} of ${trace}, ${speed}×; limits ${ttft_slo_s} s and ${tbt_slo_s} s`
        + (admission === "none" ? "" : `; ${label("admission", admission)}`) + (run.stored ? "; computed with this book" : "");
    };

    // runs of other hardware stand in one table; who compares them is told
    const unequal = () => {
      const kinds = new Map();
      runs.forEach((run, i) => kinds.set(hardware(run), [...(kinds.get(hardware(run)) ?? []), String(i + 1)]));
      const said = [...kinds].map(([kind, of]) => `${of.length > 1 ? "runs" : "run"} ${listed(of)} on ${kind}`);
      return kinds.size > 1 ? `These runs are not on equal hardware: ${said.join("; ")}.` : "";
    };

    const task = (values) => {
      const one = { trace: field("trace").value, settings: values };
      if (one.trace === "own") {
        one.file = field("file").files[0];
        one.blockSize = Number(field("block_size").value) || null;
        if (!one.file) throw new Error("choose a file first");
      }
      return one;
    };

    // the table
    const percent = (share) => (share === null ? "–" : (100 * share).toFixed(1));
    const seconds = (value, digits) => (value === null ? "–" : value.toFixed(digits));
    const better = (one, other) => {
      const [a, b] = [one.numbers, other.numbers];
      return a.effective_request_capacity - b.effective_request_capacity || (b.ttft_p90_s ?? Infinity) - (a.ttft_p90_s ?? Infinity);
    };

    const show = () => {
      results.hidden = field("clear").hidden = runs.length === 0;
      table.querySelectorAll("tbody").forEach((body) => body.remove());
      table.append(...runs.map((run, i) => {
        const body = document.createElement("tbody"), row = body.insertRow(), n = run.numbers;
        row.innerHTML = `<th scope="row" rowspan="2">${i + 1} <span class="swatch" aria-hidden="true"></span></th>`;
        row.querySelector(".swatch").dataset.colour = i >= runs.length - COLOURS ? i % COLOURS : "none";
        for (const content of [percent(n.effective_request_capacity), seconds(n.ttft_p90_s, 2), seconds(n.tbt_p90_s, 3),
          percent(n.token_hit_rate), n.rejected]) row.insertCell().textContent = content;
        const settingsCell = body.insertRow().insertCell(), equipment = document.createElement("strong");
        settingsCell.colSpan = 5;
        equipment.textContent = hardware(run);
        settingsCell.append(equipment, `${described(run)} `, copyButton(run));
        if (run.shown) settingsCell.append(run.shown);
        return body;
      }));
      part(".playground-unequal").textContent = unequal();
      if (runs.length) draw();
    };

    // a command for a shell, on the clipboard and below the button
    const copyButton = (run) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Copy as command";
      button.setAttribute("aria-label", `Copy run ${runs.indexOf(run) + 1} as a command`);
      button.addEventListener("click", async () => {
        run.shown ??= Object.assign(document.createElement("pre"), { className: "playground-command", textContent: run.command, tabIndex: 0 });
        button.after(run.shown);
        try {
          await navigator.clipboard.writeText(run.command);
          status.textContent = "The command is on the clipboard.";
        } catch {
          status.textContent = "This browser does not let the page copy; the command stands below its run.";
        }
      });
      return button;
    };

    // the drawing: share of requests over time to first token, on a logarithmic axis
    const LEFT = 46, TOP = 12, BOTTOM = 258, HEIGHT = 300;
    const element = (name, attributes, content) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      if (content !== undefined) made.textContent = content;
      return made;
    };

    const draw = () => {
      const width = Math.max(280, part("figure").clientWidth), RIGHT = width - 18; // a phone's letters are as large
      const shown = runs.map((run, i) => [run, i]).slice(-COLOURS).filter(([run]) => run.ttft_s.length);
      const limit = runs.at(-1).settings.ttft_slo_s;
      const all = shown.flatMap(([run]) => [run.ttft_s[0], run.ttft_s.at(-1)]).concat(limit).map((s) => Math.max(s, 0.001));
      const low = Math.floor(Math.log10(Math.min(...all))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...all))));
      const x = (s) => LEFT + ((Math.log10(Math.max(s, 0.001)) - low) / (high - low)) * (RIGHT - LEFT);
      const y = (share) => BOTTOM - share * (BOTTOM - TOP);
      const parts = [];
      for (const share of [0, 0.25, 0.5, 0.75, 1]) {
        parts.push(element("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y(share), y2: y(share) }));
        parts.push(element("text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}`));
      }
      for (let power = low; power <= high; power += 1) {
        const at = LEFT + ((power - low) / (high - low)) * (RIGHT - LEFT);
        parts.push(element("line", { class: "grid", x1: at, x2: at, y1: TOP, y2: BOTTOM }));
        parts.push(element("text", { x: at, y: BOTTOM + 16, "text-anchor": "middle" }, String(10 ** power)));
      }
      parts.push(element("text", { x: (LEFT + RIGHT) / 2, y: BOTTOM + 36, "text-anchor": "middle" }, "TTFT (s)"));
      parts.push(element("text", { transform: `translate(12 ${(TOP + BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle" }, "requests (%)"));
      parts.push(element("line", { class: "limit", x1: x(limit), x2: x(limit), y1: TOP, y2: BOTTOM }));
      for (const [run, i] of shown) {
        const step = Math.max(1, Math.floor(run.ttft_s.length / 400)), of = run.numbers.requests;
        const points = run.ttft_s.map((s, k) => [s, (k + 1) / of]).filter((_, k, list) => k % step === 0 || k === list.length - 1);
        parts.push(element("polyline", { class: "run", "data-colour": i % COLOURS, points: points.map(([s, share]) => `${x(s).toFixed(1)},${y(share).toFixed(1)}`).join(" ") }));
      }
      shown.forEach(([run, i], place) => { // numbers on the curves, at different heights
        const share = 0.85 - 0.13 * place, s = run.ttft_s[Math.floor(share * run.numbers.requests)];
        if (s !== undefined) parts.push(element("text", { class: "number", "data-colour": i % COLOURS, x: x(s), y: y(share) + 4, "text-anchor": "middle" }, String(i + 1)));
      });
      const title = part("svg title");
      title.textContent = "Share of requests by time to first token. " + shown.map(([run, i]) =>
        `Run ${i + 1}: half within ${seconds(run.numbers.ttft_p50_s, 2)} s, 90 % within ${seconds(run.numbers.ttft_p90_s, 2)} s.`).join(" ");
      part("svg").setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      part("svg").replaceChildren(title, ...parts);
    };

    // buttons
    const busy = (is) => {
      form.toggleAttribute("data-busy", is);
      form.querySelectorAll("input, select, button").forEach((each) => { each.disabled = is; });
      field("stop").hidden = !is;
      field("stop").disabled = false;
      if (is) field("stop").focus({ preventScroll: true });
      else follow();
    };

    const runAll = async (choices, summary) => {
      if (!form.reportValidity()) return;
      if (location.protocol === "file:") {
        status.textContent = "Browsers do not let a page from the disk load the simulator. Run `make serve-book` and open the page there.";
        return;
      }
      if (!window.playgroundComplete) {
        status.textContent = "This book was built without a network, so its simulator is not here. Run `make book` with one.";
        return;
      }
      stopped = false;
      const first = runs.length, pressed = document.activeElement;
      busy(true);
      try {
        for (const one of choices.map(task)) {
          const result = await simulate(one);
          runs.push({ ...result, settings: one.settings, trace: one.trace, file: one.file?.name });
          show();
        }
        status.textContent = summary(runs.slice(first), first);
      } catch (error) {
        status.textContent = stopped ? "Stopped." : `This run failed: ${error.message}`;
      } finally {
        waiting = null;
        busy(false);
        if (pressed && !pressed.hidden) pressed.focus({ preventScroll: true });
      }
    };

    const withinLimits = (run) => `${percent(run.numbers.effective_request_capacity)} % of ${run.numbers.requests.toLocaleString("en")} requests were within the limits.`;

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      runAll([settings()], ([run], first) => `Run ${first + 1}: ${withinLimits(run)}`);
    });
    field("splits").addEventListener("click", () => {
      const values = settings(), nodes = values.prefill + values.decode;
      const splits = Array.from({ length: nodes - 1 }, (_, i) => ({ ...values, prefill: i + 1, decode: nodes - i - 1 }));
      const choices = splits.filter(({ prefill, decode }) => Math.max(prefill, decode) <= MOST_NODES);
      runAll(choices, (tried, first) => {
        const best = tried.reduce((a, b) => (better(b, a) > 0 ? b : a));
        const { prefill, decode } = best.settings;
        return `Best of ${tried.length} splits of ${nodes} nodes: ${prefill} prefill and ${decode} decode (run ${first + tried.indexOf(best) + 1}); ${withinLimits(best)}`;
      });
    });
    field("stop").addEventListener("click", () => {
      stopped = true;
      worker?.terminate();
      worker = null;
      waiting?.(new Error("stopped"));
    });
    field("clear").addEventListener("click", () => { runs = []; show(); status.textContent = ""; });

    // a system takes over the nodes of the one before it; separate pools share them as they did last
    let separate = true, split = [4, 4], total = 8;
    const keepNodes = () => {
      const pools = ["prefill", "decode"].map(field), now = field("system").value === "mooncake";
      if (pools.every((each) => each.disabled || each.checkValidity())) { // else those of the last valid entry
        if (separate) split = pools.map((each) => Number(each.value));
        total = separate ? split[0] + split[1] : Number(pools[0].value);
      }
      if (now === separate) return;
      separate = now;
      pools[0].max = separate ? MOST_NODES : 2 * MOST_NODES;
      if (separate) {
        const share = Math.round((total * split[0]) / (split[0] + split[1]));
        const prefill = Math.max(1, total - MOST_NODES, Math.min(share, total - 1, MOST_NODES));
        split = [prefill, Math.max(1, total - prefill)];
        [pools[0].value, pools[1].value] = split;
        if (total === 1) status.textContent = "Separate pools need two nodes: one for prefill and one for decode.";
      } else pools[0].value = total;
    };

    // what the choice of a system or a trace makes meaningless is not shown
    const follow = () => {
      keepNodes();
      form.querySelectorAll(".separate").forEach((each) => { each.hidden = !separate; });
      part(".prefill-name").textContent = separate ? "Prefill nodes" : "Nodes";
      field("splits").hidden = !separate;
      for (const name of ["decode", "placement"]) field(name).disabled = !separate; // what is hidden may be invalid
      form.querySelectorAll(".own").forEach((each) => { each.hidden = field("trace").value !== "own"; });
    };
    form.addEventListener("change", follow);
    addEventListener("resize", () => { if (runs.length) draw(); });
    follow();
    runs = (window.playgroundStored ?? []).map((run) => ({ ...run, stored: true }));
    if (runs.length) status.textContent = `Runs 1 to ${runs.length} were computed when this book was built.${window.playgroundComplete ? " Your first run loads the simulator." : ""}`;
    show();
  };
})();
