"""The assignment on placement: its locked cells give what Algorithm 1 gives, without asking it."""

from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.conductor import KVCacheCentric, LatencyEstimator
from mooncake_lab.course.grading.cells import prepare
from mooncake_lab.course.grading.scheduling_assignments import (
    _easily_forgotten,
    _equal_matches,
    _one_holder,
    clusters,
)
from mooncake_lab.course.placement import ttft_saved_share

SOURCE = Path(__file__).parents[2] / "notebooks" / "assignments" / "placement.ipynb"


@pytest.fixture(scope="module")
def cells():
    """What the teacher's cells define, tests left out."""
    names = {}
    for cell in prepare(SOURCE, SOURCE).code:
        exec(compile(cell.text, "<cell>", "exec"), names)  # noqa: S102  # the teacher's own cells
    return names


@pytest.mark.parametrize("kind", [_equal_matches, _one_holder, _easily_forgotten])
def test_the_teachers_solution_is_algorithm_1(cells, kind):
    """Prefill half, decode node and both estimates are those of `KVCacheCentric`, on clusters drawn by chance."""
    estimate = LatencyEstimator(paper_node_latency())
    decodes = set()
    for request, view in clusters(kind, "5"):
        mine = cells["MyPlacement"]().place(request, view, estimate)
        ours = KVCacheCentric().place(request, view, estimate)
        assert mine.expected_ttft_s == pytest.approx(ours.expected_ttft_s, rel=1e-9)
        assert mine == replace(ours, expected_ttft_s=mine.expected_ttft_s, reason="mine")
        decodes.add(mine.decode)
    assert len(decodes) == 4, "every decode node is chosen at some time"


def test_algorithm_1_saves_nothing_and_the_teachers_own_policy_a_tenth(cells):
    """The share is measured against Algorithm 1, and a policy that keeps nodes for short prompts saves more."""
    assert ttft_saved_share(KVCacheCentric(), 3) == 0.0
    assert ttft_saved_share(cells["MyBetterPlacement"](), 3) > 0.1
