"""An executed notebook as one HTML page that asks nothing of any other machine.

The chapters are written for the book, whose prose knows directives (exercises, figures with captions) and roles
(terms, citations). Jupyter's own exporter shows those as source and loads scripts from elsewhere; this one writes
them as plain text and folded solutions, and pictures as part of the page.
"""

import base64
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from mooncake_lab.batch.notebook import Cell, joined, read_notebook

_FOLDED: Final = frozenset({"dropdown", "hint", "solution"})
"""Directives that show their content only when asked."""
_HIDDEN: Final = frozenset({"remove-cell", "remove-input", "hide-input"})
_LABEL: Final = re.compile(r"^:[\w-]+:.*\n?", re.MULTILINE)
_NAMED: Final = re.compile(r"^(.*?)\s*<.*>$", re.DOTALL)

_PAGE: Final = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<link rel="icon" href="data:,">
<style>$style</style>
</head>
<body><main>
$body
</main></body>
</html>
"""
)

_STYLE: Final = """
:root { color-scheme: light dark; --rule: #8886; --paper: #fff; --link: #00629a; --bad: #9b2226; }
@media (prefers-color-scheme: dark) { :root { --link: #6cb9e8; --bad: #f5a3a0; } }
body { font: 16px/1.6 system-ui, sans-serif; margin: 0; }
main { max-width: 56rem; margin: 0 auto; padding: 1rem; }
a { color: var(--link); }
pre { overflow-x: auto; padding: .7em; border: 1px solid var(--rule); border-radius: 6px; font-size: .82rem; }
pre.output { border-style: none none none solid; border-radius: 0; }
.failed { color: var(--bad); font-weight: 600; }
table { border-collapse: collapse; font-size: .9rem; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .3em .8em; border-bottom: 1px solid var(--rule); vertical-align: top; }
figure { margin: 1.5rem 0; } figure img, .output img { max-width: 100%; background: var(--paper); }
aside, details { border-left: 4px solid var(--link); padding: .1em 1em; margin: 1em 0; }
@media print { details:not([open]) > * { display: block; } }
"""


def page(title: str, body: str) -> str:
    """A whole HTML document.

    Args:
        title: plain text.
        body: HTML.
    """
    return _PAGE.substitute(title=escape(title), style=_STYLE, body=body)


def notebook_page(path: Path, *, title: str, back: str) -> str:
    """An executed notebook as a page.

    Args:
        path: the executed copy.
        title: of the page.
        back: where the index lies, relative to the page.
    """
    markdown = _markdown()
    notebook = read_notebook(path)
    cells = "\n".join(_cell(cell, markdown) for cell in notebook.cells)
    top = f'<p><a href="{back}">All notebooks of this batch</a></p>'
    return page(title, top + cells)


def _cell(cell: Cell, markdown: Any) -> str:
    if cell.cell_type == "markdown":
        return markdown.render(cell.text)
    code = "" if _HIDDEN & {*cell.tags} else _code(cell.text)
    outputs = "".join(_output(output) for output in cell.outputs)
    figure: Mapping[str, str] | None = cell.metadata.get("mystnb", {}).get("figure")
    if figure and "<img " in outputs:  # where nothing was drawn, the reason is no figure
        caption = markdown.renderInline(figure.get("caption", ""))
        outputs = f"<figure>{outputs}<figcaption>{caption}</figcaption></figure>"
    return code + outputs


def _code(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>" if text.strip() else ""


def _output(output: Mapping[str, Any]) -> str:
    match output["output_type"]:
        case "stream":
            return f'<pre class="output">{escape(joined(output["text"]))}</pre>'
        case "error":
            said = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output["traceback"]))
            return f'<pre class="output failed" id="error">{escape(said)}</pre>'
        case _:
            return _shown(output["data"], output.get("metadata", {}))


def _shown(data: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    alt = escape(str(metadata.get("alt", joined(data.get("text/plain", "figure")))))
    if svg := data.get("image/svg+xml"):
        content = base64.b64encode(joined(svg).encode()).decode()
        return f'<img alt="{alt}" src="data:image/svg+xml;base64,{content}">'
    if png := data.get("image/png"):
        return f'<img alt="{alt}" src="data:image/png;base64,{joined(png).strip()}">'
    if html := data.get("text/html"):
        return f'<div class="output">{joined(html)}</div>'
    return f'<pre class="output">{escape(joined(data.get("text/plain", "")))}</pre>'


def _markdown() -> Any:
    """Markdown as the chapters use it: tables, formulas, directives as boxes, roles as their words."""
    from markdown_it import MarkdownIt
    from mdit_py_plugins.colon_fence import colon_fence_plugin
    from mdit_py_plugins.dollarmath import dollarmath_plugin
    from mdit_py_plugins.myst_blocks import myst_block_plugin
    from mdit_py_plugins.myst_role import myst_role_plugin

    markdown = MarkdownIt("commonmark").enable("table")
    markdown.use(dollarmath_plugin, renderer=_formula, label_renderer=_no_label).use(colon_fence_plugin)
    markdown.use(myst_block_plugin).use(myst_role_plugin)

    def box(_: Any, tokens: Any, index: int, *__: Any) -> str:
        kind, _braces, title = tokens[index].info.strip().partition("}")
        if not kind.startswith("{"):
            return _code(tokens[index].content)
        kind, inner = kind[1:], markdown.render(_LABEL.sub("", tokens[index].content))
        named = title.strip() or kind.capitalize()
        if kind in _FOLDED:
            summary = named if kind == "dropdown" else kind.capitalize()  # the title of a solution is a label
            return f"<details><summary>{escape(summary)}</summary>{inner}</details>"
        if kind == "exercise" and title.strip():
            named = f"Exercise ({title.strip()})"
        return f"<aside><strong>{escape(named)}</strong>{inner}</aside>"

    def role(_: Any, tokens: Any, index: int, *__: Any) -> str:
        token = tokens[index]
        said = _NAMED.sub(r"\1", token.content)
        return escape(f"({said})" if token.meta["name"] in {"eq", "cite"} else said)

    for kind in ("fence", "colon_fence"):
        markdown.add_render_rule(kind, box)
    markdown.add_render_rule("myst_role", role)
    return markdown


def _formula(content: str, options: Mapping[str, Any]) -> str:
    from mooncake_lab.batch.formulas import mathml

    return mathml(content, display=options["display_mode"])


def _no_label(_: str) -> str:
    return ""
