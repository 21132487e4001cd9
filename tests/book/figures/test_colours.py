"""The colours of the figures, on light and on dark paper."""

import ast
import re
from pathlib import Path

import pytest
from colour_vision import contrast

from mooncake_lab.book.figures.colours import COLOURS, DARK, FRAME, css_property, letters

ROOT = Path(__file__).parents[3]
PAPERS = {"light": ("#FFFDF9", COLOURS), "dark": ("#121212", DARK)}
"""The pages' backgrounds and what is drawn on them."""


@pytest.mark.parametrize("paper", PAPERS)
def test_every_colour_is_visible_on_its_paper(paper):
    """A colour is written as hex, stands for one meaning, and contrasts with the page by at least 3:1."""
    ground, colours = PAPERS[paper]
    assert len(set(colours.values())) == len(colours)
    assert [name for name, colour in colours.items() if not re.fullmatch(r"#[0-9A-F]{6}", colour)] == []
    assert [name for name, colour in colours.items() if contrast(colour, ground) < 3.0] == []


def test_letters_are_legible_on_both_papers():
    """Letters that name something in its colour contrast with the page by at least 4.5:1, in both themes."""
    by_colour = {light: key for key, light in COLOURS.items()}
    for name, light in COLOURS.items():
        written = by_colour[letters(light)]
        assert all(contrast(colours[written], ground) >= 4.5 for ground, colours in PAPERS.values()), name


def properties(theme):
    """The lines of CSS that define each colour in a theme."""
    colours = {**(COLOURS, DARK)[theme], **{name: pair[theme] for name, pair in FRAME.items()}}
    return "\n".join(f"  {css_property(name)}: {each.lower()};" for name, each in colours.items())


def test_the_style_sheet_has_these_colours():
    """The page's properties are those of the dictionary: light everywhere, dark on screens, light on paper."""
    sheet = (ROOT / "book" / "_static" / "figures.css").read_text(encoding="utf-8")
    everywhere, _, screens = sheet.partition("@media screen {")
    assert properties(0) in everywhere
    assert properties(1).replace("  ", "    ") in screens.partition("\n}\n")[0]
    assert "--fig" not in screens.partition("@media print {")[2]  # paper keeps the light ones


def test_the_widgets_fall_back_to_these_colours():
    """Where a page has no properties, a widget shows the light colour of the same meaning."""
    css = (ROOT / "mooncake_lab" / "book" / "figures" / "static" / "widgets.css").read_text(encoding="utf-8")
    found = re.findall(r"var\((--fig-[\w-]+), (#[0-9a-f]{6})\)", css)
    light = {css_property(name): colour.lower() for name, colour in COLOURS.items()}
    assert len(found) >= 2
    assert all(light[name] == colour for name, colour in found)


def test_figures_draw_with_named_colours_only():
    """No module names a colour of its own, which would have no dark variant."""
    hexes = {
        (path.name, node.value)
        for path in (ROOT / "mooncake_lab" / "book" / "figures").glob("*.py")
        if path.name != "colours.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"#[0-9a-fA-F]{6}", node.value) and node.value.lower() != "#ffffff"
    }
    assert hexes == set()
