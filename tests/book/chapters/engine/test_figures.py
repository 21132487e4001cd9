"""The figures of the engine chapter."""

import pytest
from figure_laws import FigureLaws

from mooncake_lab.book.chapters.engine import experiment as engine
from mooncake_lab.book.chapters.engine import figures as draw
from mooncake_lab.book.experiments import run, vary

NAMES = ["chart", "reuse", "race"]


@pytest.fixture(scope="module")
def figures():
    """Every figure of the chapter, by name."""
    tiny = engine.FourRequests(model="lab-tiny", rounds=1)
    charts = run(vary(tiny, policy=("vllm", "sarathi_serve")), cache=False)
    questions = vary(
        engine.SharedPrefixQuestions(questions=2), arrive=("one by one", "at once"), reuse=(False, True)
    )
    raced = engine.Race(model="lab-tiny", context_tokens=8, batches=(1,), steps=3, burst=2, rounds=2)
    return {
        "chart": draw.chart(charts),
        "reuse": draw.reuse(run(questions, cache=False)),
        "race": draw.race(run(raced, cache=False)),
    }


@pytest.mark.parametrize("name", NAMES)
class TestEvery(FigureLaws):
    """Laws of every figure."""


def test_every_policy_of_the_chapter_has_a_name():
    """The chart calls each policy by the system it comes from."""
    assert set(draw.LABELS) == set(engine.POLICIES)


def test_decodes_are_hatched_and_prefills_are_not(figures):
    """A box is hatched if and only if it is a decode."""
    hatches = {patch.get_hatch() or "" for axes in figures["chart"].axes for patch in axes.patches}
    assert hatches == {"", "///"}
