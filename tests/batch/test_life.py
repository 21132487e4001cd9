"""Where in the life of a request a chapter is."""

import re
from pathlib import Path

import pytest

from mooncake_lab.batch.chapters import PARTS, STEPS, life_sentence, life_strip
from mooncake_lab.batch.plan import topic_of

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def test_every_chapter_has_its_steps():
    """Each chapter is about steps that there are, in their order, and no other topic is listed."""
    assert {topic_of(path) for path in NOTEBOOKS.glob("*.ipynb")} == set(PARTS)
    for steps in PARTS.values():
        assert [step for step in STEPS if step in steps] == list(steps)


def test_a_strip_shows_all_steps_and_marks_those_of_the_chapter():
    """The list has the seven steps in order, and only those of the chapter are strong."""
    html = life_strip("placement")
    assert re.findall(r"<li[^>]*>(?:<strong>)?([\w ]+)", html) == list(STEPS)
    assert re.findall(r"<strong>([\w ]+)</strong>", html) == list(PARTS["placement"])


def test_a_strip_says_what_it_shows():
    """Whoever does not see the list hears the same, and a chapter about everything says so."""
    assert 'aria-label="In the life of a request, this chapter is about: decide, fetch prefix."' in life_strip(
        "placement"
    )
    assert life_sentence("live").endswith("every step.")


def test_a_chapter_that_sums_up_has_no_strip():
    """Nothing stands out where no step is meant."""
    assert life_strip("scorecard") == ""


def test_an_unknown_topic_is_refused():
    """A new chapter has to say where it is."""
    with pytest.raises(ValueError, match="'gossip'"):
        life_strip("gossip")
