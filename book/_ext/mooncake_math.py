# ruff: noqa: INP001 - Sphinx finds an extension by its file, not in a package
"""Formulas as MathML in the page, so that no page loads a script for them (`html_math_renderer: mathml`)."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

from mooncake_lab.batch.formulas import mathml

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
