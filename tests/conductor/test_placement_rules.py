"""Placement, one rule at a time: who holds most, who may decode, and what is expected of the choice."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.conductor import (
    ClusterView,
    DecodeView,
    KVCacheCentric,
    LoadBalance,
    LongestPrefix,
    PrefillView,
    select_decode,
)
from mooncake_lab.core import Request

BLOCK = 512
IDLE = (DecodeView("d0", 0, 0, 10**6),)


class Estimate:
    """A millisecond per computed token; a transfer takes a second, and a tenth of a millisecond per token."""

    fetches_by_layer = False

    def prefill_s(self, _request_id, input_tokens, reused_tokens):
        return (input_tokens - reused_tokens) * 1e-3

    def transfer_s(self, tokens, flows):
        return 1.0 + tokens * 1e-4 * (flows + 1)

    def decode_step_s(self, requests, _context_tokens):
        return 0.01 * requests


class Never(Estimate):
    """No prompt is ever expected to be computed."""

    def prefill_s(self, _request_id, input_tokens, reused_tokens):
        del input_tokens, reused_tokens
        return math.inf


def request(blocks=10):
    return Request(id=0, arrival_s=0.0, input_tokens=blocks * BLOCK, block_keys=tuple(range(blocks)))


def view(*rows, decode=IDLE):
    """Rows of (backlog_s, matched_blocks, outgoing_flows) make the prefill pool."""
    prefill = (PrefillView(f"p{i}", row[0], 0, 0, row[1], row[2] if row[2:] else 0) for i, row in enumerate(rows))
    return ClusterView(0.0, tuple(prefill), decode)


HOLDERS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=2, max_size=6)


@given(HOLDERS)
def test_the_sender_holds_most_then_sends_least_then_comes_first(rows):
    """Whatever the order of the pool, an idle instance with nothing fetches from the best holder."""
    pool = view((0.0, 0), *((1e6, matched, flows) for matched, flows in rows))
    best = min(range(len(rows)), key=lambda i: (-rows[i][0], rows[i][1], i))
    placed = KVCacheCentric(1.5).place(request(40), pool, Estimate())
    if rows[best][0] * BLOCK * 1e-3 > Estimate().transfer_s(rows[best][0] * BLOCK, rows[best][1]):
        assert placed.prefill == "p0"
    if rows[best][0]:
        assert placed.fetch_from == f"p{best + 1}"
    assert placed.reused_tokens == rows[best][0] * BLOCK


def test_only_the_missing_part_of_a_prefix_is_fetched():
    """Two blocks are there and nine elsewhere: seven are moved, and nine are reused."""
    placed = KVCacheCentric(1.5).place(request(), view((0.0, 2), (90.0, 9)), Estimate())
    assert (placed.prefill, placed.fetch_from) == ("p0", "p1")
    assert (placed.reused_tokens, placed.fetched_tokens) == (9 * BLOCK, 7 * BLOCK)
    assert placed.expected_ttft_s == BLOCK * 1e-3 + (1.0 + 7 * BLOCK * 1e-4)


def test_nothing_is_fetched_where_nothing_is_held():
    """A threshold below 1 moves no empty prefix, and expects no transfer."""
    placed = KVCacheCentric(0.5).place(request(), view((0.0, 0), (9.0, 0)), Estimate())
    assert (placed.fetch_from, placed.fetched_tokens) == (None, 0)
    assert placed.expected_ttft_s == 5.12
    assert placed.reason == "shortest expected TTFT, local prefix"


def test_the_best_holder_fetches_nothing():
    """A threshold below 1 does not make an instance fetch the prefix that it holds itself."""
    placed = KVCacheCentric(0.5).place(request(), view((0.0, 9), (9.0, 3)), Estimate())
    assert (placed.prefill, placed.reused_tokens) == ("p0", 9 * BLOCK)
    assert (placed.fetch_from, placed.fetched_tokens) == (None, 0)


def test_where_nothing_is_finite_the_first_instance_is_named():
    """A choice is made even if every estimate is infinite, and admission sees that it is."""
    placed = KVCacheCentric().place(request(), view((0.0, 0), (0.0, 9)), Never())
    assert (placed.prefill, placed.expected_ttft_s, placed.fetch_from) == ("p0", math.inf, None)


@pytest.mark.parametrize(("held", "fetches"), [(6, False), (7, True)])
def test_a_prefix_is_fetched_where_another_match_is_more_than_half_as_long_again(held, fetches):
    """By default: assumption B01."""
    placed = KVCacheCentric().place(request(), view((0.0, 4), (90.0, held)), Estimate())
    assert (placed.fetch_from is not None) == fetches


def test_a_coupled_instance_decodes_what_it_prefills():
    """An instance that does both keeps its request, however idle the others are; else any may decode."""
    both = (DecodeView("p0", 0, 0, 10**6), DecodeView("p1", 9, 0, 10**6))
    seen = view((9.0, 0), (0.0, 0), decode=both)
    for policy in (KVCacheCentric(), LoadBalance()):
        placed = policy.place(request(), seen, Estimate())
        assert (placed.prefill, placed.decode) == ("p1", "p1")
    apart = (DecodeView("d0", 9, 0, 10**6), DecodeView("d1", 0, 0, 10**6))
    assert LoadBalance().place(request(), view((0.0, 0), decode=apart), Estimate()).decode == "d1"


def test_a_simple_policy_expects_queue_and_computation():
    """The expected TTFT is the backlog plus the computation of what the instance does not hold."""
    placed = LongestPrefix().place(request(), view((1.0, 1), (2.0, 4)), Estimate())
    assert (placed.prefill, placed.reused_tokens, placed.fetched_tokens) == ("p1", 4 * BLOCK, 0)
    assert placed.expected_ttft_s == 2.0 + 6 * BLOCK * 1e-3
    assert placed.expected_tbt_s == 0.01


def test_a_decode_instance_may_be_filled_to_its_last_token():
    """A context that fits exactly fits; one token more does not."""
    needed = request().input_tokens
    pool = (DecodeView("d0", 5, 1000, 1000 + needed), DecodeView("d1", 9, 0, 10**6))
    assert select_decode(request(), pool, Estimate())[0].name == "d0"
    pool = (pool[0].replace(context_tokens=1001), pool[1])
    assert select_decode(request(), pool, Estimate())[0].name == "d1"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=5), st.integers(0, 4))
def test_a_request_decodes_where_its_step_is_shortest_and_ties_go_to_the_first(rows, room):
    """Among the instances that have room for it; where none has, the emptiest is named, with an infinite TBT."""
    needed = request().input_tokens
    capacity = (room + 1) * 1000 + needed
    pool = [DecodeView(f"d{i}", requests, held * 2000, capacity) for i, (requests, held) in enumerate(rows)]
    fitting = [one for one in pool if one.context_tokens + needed <= capacity]
    best = min(fitting, key=lambda one: one.requests) if fitting else min(pool, key=lambda one: one.context_tokens)
    tbt_s = 0.01 * (best.requests + 1) if fitting else math.inf
    assert select_decode(request(), tuple(pool), Estimate()) == (best, pytest.approx(tbt_s))


class FromSsd(Estimate):
    """A token is read from SSD in some milliseconds, beside the computation."""

    def __init__(self, read_ms):
        self.read_ms = read_ms

    def beside_ssd_s(self, compute_s, ssd_tokens):
        return max(compute_s, ssd_tokens * self.read_ms * 1e-3)


@pytest.mark.parametrize(
    ("read_ms", "in_dram", "reused", "ssd", "seconds"),
    [
        (0.5, 4, 9, 5, 2.5), (1.2, 4, 9, 5, 6.0), (1.3, 4, 4, 0, 6.0), (1.3, 9, 9, 5, 6.5),
    ],
)  # fmt: skip
def test_what_is_on_ssd_is_read_where_that_is_no_slower_than_computing_it(read_ms, in_dram, reused, ssd, seconds):
    """Five of nine blocks are on SSD: equal times read, longer ones compute, unless all of them must be read."""
    instance = PrefillView("p0", 1.0, 0, 0, 9, matched_on_ssd=5, matched_in_dram=in_dram)
    pool = ClusterView(0.0, (instance,), IDLE)
    for policy in (KVCacheCentric(), LoadBalance()):
        placed = policy.place(request(), pool, FromSsd(read_ms))
        assert (placed.reused_tokens, placed.ssd_tokens) == (reused * BLOCK, ssd * BLOCK)
        assert placed.expected_ttft_s == pytest.approx(1.0 + seconds * BLOCK * 1e-3)


def test_a_prefix_that_is_fetched_is_read_from_ssd_at_both_ends():
    """The holder reads what it sends, and the receiver what it has, before and beside the computation."""
    local = PrefillView("p0", 0.0, 0, 0, 2, matched_on_ssd=1, matched_in_dram=1)
    holder = PrefillView("p1", 90.0, 0, 0, 9, matched_on_ssd=8)
    placed = KVCacheCentric().place(request(), ClusterView(0.0, (local, holder), IDLE), FromSsd(0.5))
    assert (placed.prefill, placed.fetch_from, placed.ssd_tokens) == ("p0", "p1", BLOCK)
    reading_s, moving_s = 7 * BLOCK * 0.5e-3, Estimate().transfer_s(7 * BLOCK, 0)
    assert placed.expected_ttft_s == pytest.approx(BLOCK * 1e-3 + reading_s + moving_s)


class ByLayer(FromSsd):
    """Prefixes come layer by layer, of which there are four."""

    fetches_by_layer = True

    def beside_load_s(self, compute_s, load_s):
        return max(compute_s, load_s) + min(compute_s, load_s) / 4


def test_a_prefix_that_comes_layer_by_layer_hides_behind_the_computation():
    """What holder and link need shows only as far as it takes longer than the rest, and by one layer."""
    for on_ssd, ssd_s in ((0, 0.0), (8, 7 * BLOCK * 0.5e-3)):
        local, holder = PrefillView("p0", 0.0, 0, 0, 2), PrefillView("p1", 90.0, 0, 0, 9, matched_on_ssd=on_ssd)
        placed = KVCacheCentric().place(request(), ClusterView(0.0, (local, holder), IDLE), ByLayer(0.5))
        assert (placed.prefill, placed.fetch_from) == ("p0", "p1")
        parts_s = [BLOCK * 1e-3, ssd_s, Estimate().transfer_s(7 * BLOCK, 0)]
        shown_s = max(parts_s) + (sum(parts_s) - max(parts_s)) / 4
        assert placed.expected_ttft_s == pytest.approx(shown_s)
