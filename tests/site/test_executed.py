"""What the book was rendered from: every chapter executed to its end, silently, with its numbers on record."""

import json

import pytest

from mooncake_lab.book.rendering.notebook import read_notebook
from mooncake_lab.book.rendering.plan import topic_of

pytestmark = pytest.mark.site


def test_chapters_are_executed_and_silent(site):
    """Every code cell ran, none wrote on stderr, and the chapter's numbers are there."""
    book = site.parents[1]
    chapters = sorted((book / "chapters").glob("*.ipynb"))
    if not chapters:
        pytest.skip("the book was moved away from the chapters it was rendered from")
    for path in chapters:
        cells = [cell for cell in read_notebook(path).cells if cell.cell_type == "code"]
        assert {cell.metadata["papermill"]["status"] for cell in cells} == {"completed"}, path.name
        outputs = [output for cell in cells for output in cell.outputs]
        assert [output["text"] for output in outputs if output.get("name") == "stderr"] == [], path.name
        record = json.loads((book / "_generated" / f"{topic_of(path)}.json").read_text(encoding="utf-8"))
        assert record["numbers"], path.name
