"""README, front page and scorecard say what the built book found."""

import pytest

from mooncake_lab.book.paper import headlines, scorecard
from mooncake_lab.book.paper.pages import with_results
from mooncake_lab.book.rendering.provenance import BOOK_TRACES, read_provenance

pytestmark = pytest.mark.site


def test_readme_and_book_agree(site):
    """The README's results are those of this book, if the book is the one the README speaks of."""
    numbers, readme = site.parents[1] / "_generated", site.parents[2] / "README.md"
    provenance = read_provenance(numbers)
    if not readme.is_file() or provenance is None:
        pytest.skip("the book was moved away from the numbers it was made with")
    if (provenance.scale, provenance.seed) != ("classroom", 0) or any(
        provenance.traces.get(name) is None for name in BOOK_TRACES
    ):
        pytest.skip("the README speaks of scale classroom, seed 0, on the released traces")
    text = readme.read_text(encoding="utf-8")
    assert with_results(text, numbers) == text, "the README is out of date; run `make readme`"


@pytest.mark.parametrize("page", ["intro.html", "chapters/13_scorecard.html"])
def test_front_page_and_scorecard_show_the_same_headlines(site, page):
    """Both show the eight rows of this book's numbers."""
    numbers = site.parents[1] / "_generated"
    if not numbers.is_dir():
        pytest.skip("the book was moved away from the numbers it was made with")
    assert headlines(scorecard(numbers))._repr_html_() in (site / page).read_text(encoding="utf-8")
