"""The assignment on placement: its locked cells give what Algorithm 1 gives, without asking it."""

from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.conductor import KVCacheCentric, LatencyEstimator
from mooncake_lab.course.grading.cells import prepare
from mooncake_lab.course.grading.scheduling_assignments import _seen

SOURCE = Path(__file__).parents[2] / "notebooks" / "assignments" / "placement.ipynb"


@pytest.fixture(scope="module")
def cells():
    """What the teacher's cells define, tests left out."""
    names = {}
    for cell in prepare(SOURCE, SOURCE).code:
        exec(compile(cell.text, "<cell>", "exec"), names)  # noqa: S102  # the teacher's own cells
    return names


@pytest.mark.parametrize("sharing", [False, True])
def test_the_teachers_solution_is_algorithm_1(cells, sharing):
    """Prefill half, decode node and both estimates are those of `KVCacheCentric`, on clusters drawn by chance."""
    estimate = LatencyEstimator(paper_node_latency())
    decodes = set()
    for request, view in _seen("5", sharing=sharing):
        mine = cells["MyPlacement"]().place(request, view, estimate)
        ours = KVCacheCentric().place(request, view, estimate)
        assert mine.expected_ttft_s == pytest.approx(ours.expected_ttft_s, rel=1e-9)
        assert mine == replace(ours, expected_ttft_s=mine.expected_ttft_s, reason="mine")
        decodes.add(mine.decode)
    assert len(decodes) == 4, "every decode node is chosen at some time"
