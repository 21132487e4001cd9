"""Scripts and styles of the widgets: part of a notebook's output, one file for all pages in the book.

A notebook has no place for a file of its own beside it, so an output carries what it needs. Each part is marked
with its name (`data-shared`); the book replaces it by a reference to the file (`book/_ext/mooncake_widgets.py`).
"""

from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).with_name("static")
"""Where the files are."""


def embedded(*names: str) -> str:
    """Files of `static` as elements of a page, in this order.

    Raises:
        ValueError: when a name is neither that of a script nor of a style sheet.
    """
    return "".join(_element(name) for name in names)


def _element(name: str) -> str:
    kind = {".css": "style", ".js": "script"}.get(Path(name).suffix)
    if kind is None:
        raise ValueError(f"{name!r} cannot be embedded; allowed are .css and .js")
    return f'<{kind} data-shared="{name}">\n{(STATIC / name).read_text(encoding="utf-8")}</{kind}>'
