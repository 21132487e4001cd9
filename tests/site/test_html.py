"""Pages as files: ids that are unique, and figures that show something."""

import re
from collections import Counter

import pytest

pytestmark = pytest.mark.site

SENDS_ON = 'http-equiv="Refresh"'


@pytest.fixture(scope="session")
def texts(site):
    """Every page by its name, but the one that only sends on to the front page."""
    found = {
        path.relative_to(site).as_posix(): path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
        if "_static" not in path.relative_to(site).parts
    }
    return {name: text for name, text in found.items() if SENDS_ON not in text}


def test_ids_are_unique(texts):
    """No page has two elements of one id, so that a link leads to one place."""
    repeated = {
        name: [each for each, count in Counter(re.findall(r'<[^>]*?\sid="([^"]+)"', text)).items() if count > 1]
        for name, text in texts.items()
    }
    assert {name: ids for name, ids in repeated.items() if ids} == {}


def test_a_figure_shows_a_picture(texts):
    """Nothing has a figure's number without a picture in it."""
    empty = [
        (name, figure[:120])
        for name, text in texts.items()
        for figure in re.findall(r"<figure\b.*?</figure>", text, re.DOTALL)
        if not re.search(r"<(img|svg|object)\b", figure)
    ]
    assert empty == []
