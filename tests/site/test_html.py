"""What the pages tell programs: ids, viewport, descriptions, and figures that are figures."""

import re
from collections import Counter
from pathlib import PurePosixPath

import pytest

from mooncake_lab.book.paper.scorecard import chapter_number

pytestmark = pytest.mark.site

SENDS_ON = 'http-equiv="Refresh"'
OPEN_GRAPH = ("og:title", "og:type", "og:url", "og:site_name", "og:description")


@pytest.fixture(scope="session")
def texts(site):
    """Every page by its name, but the one that only sends on to the front page."""
    found = {
        path.relative_to(site).as_posix(): path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
        if "_static" not in path.relative_to(site).parts
    }
    return {name: text for name, text in found.items() if SENDS_ON not in text}


def head(text):
    """What lies between the head tags."""
    return text.partition("<head>")[2].partition("</head>")[0]


def test_ids_are_unique(texts):
    """No page has two elements of one id, so that a link leads to one place."""
    repeated = {
        name: [each for each, count in Counter(re.findall(r'<[^>]*?\sid="([^"]+)"', text)).items() if count > 1]
        for name, text in texts.items()
    }
    assert {name: ids for name, ids in repeated.items() if ids} == {}


def test_every_page_describes_itself(texts):
    """A search engine finds a description on each page, and a different one on each chapter."""
    said = {
        name: re.findall(r'<meta name="description" content="([^"]+)"', head(text)) for name, text in texts.items()
    }
    assert {name: found for name, found in said.items() if len(found) != 1} == {}
    chapters = [found[0] for name, found in said.items() if name.startswith("chapters/")]
    assert len(set(chapters)) == len(chapters)


def test_every_written_page_has_open_graph_tags(texts):
    """A page that somebody shares comes with title, address and description; search and index have no text."""
    for name, text in texts.items():
        if name in {"search.html", "genindex.html", "py-modindex.html"}:
            continue
        missing = [tag for tag in OPEN_GRAPH if f'property="{tag}"' not in head(text)]
        assert missing == [], name
        address = re.search(r'property="og:url" content="([^"]+)"', text)[1]
        assert re.fullmatch(r"https://[^/]+/.*" + re.escape(name), address)


def test_a_figure_shows_a_picture(texts):
    """Nothing has a figure's number without a picture in it."""
    empty = [
        (name, figure[:120])
        for name, text in texts.items()
        for figure in re.findall(r"<figure\b.*?</figure>", text, re.DOTALL)
        if not re.search(r"<(img|svg|object)\b", figure)
    ]
    assert empty == []


def test_figures_are_numbered_without_a_gap(texts):
    """The figures of each chapter have its number and count from one; figures of other pages have no number."""
    for name, text in texts.items():
        numbers = re.findall(r'caption-number">Figure (\S+) ', text)
        path = PurePosixPath(name)
        chapter = chapter_number(path.stem) if path.parent.name == "chapters" else None
        expected = [f"{chapter}.{count}" for count in range(1, len(numbers) + 1)] if chapter else []
        assert numbers == expected, name
