// Shows the definition of a term beside it: under the pointer, with the focus, or at the first tap. Escape and a tap
// elsewhere close it. A second tap follows the link to the glossary.
(() => {
  const source = document.getElementById("glossary-definitions");
  if (!source) return;
  const definitions = JSON.parse(source.textContent);
  const box = document.createElement("div");
  box.id = "term-definition";
  box.className = "term-definition";
  box.setAttribute("role", "tooltip");
  box.hidden = true;
  document.body.append(box);
  let shown = null, leaving = 0;

  const close = () => {
    shown?.removeAttribute("aria-describedby");
    shown = null;
    box.hidden = true;
  };

  const open = (link) => {
    clearTimeout(leaving);
    if (shown === link) return;
    close();
    shown = link;
    box.textContent = definitions[link.hash.slice(1)];
    box.hidden = false;
    link.setAttribute("aria-describedby", box.id);
    const place = link.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const left = Math.max(8, Math.min(place.left, width - box.offsetWidth - 8));
    const below = place.bottom + 6 + box.offsetHeight < innerHeight;
    box.style.left = `${left + scrollX}px`;
    box.style.top = `${(below ? place.bottom + 6 : place.top - box.offsetHeight - 6) + scrollY}px`;
  };

  const later = () => {
    clearTimeout(leaving);
    leaving = setTimeout(close, 200); // long enough to move onto the definition
  };

  for (const link of document.querySelectorAll("a[href*='glossary.html#']")) {
    if (!(link.hash.slice(1) in definitions)) continue;
    let tapped = false;
    link.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch") open(link); });
    link.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") later(); });
    link.addEventListener("pointerdown", (event) => { tapped = event.pointerType === "touch" && shown !== link; });
    link.addEventListener("focus", () => open(link));
    link.addEventListener("blur", later);
    link.addEventListener("click", (event) => {
      if (!tapped) return;
      event.preventDefault();
      tapped = false;
      open(link);
    });
  }
  box.addEventListener("pointerenter", () => clearTimeout(leaving));
  box.addEventListener("pointerleave", later);
  addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  addEventListener("pointerdown", (event) => { if (shown && !shown.contains(event.target) && !box.contains(event.target)) close(); });
})();
