"""A figure as part of a page: its colours follow the page's theme, and its ids are its own.

Notebooks hold a plain SVG on white, which any viewer shows. The page takes the same drawing into its HTML, where
text can be selected and found, and each colour is a custom property with the light value as fallback.
"""

import html
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from mooncake_lab.figures.colours import COLOURS, FRAME, GROUND, css_property

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
