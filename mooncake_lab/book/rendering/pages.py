"""An executed notebook as HTML that loads nothing from another machine.

nbconvert writes the page. It knows Markdown, but not MyST, in which the chapters are written for the book: before
that, directives become quotations and folded parts, roles become their words, and formulas become MathML.
"""

import re
from pathlib import Path
from typing import Any, Final

from latex2mathml.converter import convert

_DIRECTIVE: Final = re.compile(
    r"^(?P<fence>`{3,}|:{3,})\{(?P<kind>[\w-]+)\}[ \t]*(?P<title>.*)\n(?::[\w-]+:.*\n)*"
    r"(?P<body>(?s:.*?))^(?P=fence)[ \t]*$",
    re.MULTILINE,
)
_FOLDED: Final = frozenset({"dropdown", "hint", "solution"})
_INLINE: Final = re.compile(
    r"(?P<code>^```(?s:.*?)^```|`[^`\n]+`)"
    r"|\{(?P<role>[\w:-]+)\}`(?P<said>[^`<]*?)\s*(?:<[^`]*>)?`"
    r"|\$\$(?P<block>(?s:.+?))\$\$(?:[ \t]*\((?P<label>[\w-]+)\))?"
    r"|(?<![\\$])\$(?P<inline>[^$]+?)\$",
    re.MULTILINE,
)


def notebook_html(path: Path) -> str:
    """The cells of an executed notebook as the body of a page."""
    import nbformat
    from nbconvert import HTMLExporter  # takes a second to import
    from traitlets.config import Config

    notebook: Any = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = plain_markdown(cell.source)
    removed = {"remove_cell_tags": {"remove-cell"}, "remove_input_tags": {"remove-input", "hide-input"}}
    config = Config(TagRemovePreprocessor={"enabled": True, **removed})
    body, _ = HTMLExporter(template_name="basic", exclude_anchor_links=True, config=config).from_notebook_node(
        notebook
    )
    return body


def plain_markdown(text: str) -> str:
    """MyST as Markdown with some HTML; a colon that begins a line makes no definition list."""
    return re.sub(r"^: ", "&#58; ", _INLINE.sub(_inline, _DIRECTIVE.sub(_directive, text)), flags=re.MULTILINE)


def _directive(found: re.Match[str]) -> str:
    kind, title, body = found["kind"], found["title"].strip(), _DIRECTIVE.sub(_directive, found["body"]).strip()
    if kind in _FOLDED:
        summary = title if kind == "dropdown" else kind.capitalize()  # the title of a solution is a label
        return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"
    heading = f"**{kind.capitalize()}**" + (f" ({title})" if title else "")
    return "\n".join(f"> {line}".rstrip() for line in (heading, "", *body.splitlines()))


def _inline(found: re.Match[str]) -> str:
    if found["code"] is not None:
        return found["code"]
    if found["role"] is not None:
        return f"({found['said']})" if found["role"] in {"cite", "eq"} else found["said"]
    if found["block"] is None:
        return convert(found["inline"].strip())
    label = "" if found["label"] is None else f" ({found['label']})"
    return convert(found["block"].strip(), display="block") + label
