"""Formulas as MathML."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from fontTools.ttLib import TTFont

from mooncake_lab.book.rendering.notebook import read_notebook

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "book" / "_ext"))
from mooncake_math import mathml  # noqa: E402  # Sphinx finds an extension by its file, not in a package

FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?!\$)([^$]+?)\$(?!\d)", re.DOTALL)


def elements(tex, **settings):
    """A formula's elements as `(kind, text)`, without the namespace."""
    formula = ET.fromstring(mathml(tex, **settings))  # noqa: S314 - our own output
    return [(each.tag.partition("}")[2], each.text) for each in formula.iter()]


def test_unknown_commands_are_refused():
    """A command that the translation would print as its name is an error."""
    with pytest.raises(ValueError, match=r"\\foo"):
        mathml(r"\foo x")


def test_formulas_are_drawn_as_tex_draws_them():
    """A number with commas is one number; limits are below a displayed maximum; names are close to parentheses."""
    assert [text for kind, text in elements("4{,}194{,}304") if kind == "mn"] == ["4,194,304"]
    assert [text for kind, text in elements("f(4, 194)") if kind == "mn"] == ["4", "194"]
    assert ("munder", None) in elements(r"\max_j x_j", display=True)
    assert ("munder", None) not in elements(r"\max_j x_j")
    assert re.search(r'<mo[^>]*rspace="0"[^>]*>max</mo><mo[^>]*>\(', mathml(r"\max(a)"))
    assert re.search(r'<mo[^>]*rspace="0.1667em"[^>]*>max</mo><mi>a', mathml(r"\max a"))


def test_every_formula_of_the_chapters_translates():
    """All formulas become MathML, and the font of the book has each of their characters."""
    font = TTFont(ROOT / "book" / "_static" / "fonts" / "STIXTwoMath.woff").getBestCmap()
    seen, missing = 0, set()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        prose = "\n\n".join(cell.text for cell in read_notebook(path).cells if cell.cell_type == "markdown")
        for found in FORMULA.finditer(re.sub(r"```.*?```|`[^`\n]*`", "", prose, flags=re.DOTALL)):
            shown = "".join(text or "" for _, text in elements(found[1] or found[2], display=bool(found[1])))
            missing |= {character for character in shown if ord(character) not in font}
            seen += 1
    assert seen > 100
    assert missing == set()
