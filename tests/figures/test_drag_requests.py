"""Policies with a clock: what is seen when, and that nothing later changes what was before."""

from itertools import pairwise

import pytest

from mooncake_lab.batching import Limits, Orca, Progress
from mooncake_lab.figures.drag_requests import timed_plans

LIMITS = Limits(max_batch_tokens=64, max_requests=4, block_size_tokens=4, capacity_blocks=64, free_blocks=64)


def run(arrives_s, outputs):
    """Prompts of four tokens under Orca; a token takes a second."""
    requests = [Progress(request_id=i, arrival=i, prompt_tokens=4, max_new_tokens=8) for i in range(len(outputs))]
    return timed_plans(
        Orca(),
        requests,
        LIMITS,
        dict(enumerate(outputs)),
        arrives_s=dict(enumerate(arrives_s)),
        seconds=lambda plan: float(plan.new_tokens),
    )


def times(timed):
    """Start and end of each iteration."""
    return [(each.start_s, each.end_s) for each in timed]


def test_a_request_is_seen_by_the_first_iteration_that_starts_after_it():
    """It arrives during an iteration and is part of the next one, which is longer for it."""
    timed = run([0.0, 1.0], [3, 1])
    assert times(timed) == [(0, 4), (4, 9), (9, 10)]
    assert [len(each.step.plan.segments) for each in timed] == [1, 2, 1]


def test_the_clock_waits_where_nothing_is_there():
    """After a pause the next iteration starts with the arrival."""
    assert times(run([0.5, 20.0], [1, 2])) == [(0.5, 4.5), (20, 24), (24, 25)]


def test_what_comes_later_changes_nothing_before():
    """The iterations that start before an arrival are the same without it."""
    with_it, without = run([0.0, 2.0, 6.0], [5, 4, 3]), run([0.0, 2.0], [5, 4])
    before = [each for each in with_it if each.start_s < 6.0]
    assert len(before) == 2
    assert before == without[: len(before)]


def test_iterations_follow_each_other():
    """None starts before the one before has ended, or before the first request."""
    timed = run([0.25, 0.25, 9.0, 30.0], [2, 6, 1, 2])
    assert timed[0].start_s == pytest.approx(0.25)
    assert all(later.start_s >= earlier.end_s for earlier, later in pairwise(timed))
