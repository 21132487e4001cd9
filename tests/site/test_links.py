"""The built book as files: needs no browser."""

import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from mooncake_lab.book.rendering.provenance import read_provenance

pytestmark = pytest.mark.site


class _Page(HTMLParser):
    """The links and anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if attributes.get("id"):
            self.anchors.add(attributes["id"])
        if tag == "a" and attributes.get("name"):
            self.anchors.add(attributes["name"])
        for name in ("href", "src"):
            if attributes.get(name):
                self.links.append(attributes[name])


@pytest.fixture(scope="session")
def pages(site):
    """Every page of the book, parsed."""
    return {
        path: _Page(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if "_static" not in path.relative_to(site).parts
    }


def test_links_lead_somewhere(pages):
    """Every local link names a file of the book, and every fragment an anchor on its page."""
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_figures_have_captions(site):
    """Every figure of a chapter has a number and a caption."""
    for path in site.glob("chapters/*.html"):
        text = path.read_text(encoding="utf-8")
        assert text.count("<figure") == text.count("<figcaption"), path.name


def test_pages_load_nothing_from_elsewhere(site):
    """No script, font or image is asked of another machine; links may lead there."""
    outward = re.compile(r"<(script|img|iframe|source)[^>]*\ssrc=.https?:|<link[^>]*stylesheet[^>]*https?:")
    for path in site.rglob("*.html"):
        assert not outward.search(path.read_text(encoding="utf-8")), path.name


def test_twin_banner_is_on_every_page_or_none(site, pages):
    """When twins stood in for released traces, each page says so; else none does."""
    provenance = read_provenance(site.parents[1] / "_generated")
    if provenance is None:
        pytest.skip("the book was moved away from the numbers it was made with")
    for path in pages:
        text = path.read_text(encoding="utf-8")
        if "http-equiv" in text and "Refresh" in text:  # the first page only sends on
            continue
        assert ("bd-header-announcement" in text) == bool(provenance.banner), path.name
