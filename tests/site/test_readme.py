"""The README says what the built book found."""

import pytest

from mooncake_lab.batch.provenance import BOOK_TRACES, read_provenance
from mooncake_lab.paper.readme import refreshed

pytestmark = pytest.mark.site


def test_readme_and_book_agree(site):
    """The README's verdict table is the one of this book, if the book is the one the README speaks of."""
    numbers, readme = site.parents[1] / "_generated", site.parents[2] / "README.md"
    provenance = read_provenance(numbers)
    if not readme.is_file() or provenance is None:
        pytest.skip("the book was moved away from the numbers it was made with")
    if (provenance.scale, provenance.seed) != ("classroom", 0) or any(
        provenance.traces.get(name) is None for name in BOOK_TRACES
    ):
        pytest.skip("the README speaks of scale classroom, seed 0, on the released traces")
    text = readme.read_text(encoding="utf-8")
    if "| claims |" not in text:
        pytest.skip("the README points at the scorecard and holds no numbers of its own")
    assert refreshed(text, numbers) == text, "the README is out of date; run `make readme`"
