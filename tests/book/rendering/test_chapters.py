"""What the book says about its chapters: times, figures, and the numbers to download."""

import json
import re
from pathlib import Path

import pytest

from mooncake_lab.book.rendering.chapters import (
    LINES_PER_MINUTE,
    PARTS,
    STEPS,
    WORDS_PER_MINUTE,
    chapter,
    life_strip,
    tables,
    verdict_counts,
)
from mooncake_lab.book.rendering.plan import topic_of


@pytest.fixture
def executed(tmp_path):
    """An executed chapter: a heading, 440 words of prose, 75 visible lines of code, and two figures, one drawn."""
    described = {"figure": {"name": "fig-a", "caption": "A curve."}, "image": {"alt": "It rises."}}
    drawn = {"output_type": "display_data", "data": {"image/svg+xml": ["<svg>", "</svg>"]}, "metadata": {}}
    prose = "# What is kept\n\n" + "word " * (2 * WORDS_PER_MINUTE)
    cells = [
        {"cell_type": "markdown", "source": prose},
        {"cell_type": "code", "source": "a = 1\n\n" * (3 * LINES_PER_MINUTE - 2)},
        {"cell_type": "code", "source": "folded = 1\n" * 400, "metadata": {"tags": ["hide-input"]}},
        {"cell_type": "code", "source": "more_words = 1 # that are code", "metadata": {"mystnb": described}},
        {"cell_type": "code", "source": "draw()", "metadata": {"mystnb": described}, "outputs": [drawn]},
    ]
    path = tmp_path / "07_store.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {"papermill": {"duration": 12.5}}}))
    return path


def test_reading_time_counts_prose_code_and_figures_and_run_time_is_measured(executed):
    """Two minutes of prose, three of code that is not folded, one and a half of figures; seconds as noted."""
    found = chapter(executed)
    assert (found.title, found.words, found.lines, found.figures) == ("What is kept", 443, 75, 2)
    assert (found.reading_min, found.run_s) == (7, 12.5)


def test_code_that_a_cell_prints_is_read(executed):
    """A listing counts as code, other output does not."""
    printed = [{"output_type": "stream", "name": "stdout", "text": ["def a():\n", "    return 1\n"]}]
    cells = [{"cell_type": "markdown", "source": "# A"}]
    cells += [
        {"cell_type": "code", "source": "print(inspect.getsource(a))", "outputs": printed},
        {"cell_type": "code", "source": "print(a)", "outputs": printed},
    ]
    executed.write_text(json.dumps({"cells": cells, "metadata": {}}))
    assert chapter(executed).lines == 4


def test_a_chapter_without_a_heading_is_refused(executed):
    """A table of chapters needs a name for each."""
    executed.write_text(json.dumps({"cells": [], "metadata": {}}))
    with pytest.raises(ValueError, match="has no heading"):
        chapter(executed)


def test_a_record_becomes_tables(tmp_path):
    """Rows, mappings and lists are tables by their names; plain values share one."""
    numbers = {
        "rows": [{"a": 1, "b": 2}, {"a": 3, "b": None}],
        "by_name": {"x": {"n": 1}, "y": {"n": 2}},
        "pairs": {"p": 0.5},
        "series": [1, 2, 3],
        "one": 4.0,
        "beside_papers": [
            {"verdict": "reproduced", "claim": "F1", "decides": True},
            {"verdict": "reproduced", "claim": "F2", "decides": True},
            {"verdict": "direction only", "claim": "F2", "decides": False},
        ],
    }
    path = tmp_path / "store.json"
    path.write_text(json.dumps({"topic": "store", "numbers": numbers}))
    found = tables(path)
    shapes = {name: table.shape for name, table in found.items()}
    assert shapes.pop("values") == (1, 2)
    assert shapes.pop("pairs") == (1, 2)
    assert shapes == {"rows": (2, 2), "by_name": (2, 2), "series": (3, 1), "beside_papers": (3, 3)}
    assert list(found["by_name"]["name"]) == ["x", "y"]
    assert verdict_counts(path) == {"reproduced": 2}


def test_every_chapter_has_its_steps():
    """Each chapter is about steps that there are, in their order, and no other topic is listed."""
    notebooks = Path(__file__).parents[3] / "notebooks"
    assert {topic_of(path) for path in notebooks.glob("*.ipynb")} == set(PARTS)
    for steps in PARTS.values():
        assert [step for step in STEPS if step in steps] == list(steps)


def test_a_strip_shows_all_steps_and_marks_those_of_the_chapter():
    """The list has the seven steps in order, only those of the chapter are strong, and its label says which."""
    html = life_strip("placement")
    assert re.findall(r"<li[^>]*>(?:<strong>)?([\w ]+)", html) == list(STEPS)
    assert re.findall(r"<strong>([\w ]+)</strong>", html) == list(PARTS["placement"])
    assert 'aria-label="In the life of a request, this chapter is about: decide, fetch prefix."' in html
    assert life_strip("scorecard") == ""
    with pytest.raises(ValueError, match="'gossip'"):
        life_strip("gossip")
