# ruff: noqa: INP001 - Sphinx finds an extension by its file, not in a package
"""What this book needs of Sphinx besides configuration: a banner, and launch links to the sources.

The banner says on every page that generated twins stood in for the released traces, when they did.
Launch links would name `book/chapters/`, which is generated; the notebooks that Binder and Colab can
open are in `notebooks/`.
"""

import html
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

from mooncake_lab.batch.provenance import read_provenance

GENERATED = "book/chapters/"
SOURCES = "notebooks/"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register both."""
    app.connect("config-inited", add_banner)
    app.connect("html-page-context", point_at_sources, priority=502)  # after the theme made its buttons
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add_banner(app: Sphinx, config: Config) -> None:
    """Show the twin's banner, if the batch that made the chapters used twins."""
    provenance = read_provenance(Path(app.srcdir) / "_generated")
    if provenance and provenance.banner:
        banner = re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(provenance.banner))
        config.html_theme_options["announcement"] = banner


def point_at_sources(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Rewrite the theme's launch links."""
    for group in context.get("header_buttons", []):
        for button in group.get("buttons", []):
            if "url" in button and not button["url"].startswith("_sources"):
                button["url"] = button["url"].replace(GENERATED, SOURCES)
