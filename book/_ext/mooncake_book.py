# ruff: noqa: INP001 - Sphinx finds an extension by its file, not in a package
"""What this book needs of Sphinx besides configuration: banner, addresses, listings, corrections, a class's copy.

The banner says on every page that generated twins stood in for the released traces, when they did.
Launch links would name `book/chapters/`, which is generated; the notebooks that Binder and Colab can
open are in `notebooks/`. Chapters print functions of the package; what a cell prints is plain text to Sphinx,
so a print that is Python from its first word is coloured like code. The theme's side bar folds its sections
behind an arrow that says nothing to a reader who does not see it. Three parts of it write a viewport tag each, and
all exercises of a page have the same id inside. Its style sheet draws icons as a font, and a script of 1.5 MB
draws them again as pictures; it also loads the search on pages that do not search.
"""

import html
import os
import re
import textwrap
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.parsers import expat

import yaml
from bs4 import BeautifulSoup
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

from mooncake_lab.book.rendering.provenance import read_provenance
from mooncake_lab.book.rendering.render import WITHOUT_SOLUTIONS

GENERATED = "book/chapters/"
SOURCES = "notebooks/"
LISTING = re.compile(r"(@|def |class |from \w+ import )")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register all of it."""
    app.connect("doctree-read", colour_listings)
    app.connect("doctree-read", tell_exercises_apart)
    app.connect("config-inited", add_banner)
    app.connect("config-inited", set_address)
    app.connect("config-inited", leave_solutions_out)
    app.connect("builder-inited", leave_buttons_out)
    app.connect("doctree-resolved", close_tags, priority=900)  # after what others put into the page
    app.connect("html-page-context", describe_other_pages, priority=502)
    app.connect("html-page-context", point_at_sources, priority=502)  # after the theme made its buttons
    app.connect("build-finished", mend_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add_banner(app: Sphinx, config: Config) -> None:
    """Show the twin's banner, if the batch that made the chapters used twins."""
    provenance = read_provenance(Path(app.srcdir) / "_generated")
    if provenance and provenance.banner:
        banner = re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(provenance.banner))
        config.html_theme_options["announcement"] = banner


def set_address(app: Sphinx, config: Config) -> None:
    """Repository and version are those of `CITATION.cff`; the book's address follows, unless it is configured."""
    citation = yaml.safe_load((Path(app.srcdir).parent / "CITATION.cff").read_text(encoding="utf-8"))
    config.html_theme_options["repository_url"] = citation["repository-code"]
    config.version = str(citation["version"])
    owner, name = urlsplit(citation["repository-code"]).path.strip("/").split("/")
    config.ogp_site_url = config.ogp_site_url or f"https://{owner}.github.io/{name}/"


def leave_solutions_out(_app: Sphinx, config: Config) -> None:
    """For a class: no solutions on the pages, and no buttons to the notebooks, which contain them."""
    if os.environ.get(WITHOUT_SOLUTIONS):
        config.hide_solutions = True
        config.html_copy_source = False
        config.html_theme_options.update(use_download_button=False, launch_buttons={})


def leave_buttons_out(app: Sphinx) -> None:
    """An e-book has no buttons, and the theme would look for them."""
    if app.builder.name == "epub":
        app.config.html_theme_options["launch_buttons"] = {}


def close_tags(app: Sphinx, doctree: nodes.document, _page: str) -> None:
    """In an e-book, whose pages are XML, close the tags that HTML may leave open; what is XML already stays."""
    if app.builder.name == "epub":
        for raw in list(doctree.findall(nodes.raw)):
            if "html" in raw["format"] and not is_xml(raw.astext()):
                closed = str(BeautifulSoup(raw.astext(), "html.parser"))
                raw.replace_self(nodes.raw("", closed, format="html"))


def is_xml(text: str) -> bool:
    """Whether a piece of a page is well-formed by itself."""
    try:
        expat.ParserCreate().Parse(f"<div>{text}</div>", True)  # noqa: FBT003 - takes no keyword
    except expat.ExpatError:
        return False
    return True


def describe_other_pages(app: Sphinx, _page: str, _template: str, context: dict[str, Any], doctree: Any) -> None:
    """Describe a page that has no text of its own, such as the search; the others are described by their text."""
    if doctree is None:
        said = html.escape(app.config.html_title)
        context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{said}" />\n'


def tell_exercises_apart(_app: Sphinx, doctree: nodes.document) -> None:
    """Give the text of each exercise and solution an id of its own: all of a page have the same one."""
    for section in doctree.findall(nodes.section):
        if section["ids"] in (["exercise-content"], ["solution-content"]):
            section["ids"] = [f"{name}-content" for name in section.parent["ids"][:1]]


def colour_listings(_app: Sphinx, doctree: nodes.document) -> None:
    """Mark printed source code as Python, and shift methods to the left margin."""
    for block in doctree.findall(nodes.literal_block):
        code = textwrap.dedent(block.astext())
        if "stream" in block["classes"] and LISTING.match(code):
            block.replace_self(nodes.literal_block(code, code, language="python", classes=["output", "listing"]))


def point_at_sources(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Rewrite the theme's launch links."""
    for group in context.get("header_buttons", []):
        for button in group.get("buttons", []):
            if "url" in button and not button["url"].startswith("_sources"):
                button["url"] = button["url"].replace(GENERATED, SOURCES)


MENDED = {
    "<summary><span": '<summary aria-label="Show or hide the pages below"><span',  # an arrow has no name
    '<div role="list" class="citation-list">': '<div class="citation-list">',  # its children are no list items
}

ICON_SCRIPT = re.compile(r'<script[^>]* src="[^"]*scripts/fontawesome\.js[^"]*"></script>')

SEARCH_SCRIPTS = re.compile(
    r'<script[^>]* src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"></script>'
)

SEARCHES = "search.html"


VIEWPORT = re.compile(r'<meta name="viewport"[^>]*>')

SCROLLS = re.compile(
    r'(<div class="cell [^"]*tag_(?:scroll-output|output_scroll)[^"]*">(?:(?!<div class="cell ).)*?'
    r'<div class="cell_output docutils container")>',
    re.DOTALL,
)
"""The output of a cell that scrolls in a frame: who has no mouse must be able to reach it."""


def mend_pages(app: Sphinx, error: Exception | None) -> None:
    """Correct what the theme and docutils tell a screen reader."""
    if error is None and app.builder.format == "html":
        for page in Path(app.outdir).rglob("*.html"):
            text = mended = page.read_text(encoding="utf-8")
            mended = ICON_SCRIPT.sub("", mended)
            if page.name != SEARCHES:
                mended = SEARCH_SCRIPTS.sub("", mended)
            for wrong, right in MENDED.items():
                mended = mended.replace(wrong, right)
            first, tag, rest = mended.partition(next(iter(VIEWPORT.findall(mended)), "<body"))
            mended = first + tag + VIEWPORT.sub("", rest)
            mended = SCROLLS.sub(r'\1 tabindex="0" role="region" aria-label="Output, scrolls">', mended)
            if mended != text:
                page.write_text(mended, encoding="utf-8")
