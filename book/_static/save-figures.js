// Beside the link to a figure's numbers stand two more: the figure as SVG and as PNG, in the light colours on white.
addEventListener("DOMContentLoaded", () => {
  const PIXELS_PER_POINT = 4;

  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };

  // the drawing names colours as variables of the page, with the light colour as what holds outside of a page
  const alone = (drawing) => {
    const copy = drawing.cloneNode(true);
    const { width, height } = drawing.viewBox.baseVal;
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", `${width}pt`);
    copy.setAttribute("height", `${height}pt`);
    copy.style.background = "white";
    copy.style.fontFamily = "sans-serif";
    return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
  };

  const painted = async (drawing) => {
    const image = new Image();
    image.src = URL.createObjectURL(alone(drawing));
    await image.decode();
    const canvas = document.createElement("canvas");
    const { width, height } = drawing.viewBox.baseVal;
    canvas.width = width * PIXELS_PER_POINT;
    canvas.height = height * PIXELS_PER_POINT;
    const paper = canvas.getContext("2d");
    paper.fillStyle = "white";
    paper.fillRect(0, 0, canvas.width, canvas.height);
    paper.drawImage(image, 0, 0, canvas.width, canvas.height);
    URL.revokeObjectURL(image.src);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  };

  for (const data of document.querySelectorAll("figure a.figure-data")) {
    const figure = data.closest("figure");
    const drawing = figure.querySelector(".drawing svg");
    if (!drawing) continue;
    const button = (label, make) => {
      const each = document.createElement("button");
      each.type = "button";
      each.className = "figure-save";
      each.textContent = label;
      each.ariaLabel = `Save this figure as ${label}`;
      each.addEventListener("click", async () => save(await make(drawing), `${figure.id}.${label.toLowerCase()}`));
      return each;
    };
    data.after(", ", button("SVG", alone), ", ", button("PNG", painted));
  }
});
