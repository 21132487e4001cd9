"""The capacity assignment: prices, traces of three kinds, and forecasts that can be checked."""

import random

import pytest

from mooncake_lab.course.capacity import (
    BUDGET,
    KINDS,
    affordable,
    best_share,
    check_capacity,
    clear_cases,
    cost_of,
    draw_trace,
    problem_of,
    within_limits,
)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"prefill": 4, "decode": 4, "cache_tokens": 0}, ""),
        ({"prefill": 4, "decode": 3, "cache_tokens": 500_000}, ""),
        ({"prefill": 4, "decode": 4, "cache_tokens": 1}, "the cluster costs 80.0 per hour; the budget is 80.0"),
        ({"prefill": 5, "decode": 4, "cache_tokens": 0}, "the cluster costs 90.0 per hour; the budget is 80.0"),
        ({"prefill": 0, "decode": 4, "cache_tokens": 0}, "prefill is 0; at least 1 is needed"),
        ({"prefill": 1, "decode": -1, "cache_tokens": 0}, "decode is -1; at least 1 is needed"),
        ({"prefill": 1, "decode": 1, "cache_tokens": -1}, "cache_tokens is -1; at least 0 is needed"),
        ({"prefill": 1}, "a cluster has prefill, decode, cache_tokens; the answer has prefill"),
        ({}, "a cluster has prefill, decode, cache_tokens; the answer has nothing"),
    ],
)
def test_what_is_no_cluster_within_the_budget_is_named(choice, said):
    """The sentence has the value and what is allowed."""
    assert problem_of(choice, BUDGET) == said


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_has_prefixes_and_arrivals_in_order(kind):
    """A prompt has a key per block, arrivals rise, and the same name draws the same trace."""
    trace = draw_trace(kind, "Ada")
    assert trace == draw_trace(kind, "Ada") != draw_trace(kind, "Bob")
    assert all(len(keys) == -(-tokens // 512) for _, tokens, _, keys in trace)
    assert [row[0] for row in trace] == sorted(row[0] for row in trace)
    fast = draw_trace(kind, "Ada", 2.0)
    assert fast[-1][0] == pytest.approx(trace[-1][0] / 2, abs=0.01)
    assert [row[1:] for row in fast] == [row[1:] for row in trace]


def test_only_chats_come_back():
    """Most blocks of chats were seen before, and hardly any of the other kinds."""
    for kind in KINDS:
        seen, again, total = set(), 0, 0
        for *_, keys in draw_trace(kind, 1):
            again, total = again + len(seen & {*keys}), total + len(keys)
            seen.update(keys)
        assert (again / total > 0.6) == (kind == "chats")
        assert again / total < 0.1 or kind == "chats"


def test_every_affordable_cluster_is_within_the_budget():
    """And all splits of the nodes without memory are among them."""
    for kind in KINDS:
        found = list(affordable(kind, BUDGET))
        assert all(problem_of(choice, BUDGET) == "" for choice in found)
        assert all(BUDGET - cost_of(choice) < 10 for choice in found)
        assert {choice["prefill"] for choice in found if not choice["cache_tokens"]} == {*range(1, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_cluster_is_the_best_of_all_that_are_affordable(kind):
    """The search that stops early finds what a search through all finds, up to 1 %."""
    trace = draw_trace(kind, 5)
    best = max(within_limits(choice, trace)[0] for choice in affordable(kind, BUDGET))
    assert best_share(kind, trace, BUDGET) >= best - 0.01
    assert best > 0.9


def test_forecasts_cannot_be_counted():
    """Of the clear cases half break each limit, and clusters with more prefill nodes break both."""
    cases = list(clear_cases(random.Random(2)))
    limits = [limit for *_, limit in cases]
    assert limits.count("ttft") == limits.count("tbt") == 4
    more_prefill = [choice["prefill"] >= choice["decode"] for _, choice, _ in cases]
    assert {limit for limit, more in zip(limits, more_prefill, strict=True) if more} == {"ttft", "tbt"}
    trace, choice, limit = cases[0]
    _, late, slow = within_limits(choice, trace)
    assert (limit == "ttft") == (late > slow)


def test_an_answer_that_is_no_cluster_is_reported():
    """The report names the problem and goes on."""
    report = check_capacity(lambda *_: {"prefill": 99, "decode": 1, "cache_tokens": 0}, lambda *_: "ttft", "Ada")
    assert len(report.problems) == len(KINDS)
    assert "the cluster costs 1000.0 per hour; the budget is 80.0" in str(report)
