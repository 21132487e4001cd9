// The note at the top of each page can be closed. It stays closed on all pages, until it says something else.
(() => {
  const KEY = "closed-note";
  const memory = (use) => {
    try {
      return use(localStorage);
    } catch {
      return null; // a browser that keeps nothing shows the note on each page
    }
  };
  addEventListener("DOMContentLoaded", () => {
    const note = document.querySelector(".bd-header-announcement");
    if (!note) return;
    const said = note.textContent.trim();
    if (memory((kept) => kept.getItem(KEY)) === said) {
      note.remove();
      return;
    }
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "×";
    button.ariaLabel = "Close this note";
    button.addEventListener("click", () => {
      memory((kept) => kept.setItem(KEY, said));
      note.remove();
    });
    note.append(button);
  });
})();
