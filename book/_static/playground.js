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
    const COLOURS = 6;
    const NUMBERS = ["prefill", "decode", "requests", "speed", "ttft_slo_s", "tbt_slo_s"];
    const NAMES = ["node", "system", "placement", "admission"];
    let runs = [], worker = null, waiting = null, stopped = false;

    const chosen = (name) => field(name).selectedOptions[0].textContent.trim();

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

    const described = ({ system, prefill, decode, speed }) => {
      const nodes = system === "mooncake" ? `${prefill} prefill, ${decode} decode, ${chosen("placement")}` : `${prefill} nodes`;
      const limits = `${field("ttft_slo_s").value} s and ${field("tbt_slo_s").value} s`;
      const trace = field("trace").value === "own" ? field("file").files[0]?.name : chosen("trace");
      const first = Number(field("requests").value).toLocaleString("en");
      return `${chosen("system").replace(/:.*/, "")}, ${nodes}; ${chosen("node")}; first ${first} of ${trace}, ${speed}×; limits ${limits}`
        + (field("admission").value === "none" ? "" : `; ${chosen("admission")}`);
    };

    const task = (values) => {
      const one = { trace: field("trace").value, settings: values };
      if (one.trace === "own") {
        one.file = field("file").files[0];
        if (!one.file) throw new Error("choose a file first");
      }
      return one;
    };

    // the table
    const percent = (share) => (100 * share).toFixed(1);
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
        const settingsCell = body.insertRow().insertCell();
        settingsCell.colSpan = 5;
        settingsCell.textContent = run.description;
        return body;
      }));
      if (runs.length) draw();
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
      stopped = false;
      const first = runs.length, pressed = document.activeElement;
      busy(true);
      try {
        for (const [one, description] of choices.map((values) => [task(values), described(values)])) {
          const result = await simulate(one);
          runs.push({ ...result, settings: one.settings, description });
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
      const choices = Array.from({ length: nodes - 1 }, (_, i) => ({ ...values, prefill: i + 1, decode: nodes - i - 1 }));
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

    // what the choice of a system or a trace makes meaningless is not shown
    const follow = () => {
      const separate = field("system").value === "mooncake";
      form.querySelectorAll(".separate").forEach((each) => { each.hidden = !separate; });
      part(".prefill-name").textContent = separate ? "Prefill nodes" : "Nodes";
      field("splits").hidden = !separate;
      for (const name of ["decode", "placement"]) field(name).disabled = !separate; // what is hidden may be invalid
      part(".own").hidden = field("trace").value !== "own";
    };
    form.addEventListener("change", follow);
    addEventListener("resize", () => { if (runs.length) draw(); });
    follow();
  };
})();
