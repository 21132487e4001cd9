# ruff: noqa: INP001 - Sphinx finds an extension by its file, not in a package
"""Scripts and styles of widgets are files of the book, where the outputs of notebooks carry them along."""

import re
from typing import Any
from zlib import crc32

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

from mooncake_lab.book.figures.embed import STATIC

SHARED = re.compile(r'<(script|style) data-shared="([\w.]+)">.*?</\1>', re.DOTALL)
STYLE = "widgets.css"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the files and the replacement."""
    app.connect("config-inited", add_files)
    app.connect("doctree-read", share)
    app.add_css_file(STYLE)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add_files(_app: Sphinx, config: Config) -> None:
    """Copy the package's scripts and styles beside the book's own."""
    config.html_static_path.append(str(STATIC))


def share(app: Sphinx, doctree: nodes.document) -> None:
    """Load a script where an output would carry it; a style is loaded by each page already."""
    up = "../" * app.env.docname.count("/")

    def reference(found: re.Match[str]) -> str:
        if found[1] == "style":
            return ""
        return f'<script defer src="{up}_static/{found[2]}?v={version(found[2])}"></script>'

    for node in doctree.findall(nodes.raw):
        text = node.astext()
        if "data-shared=" in text:
            node.replace_self(nodes.raw(text, SHARED.sub(reference, text), format=node["format"]))


def version(name: str) -> str:
    """Changes with the file, so that a browser does not keep an old one."""
    return f"{crc32((STATIC / name).read_bytes()):08x}"
