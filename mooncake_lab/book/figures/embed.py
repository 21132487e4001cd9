"""Figures and widgets as parts of a page: shared scripts and styles, and drawings in the page's colours.

A notebook has no place for a file of its own beside it, so an output carries what it needs. Each part is marked
with its name (`data-shared`); the book replaces it by a reference to the file (`book/_ext/mooncake_widgets.py`).
Notebooks hold a plain SVG on white, which any viewer shows. The page takes the same drawing into its HTML, where
text can be selected and found, and each colour is a custom property with the light value as fallback.
"""

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mooncake_lab.book.figures.colours import COLOURS, FRAME, GROUND, css_property
from mooncake_lab.book.paper import Scorecard

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


_COLOUR: Final = re.compile(r"#[0-9a-fA-F]{6}\b")
_ID: Final = re.compile(r'\b(id="|href="#|url\(#)')
_PROLOGUE: Final = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        GROUND.lower(): css_property("ground"),
        **{light.lower(): css_property(name) for name, (light, _) in FRAME.items()},
        **{light.lower(): css_property(name) for name, light in COLOURS.items()},
    }
)


def inlined(svg: str, prefix: str, alt: str) -> str:
    """The SVG of a figure, prepared for embedding in a page.

    Args:
        svg: what the notebook holds.
        prefix: begins the ids of the drawing, so that they differ from those of other drawings on the page.
        alt: what a screen reader reads instead.
    """
    drawing = _ID.sub(rf"\g<1>{prefix}", _PROLOGUE.sub("", svg, count=1))
    drawing = _COLOUR.sub(_property, drawing)
    return drawing.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1)


def _property(colour: re.Match[str]) -> str:
    known = _PROPERTIES.get(colour[0].lower())
    return f"var({known}, {colour[0]})" if known else colour[0]


@dataclass(frozen=True, slots=True)
class ClaimsTable:
    """All claims of a card; without scripts the whole table is there."""

    card: Scorecard

    def _repr_html_(self) -> str:
        papers = json.dumps([row.claim.fact.edition for row in self.card.rows]).replace("<", "\\u003c")
        return (
            f'<div class="claims-table" id="claims">{self.card.html()}'
            f'<script type="application/json">{papers}</script></div>' + embedded("widgets.css", "claims_table.js")
        )
