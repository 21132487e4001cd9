"""Verdicts near the end of a band do not depend on the seeds that were drawn."""

import pytest

from mooncake_lab.book.chapters.pipeline import serving
from mooncake_lab.book.chapters.pipeline.claims import (
    ABLATION_SEEDS,
    SHIPPED_BUDGET,
    ablation,
    ablation_points,
    capacity_ratios,
    ideas_apart,
)
from mooncake_lab.book.experiments import run


def verdicts(rows):
    """Each claim's verdict."""
    return {row.claim: row.verdict for row in rows}


@pytest.mark.slow
def test_another_draw_of_requests_gives_the_same_verdicts_on_each_idea():
    """With 48 other seeds, Table 4 of Sarathi-Serve is judged alike."""
    both = [
        ideas_apart(ablation(run(ablation_points("classroom", seed=first))), SHIPPED_BUDGET)
        for first in (0, ABLATION_SEEDS)
    ]
    assert verdicts(both[1]) == verdicts(both[0])


@pytest.mark.slow
def test_another_draw_of_requests_gives_the_same_verdicts_on_capacities():
    """With other seeds, the ratios of capacities that Sarathi-Serve prints are judged alike."""
    both = [capacity_ratios(serving.over_vllm(run(serving.cells("classroom", seed=first)))) for first in (0, 100)]
    assert verdicts(both[1]) == verdicts(both[0])
