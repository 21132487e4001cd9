# ruff: noqa: INP001 - Sphinx finds an extension by its file, not in a package
"""Figures stand in the page itself: their text can be selected and found, and their colours follow the theme.

Jupyter Book would write each SVG into a file and show it as an image, which knows neither theme nor fonts of the
page. Here each drawing of a chapter becomes part of the page, in a box that scrolls where the window is
narrower than the drawing.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from mooncake_lab.book.figures.embed import inlined

DRAWN = "jupyter_execute"
"""The folder of `_build` for what chapters draw."""
BOX = '<div class="drawing pst-scrollable-table-container" role="group" aria-label="Figure, may scroll">{}</div>'
"""The theme lets a key reach a box of this class when it scrolls."""
AFTER_EMPTY_ONES_WENT = 310  # and before the collectors number the figures and copy images


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the change of each page; both sets of colours are in `figures.css`."""
    app.connect("doctree-read", put_into_page, priority=AFTER_EMPTY_ONES_WENT)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def put_into_page(app: Sphinx, doctree: nodes.document) -> None:
    """Replace the image of each figure by its drawing."""
    if app.builder.format != "html":
        return
    page = Path(app.env.doc2path(app.env.docname))
    for image in list(doctree.findall(nodes.image)):
        file = picture(app, page, image["uri"])
        if file is not None:
            drawing = inlined(file.read_text(encoding="utf-8"), f"d{file.stem[:8]}-", image["alt"])
            image.replace_self(nodes.raw("", BOX.format(drawing), format="html"))


def picture(app: Sphinx, page: Path, uri: str) -> Path | None:
    """The file of an image, if a chapter drew it."""
    file = Path(app.srcdir, uri.lstrip("/")) if uri.startswith("/") else page.parent / uri
    return file if file.suffix == ".svg" and file.parent.name == DRAWN else None
