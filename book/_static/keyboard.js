// A box that is too wide for its place can be reached by key, and says that it goes on. The theme does the first for some
// boxes, when the page is parsed and when the window changes. Fonts and opened boxes come later: look again then.
(() => {
  const BOXES = ".bd-article :is(table, div.math, .pst-scrollable-table-container, .cell_output > .output)";

  const mark = () => {
    for (const box of document.querySelectorAll(BOXES)) {
      const scrolls = box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX !== "visible";
      if (box.closest("figure")) continue; // says so itself (figures.css)
      if (scrolls === box.classList.contains("scrolls")) continue;
      box.classList.toggle("scrolls", scrolls);
      if (!scrolls) {
        if (box.previousElementSibling?.matches(".scrolls-hint")) box.previousElementSibling.remove();
        continue;
      }
      box.tabIndex = 0;
      const hint = document.createElement("p");
      hint.className = "scrolls-hint";
      hint.textContent = "goes on to the right →";
      hint.ariaHidden = "true";
      box.before(hint);
    }
  };
  const again = () => {
    dispatchEvent(new Event("resize"));
  };
  addEventListener("resize", mark);
  addEventListener("load", again);
  document.addEventListener("toggle", again, true);
})();
