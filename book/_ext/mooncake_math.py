# ruff: noqa: INP001 - Sphinx finds an extension by its file, not in a package
"""Formulas as MathML in the page, so that no page loads a script for them (`html_math_renderer: mathml`).

latex2mathml translates; what follows corrects what a browser would draw otherwise than TeX: the space around the
names of functions, commas inside numbers, and columns that are aligned to the left.
"""

import re
from typing import Any, Final
from xml.etree import ElementTree as ET

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

LOGGER = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """A formula in a line of text."""
    translator.body.append(f'<span class="math">{translated(node, display=False)}</span>')
    raise nodes.SkipNode


def write_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """A formula on a line of its own, with its number where it has one."""
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    if node["number"]:
        translator.body.append(f'<span class="eqno">({get_node_equation_number(translator, node)})')
        translator.add_permalink_ref(node, "Link to this equation")
        translator.body.append("</span>")
    translator.body.append(f"{translated(node, display=True)}</div>\n")
    raise nodes.SkipNode


def translated(node: nodes.Element, *, display: bool) -> str:
    """The formula as MathML; a warning, which fails the build, where that cannot be."""
    try:
        return mathml(node.astext(), display=display)
    except ValueError as error:
        LOGGER.warning("%s", error, location=node)
        return ""


_UNKNOWN: Final = re.compile(r"\\[A-Za-z]+")
_MATHML: Final = "http://www.w3.org/1998/Math/MathML"
_OPENING: Final = frozenset("([{⌈⌊|‖")
_SPACED: Final = {"/": "0", "|": "0", "‖": "0", ":": "0.2778em", "⟺": "0.2778em"}
"""The space that TeX sets on both sides of an operator, where the browsers' dictionary has another."""
_OPERATORS: Final = frozenset({":", "⟺", "sin", "cos", "log", "exp"})
"""What the translation takes for identifiers."""
_LIMITS: Final = frozenset({"max", "min"})
_ROWS: Final = frozenset({"math", "mrow", "mstyle", "mtd"})


def mathml(tex: str, *, display: bool = False) -> str:
    """A formula as a `math` element.

    Args:
        tex: in LaTeX, without dollar signs.
        display: whether it has a line of its own.

    Raises:
        ValueError: naming the commands that the translation does not know.
    """
    text = convert(tex.strip(), display="block" if display else "inline")
    unknown = _UNKNOWN.findall(text)
    if unknown:
        raise ValueError(f"the formula {tex!r} has {', '.join(unknown)}, which cannot be translated to MathML")
    ET.register_namespace("", _MATHML)
    formula: Any = ET.fromstring(text)  # noqa: S314 - the translation's own output
    for parent in formula.iter():
        if _kind(parent) == "mi" and parent.text in _OPERATORS:
            parent.tag = f"{{{_MATHML}}}mo"
        _join_numbers(parent)
        _space_operator(parent)
        if _kind(parent) in _ROWS:
            _close_up_names(parent)
        if display and _kind(parent) == "msub" and parent[0].text in _LIMITS:
            parent.tag = f"{{{_MATHML}}}munder"
        if align := parent.attrib.pop("columnalign", None):
            parent.set("style", f"text-align: {align}")
    formula.set("alttext", tex.strip())
    return ET.tostring(formula, encoding="unicode")


def _join_numbers(parent: Any) -> None:
    """Make one number of 327, a comma in braces, and 680."""
    children = list(parent)
    for before, comma, after in zip(children, children[1:], children[2:], strict=False):
        if _kind(before) == "mn" and _is_braced_comma(comma) and _kind(after) == "mn":
            after.text = f"{before.text},{after.text}"
            parent.remove(before)
            parent.remove(comma)


def _is_braced_comma(element: Any) -> bool:
    return _kind(element) == "mrow" and [child.text for child in element] == [","]


def _space_operator(element: Any) -> None:
    if _kind(element) == "mo" and "fence" not in element.attrib and element.text in _SPACED:
        element.attrib.update(lspace=_SPACED[element.text], rspace=_SPACED[element.text], stretchy="false")


def _close_up_names(parent: Any) -> None:
    """Set no space between the name of a function and its argument's parenthesis, and a thin one elsewhere."""
    children = list(parent)
    for child, after in zip(children, [*children[1:], None], strict=False):
        named = child if _kind(child) == "mo" else next(iter(child), None)
        if named is None or _kind(named) != "mo" or not (named.text or "").isalpha() or len(named.text) < 2:
            continue
        closed = after is not None and after.text in _OPENING
        named.set("lspace", "0.1667em" if child is not children[0] else "0")
        named.set("rspace", "0" if closed else "0.1667em")


def _kind(element: Any) -> str:
    return element.tag.removeprefix(f"{{{_MATHML}}}")
