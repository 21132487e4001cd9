// Filters and sorts a table of claims. The address keeps the filter; without scripts the whole table is there.
(() => {
  const FILTERS = ["paper", "chapter", "verdict", "evidence"];
  const SORTS = ["claim", "chapter", "verdict", "evidence", "statement", "paper", "ours"];
  const PREFIX = "#claims?";

  const html = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const order = new Intl.Collator("en", { numeric: true }).compare;

  const setUp = (box) => {
    const papers = JSON.parse(box.querySelector("script[type='application/json']").textContent);
    const table = box.querySelector("table");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row, i) => {
      const cells = Object.fromEntries([...row.cells].map((cell) => [cell.dataset.label, cell.textContent.trim()]));
      return { row, keys: { ...cells, paper: papers[i] }, number: cells.paper, text: row.textContent.toLowerCase() };
    });

    const text = html("input", { type: "search", placeholder: "words of the statement" });
    const choose = (name) => {
      const values = [...new Set(rows.map(({ keys }) => keys[name]))].sort(order);
      return html("select", {}, html("option", { value: "" }, "all"),
        ...values.map((value) => html("option", { value }, value)));
    };
    const selects = Object.fromEntries(FILTERS.map((name) => [name, choose(name)]));
    const sort = html("select", {}, ...SORTS.map((name) => html("option", { value: name }, name)));
    const status = html("p", { role: "status" });
    const clear = html("button", { type: "button" }, "Show all");
    const label = (name, control) => html("label", {}, `${name} `, control);
    const controls = html("div", { class: "controls", role: "search", "aria-label": "Filter the claims" },
      label("text", text), ...FILTERS.map((name) => label(name, selects[name])), label("sort by", sort), clear);
    let down = false;

    const heads = [...table.tHead.rows[0].cells].map((head) => {
      const name = head.textContent.trim();
      if (!SORTS.includes(name)) return { head, name };
      const button = html("button", { type: "button" }, name);
      button.addEventListener("click", () => {
        down = sort.value === name && !down;
        sort.value = name;
        update();
      });
      head.replaceChildren(button);
      return { head, name };
    });

    const number = (said) => Number.parseFloat(said.replace(/[,≥]/g, "").replace("−", "-").trim());
    const compare = (a, b) => {
      const name = sort.value;
      if (name !== "paper" && name !== "ours") return order(a.keys[name], b.keys[name]) || order(a.keys.claim, b.keys.claim);
      const [one, other] = [a, b].map((each) => number(name === "paper" ? each.number : each.keys.ours));
      return (Number.isNaN(one) - Number.isNaN(other)) || one - other;
    };

    const update = () => {
      const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      const shown = rows.filter((each) => words.every((word) => each.text.includes(word))
        && FILTERS.every((name) => !selects[name].value || selects[name].value === each.keys[name]));
      shown.sort(compare);
      if (down) shown.reverse();
      body.replaceChildren(...shown.map(({ row }) => row));
      for (const { head, name } of heads) {
        if (name === sort.value) head.setAttribute("aria-sort", down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      }
      status.textContent = `${shown.length} of ${rows.length} claims`;
      const kept = Object.entries({ text, ...selects, sort }).map(([name, { value }]) => [name, value])
        .filter(([name, value]) => value && !(name === "sort" && value === SORTS[0]));
      if (down) kept.push(["down", "1"]);
      const address = kept.length ? PREFIX + new URLSearchParams(kept) : "#claims";
      if (ready && (kept.length || location.hash.startsWith(PREFIX))) history.replaceState(null, "", address);
    };

    const read = () => {
      const wanted = new URLSearchParams(location.hash.startsWith(PREFIX) ? location.hash.slice(PREFIX.length) : "");
      text.value = wanted.get("text") ?? "";
      for (const [name, select] of Object.entries(selects)) select.value = wanted.get(name) ?? "";
      sort.value = SORTS.includes(wanted.get("sort")) ? wanted.get("sort") : SORTS[0];
      down = wanted.has("down");
      for (const select of Object.values(selects)) if (select.selectedIndex < 0) select.value = "";
      update();
    };

    let ready = false;
    [text, sort, ...Object.values(selects)].forEach((control) => control.addEventListener("input", update));
    clear.addEventListener("click", () => {
      [text, ...Object.values(selects)].forEach((control) => { control.value = ""; });
      update();
    });
    addEventListener("hashchange", () => { if (location.hash.startsWith(PREFIX)) read(); });
    box.prepend(controls, status);
    read();
    ready = true;
    if (location.hash.startsWith(PREFIX)) box.scrollIntoView();
  };

  document.querySelectorAll(".claims-table:not([data-ready])").forEach((box) => {
    box.dataset.ready = "";
    setUp(box);
  });
})();
