// A slider over results that were computed when the page was made. The lines stand; the slider moves a cursor
// over all panels, and the values at the cursor are beside the lines. `data-ready` marks what has been set up.
(() => {
  const setUp = (box) => {
    const data = JSON.parse(box.querySelector("script[type='application/json']").textContent);
    const knob = box.querySelector("input");
    const value = box.querySelector("output");
    const panels = [...box.querySelectorAll("svg")];

    const show = () => {
      const at = Number(knob.value);
      value.textContent = data.values[at];
      const said = data.panels.map((panel) =>
        panel.head + ": " + panel.sides.map((side, i) => `${data.sides[i]} ${side.texts[at]}`).join(", "));
      knob.setAttribute("aria-valuetext", `${data.values[at]}. ${said.join(". ")}`);
      panels.forEach((svg, p) => {
        const x = data.xs[at];
        const cursor = svg.querySelector(".cursor");
        cursor.setAttribute("x1", x);
        cursor.setAttribute("x2", x);
        data.panels[p].sides.forEach((side, i) => {
          const group = svg.querySelectorAll(".side")[i];
          const [circle, leader, label] = ["circle", ".leader", "text"].map((part) => group.querySelector(part));
          circle.setAttribute("cx", x);
          circle.setAttribute("cy", side.ys[at]);
          leader.setAttribute("d", `M${x} ${side.ys[at]}L${data.edge} ${side.labels[at]}`);
          label.setAttribute("y", side.labels[at]);
          label.lastElementChild.textContent = side.texts[at];
        });
      });
    };

    const follow = (event) => {
      const svg = event.currentTarget;
      const place = svg.getBoundingClientRect();
      const x = (event.clientX - place.left) * (svg.viewBox.baseVal.width / place.width);
      const nearest = data.xs.reduce((best, each, i) => (Math.abs(each - x) < Math.abs(data.xs[best] - x) ? i : best), 0);
      if (x > data.edge + 8 || Number(knob.value) === nearest) return;
      knob.value = nearest;
      show();
    };

    panels.forEach((svg) => ["pointermove", "pointerdown"].forEach((kind) => svg.addEventListener(kind, follow)));
    knob.addEventListener("input", show);
    knob.hidden = false;
    show();
  };

  document.querySelectorAll(".what-if:not([data-ready])").forEach((box) => {
    box.dataset.ready = "";
    setUp(box);
  });
})();
