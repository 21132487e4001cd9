// Numbers the text of a page by its look (`data-look`), and marks what of each look is to be examined (`data-probe`).
//
// Contrast follows from the colour, size and weight of the letters and from the grounds of all boxes around them. So
// text that agrees in these has one contrast, and some of it is enough: three places or a few more, spread over the
// page. A box that is placed by itself shares its look with nobody, as it may lie on anything.
//
// Argument: null, or the numbers of looks of which everything is to be marked. Returns how much of each look
// is not marked.
(wanted) => {
  const LETTER = /[^\s!-\/:-@[-`{-~]/; // other than ASCII punctuation, which axe passes over
  const grounds = new Map();
  const numbers = new Map();
  const alike = new Map();

  const numberOf = (text) => {
    if (!numbers.has(text)) numbers.set(text, numbers.size);
    return numbers.get(text);
  };

  const ground = (element) => {
    if (!element) return "";
    if (!grounds.has(element)) {
      const style = getComputedStyle(element);
      const own = [style.backgroundColor, style.backgroundImage, style.opacity, style.filter, style.mixBlendMode].join();
      const below = ground(element.parentElement);
      const placed = ["absolute", "fixed", "sticky"].includes(style.position) ? `placed ${grounds.size}` : "";
      const plain = own === "rgba(0, 0, 0, 0),none,1,none,normal" && !placed;
      grounds.set(element, plain ? below : numberOf([below, own, placed].join("/")));
    }
    return grounds.get(element);
  };

  for (const element of document.querySelectorAll("[data-look]")) {
    element.removeAttribute("data-look");
    element.removeAttribute("data-probe");
  }
  for (const element of document.body.querySelectorAll("*")) {
    const written = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && LETTER.test(node.data));
    if (!written && !element.matches("input, select, textarea")) continue;
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const style = getComputedStyle(element);
    const letters = [style.color, style.fontSize, style.fontWeight, style.textShadow, style.webkitTextStroke];
    const look = [ground(element), ...letters, element.matches(":disabled, :disabled *")].join();
    if (!alike.has(look)) alike.set(look, []);
    alike.get(look).push(element);
  }
  return [...alike.values()].map((elements, number) => {
    const step = wanted ? 1 : Math.max(1, Math.floor(elements.length / 3));
    const marked = elements.filter((_, place) => (wanted ? wanted.includes(number) : place % step === 0));
    elements.forEach((element) => (element.dataset.look = number));
    marked.forEach((element) => (element.dataset.probe = ""));
    return elements.length - marked.length;
  });
}
