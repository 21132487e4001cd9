"""Placement by hand: Algorithm 1 and the policies it is compared with."""

import math
from dataclasses import replace

import pytest

from mooncake_lab.conductor import (
    PLACEMENT_POLICIES,
    ClusterView,
    DecodeView,
    KVCacheCentric,
    LoadBalance,
    PrefillView,
    Random,
    SessionAffinity,
    named_placement,
    select_decode,
)
from mooncake_lab.core import Request


class Estimate:
    """A millisecond a computed token, a tenth of that a moved one."""

    fetches_by_layer = False

    def prefill_s(self, _request_id, input_tokens, reused_tokens):
        return (input_tokens - reused_tokens) * 1e-3

    def transfer_s(self, tokens, flows):
        return tokens * 1e-4 * (flows + 1)

    def decode_step_s(self, requests, _context_tokens):
        return 0.01 * requests


def request(i=0, blocks=10) -> Request:
    return Request(id=i, arrival_s=0.0, input_tokens=blocks * 512, block_keys=tuple(range(blocks)))


def view(*rows) -> ClusterView:
    """Rows of (backlog_s, matched_blocks) make the prefill pool; the decode pool has one idle instance."""
    prefill = tuple(PrefillView(f"p{i}", backlog, i, 10 - i, matched) for i, (backlog, matched) in enumerate(rows))
    return ClusterView(0.0, prefill, (DecodeView("d0", 0, 0, 10**6),))


class TestAlgorithm1:
    def test_first_minimum_wins(self):
        """Equal instances: the first in the view."""
        assert KVCacheCentric().place(request(), view((1.0, 3), (1.0, 3)), Estimate()).prefill == "p0"

    def test_the_editions_differ_at_equality(self):
        """At best = threshold x local, arXiv counts a transfer it then does not make; FAST'25 does neither."""
        tie = view((0.0, 4), (90.0, 8))
        fast, arxiv = (
            KVCacheCentric(2.0, edition).place(request(), tie, Estimate()) for edition in ("fast", "arxiv")
        )
        assert fast.fetch_from is arxiv.fetch_from is None
        assert fast.expected_ttft_s == pytest.approx(6 * 0.512)
        assert arxiv.expected_ttft_s == pytest.approx(2 * 0.512 + 4 * 0.0512)

    def test_the_last_token_is_always_computed(self):
        """A whole prompt in the cache leaves one token to compute."""
        placed = KVCacheCentric().place(request(), view((0.0, 10)), Estimate())
        assert placed.reused_tokens == 10 * 512 - 1


class TestComparedWith:
    def test_load_balance_means_what_its_metric_says(self):
        """The three readings of load choose three different instances."""
        pool = (
            PrefillView("p0", 1.0, 5, 9, 0),
            PrefillView("p1", 2.0, 1, 8, 0),
            PrefillView("p2", 3.0, 3, 2, 0),
        )
        seen = ClusterView(0.0, pool, view((0, 0)).decode)
        metrics = ("backlog_s", "queued_requests", "assigned_requests")
        assert [LoadBalance(m).place(request(), seen, Estimate()).prefill for m in metrics] == ["p0", "p1", "p2"]

    def test_load_balance_takes_turns_among_equals(self):
        """Of equals the one with fewest requests so far is next, then the first; a smaller load beats both."""
        pool = [
            PrefillView(f"p{i}", load, 0, assigned, 0)
            for i, (load, assigned) in enumerate([(0, 3), (0, 2), (0, 2)])
        ]
        seen = ClusterView(0.0, tuple(pool), view((0, 0)).decode)
        assert LoadBalance().place(request(), seen, Estimate()).prefill == "p1"
        pool = [*(each.replace(backlog_s=1.0) for each in pool[:2]), PrefillView("p2", 0.5, 0, 9, 0)]
        assert LoadBalance().place(request(), seen.replace(prefill=tuple(pool)), Estimate()).prefill == "p2"

    def test_random_spreads(self):
        """Over 400 requests each of four instances gets a fair share (within five standard deviations)."""
        pool = view(*[(0.0, 0)] * 4)
        chosen = [Random(3).place(request(i), pool, Estimate()).prefill for i in range(400)]
        assert all(abs(chosen.count(f"p{i}") - 100) < 5 * math.sqrt(75) for i in range(4))


class TestSelectDecode:
    def test_memory_comes_first(self):
        """An instance without room for the KVCache is not chosen while another has room."""
        pool = (DecodeView("d0", 0, 9000, 10_000), DecodeView("d1", 9, 0, 10_000))
        assert select_decode(request(), pool, Estimate())[0].name == "d1"

    def test_no_room_anywhere_is_infinitely_slow(self):
        """When it fits nowhere the emptiest instance is named, with an infinite TBT for admission to see."""
        pool = (DecodeView("d0", 0, 9000, 10_000), DecodeView("d1", 0, 8000, 10_000))
        chosen, tbt_s = select_decode(request(), pool, Estimate())
        assert (chosen.name, tbt_s) == ("d1", math.inf)


def test_a_named_policy_draws_by_the_seed_it_is_given():
    """Only random placement takes the seed; the others keep their defaults."""
    assert named_placement("random", 3) == Random(3)
    for name, make in PLACEMENT_POLICIES.items():
        assert name == "random" or named_placement(name, 3) == make()


def test_the_turns_of_a_session_go_to_one_instance():
    """When an instance is gone, only its own sessions move; other requests go to the least loaded instance."""
    policy, idle = SessionAffinity(), view(*[(0.0, 0)] * 4)
    placed = {
        name: [policy.place(replace(request(i), session=name), idle, Estimate()).prefill for i in range(3)]
        for name in map(str, range(40))
    }
    assert all(len(set(instances)) == 1 for instances in placed.values())
    assert {instances[0] for instances in placed.values()} == {"p0", "p1", "p2", "p3"}
    left = idle.replace(prefill=idle.prefill[:3])
    for name, (instance, *_) in placed.items():
        now = policy.place(replace(request(), session=name), left, Estimate()).prefill
        assert instance in {now, "p3"}
    busy = view((9.0, 0), (1.0, 0), (9.0, 0), (9.0, 0))
    assert policy.place(request(), busy, Estimate()).prefill == "p1"
