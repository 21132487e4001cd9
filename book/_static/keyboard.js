// The theme makes a box that is too wide reachable by key when the page is parsed, and when the window changes.
// Fonts and opened boxes come later: let it look again.
const again = () => dispatchEvent(new Event("resize"));
addEventListener("load", again);
document.addEventListener("toggle", again, true);
