// A box that is too wide for its place can be reached by key, and says that it goes on. The theme does the first when the
// page is parsed and some time after the window has changed. Fonts, scroll bars and opened boxes change widths later.
(() => {
  const BOXES = ".bd-article :is(table, div.math, pre, .pst-scrollable-table-container, .cell_output > .output)";

  const mark = () => {
    for (const box of document.querySelectorAll(BOXES)) {
      const scrolls = box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX !== "visible";
      if (scrolls) box.tabIndex = 0;
      if (box.matches("pre") || box.closest("figure")) continue; // show by themselves that they go on
      if (scrolls === box.classList.contains("scrolls")) continue;
      box.classList.toggle("scrolls", scrolls);
      if (!scrolls) {
        if (box.previousElementSibling?.matches(".scrolls-hint")) box.previousElementSibling.remove();
        continue;
      }
      const hint = document.createElement("p");
      hint.className = "scrolls-hint";
      hint.textContent = "goes on to the right →";
      hint.ariaHidden = "true";
      box.before(hint);
    }
  };
  // cells of words keep a readable width; without it, a phone sets one word per line
  const widen = () => {
    for (const cell of document.querySelectorAll(".bd-article table.dataframe tbody :is(th, td)"))
      cell.classList.toggle("words", cell.textContent.trim().length > 24);
  };
  addEventListener("DOMContentLoaded", () => {
    widen();
    mark();
    new ResizeObserver(() => requestAnimationFrame(mark)).observe(document.querySelector(".bd-article") ?? document.body);
  });
  addEventListener("load", mark);
  document.fonts.ready.then(mark);
  document.addEventListener("toggle", mark, true);
})();
