"""An instance that dies mid-run loses no request, and the log says what became of its requests."""

from itertools import pairwise

import pytest
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import CacheAware, KVCacheCentric, LoadBalance, Rejection
from mooncake_lab.core import (
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
)
from mooncake_lab.metrics import check_log, token_times_s
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import Cluster, Failure, SimulationOptions

PREFILL = PrefillLatency(constant_s=0.05, per_token_s=1e-4, per_token_squared_s=0.0)
DECODE = DecodeLatency(0.025, 2e-4, 3e-8)
MODEL = LatencyModel(
    name="by hand",
    shape=model_shape("llama3-70b"),
    prefill=PREFILL,
    decode=DECODE,
    hybrid=HybridLatency.of(PREFILL, DECODE),
    transfer=LinkLatency(5e9),
    dram=LinkLatency(1e11),
)
ROWS = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 4000), st.integers(1, 60), st.integers(0, 2)),
    min_size=1,
    max_size=20,
).map(sorted)
DEATHS = st.lists(
    st.tuples(st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1"]), st.floats(0, 8)),
    max_size=4,
    unique_by=lambda death: death[0],
)


def run(rows, deaths, **knobs):
    spec = ClusterSpec.disaggregated(prefill_nodes=3, decode_nodes=3, cache_tokens=3000, **knobs)
    cluster = Cluster(spec, MODEL, SimulationOptions(failures=tuple(Failure(*d) for d in deaths)))
    return cluster, cluster.run(requests_of(rows))


@settings(max_examples=120, deadline=None)
@given(
    ROWS,
    DEATHS,
    st.sampled_from([KVCacheCentric(1.0), CacheAware(), LoadBalance()]),
    st.sampled_from([5000, 10**6]),
    st.sampled_from(["decode", "prefill"]),
)
def test_no_request_is_lost_and_no_token_shown_twice(rows, deaths, policy, memory, first):
    """Whoever dies when, every request finishes with all its tokens and one first token (I1, I2)."""
    cluster, log = run(rows, deaths, placement=policy, device_tokens=memory, first_shown_by=first)
    assert check_log(log) == ()
    produced = {i: len(times) for i, times in token_times_s(log)}
    assert produced == {i: outputs for i, (_, _, outputs, _) in enumerate(rows)}
    assert sorted(r.request_id for r in log if isinstance(r, FirstToken)) == list(range(len(rows)))
    assert sorted(r.request_id for r in log if isinstance(r, Finished)) == list(range(len(rows)))
    for store in cluster.executor.prefix_caches.stores.values():
        store.check()


@pytest.mark.parametrize("prompt", [10, 511, 512, 513, 1500])
@pytest.mark.parametrize("first_shown_by", ["decode", "prefill"])
def test_a_prompt_placed_again_reuses_only_tokens_that_its_prefill_instance_has_computed(prompt, first_shown_by):
    """A block that was partial is matched by the tokens in it, however often its request is placed again."""
    deaths = [("decode-0", 8.0), ("decode-1", 16.0), ("decode-2", 30.0)]
    spec = ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=4, first_shown_by=first_shown_by)
    cluster = Cluster(spec, MODEL, SimulationOptions(failures=tuple(Failure(*death) for death in deaths)))
    log = cluster.run(requests_of([(0.0, prompt, 2000, 0)]))
    prefilled = [record for record in log if isinstance(record, Prefilled)]
    assert len(prefilled) == 4
    lengths = [record.computed_tokens + record.reused_tokens for record in prefilled]
    assert lengths == sorted(lengths)
    for before, record in pairwise(prefilled):
        whole_blocks = (before.computed_tokens + before.reused_tokens) // 512 * 512
        assert record.reused_tokens == whole_blocks
    placed = [record.reused_tokens for record in log if isinstance(record, Placed)]
    assert placed == [record.reused_tokens for record in prefilled]


def test_an_answer_that_was_shown_whole_is_not_made_again():
    """Its only token was shown by prefill; its decode instance fails while it waits for its place in the batch."""
    rows = [(0.0, 512, 2000, 0), (0.0, 512, 2000, 1), (0.0, 512, 1, 2), (0.0, 512, 1, 3)]
    spec = ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=2, first_shown_by="prefill", max_requests=1)
    cluster = Cluster(spec, MODEL, SimulationOptions(failures=(Failure("decode-0", 5.0),)))
    log = cluster.run(requests_of(rows))
    assert {r.request_id: r.output_tokens for r in log if isinstance(r, Finished)} == {
        0: 2000,
        1: 2000,
        2: 1,
        3: 1,
    }
    assert check_log(log) == ()


class TestTheLogSaysSo:
    def test_when_a_decode_instance_dies(self):
        """An answer goes on where it was, after its prompt and what was shown are prefilled elsewhere."""
        _, log = run([(0.0, 4000, 50, 0)], [("decode-0", 1.5)])
        placed = [r for r in log if isinstance(r, Placed)]
        assert [r.decode_instance for r in placed] == ["decode-0", "decode-1"]
        assert "decode instance failed" in placed[1].reason
        (times,) = [times for _, times in token_times_s(log)]
        assert len(times) == 50
        assert all(before < after for before, after in pairwise(times))


FETCHING = [(0.0, 2000, 5, 0), (0.3, 2500, 5, 1), (0.301, 2000, 5, 0)]
"""The third waits less on the second instance, and fetches the first one's prefix from prefill-0."""


def fetches(log):
    """Moves of prefix blocks between prefill instances."""
    return [r for r in log if isinstance(r, Moved) and r.destination.startswith("prefill")]


@pytest.mark.parametrize("dead", ["prefill-0", "prefill-1"])
def test_what_the_dead_send_or_are_sent_is_not_kept(dead):
    """A fetch whose sender or receiver died puts no block anywhere and is not in the log."""
    _, whole = run(FETCHING, [], placement=KVCacheCentric(1.0))
    (fetch,) = fetches(whole)
    assert (fetch.source, fetch.destination) == ("prefill-0", "prefill-1")
    died_s = (fetch.start_s + fetch.at_s) / 2
    cluster, log = run(FETCHING, [(dead, died_s)], placement=KVCacheCentric(1.0))
    assert all(dead not in {record.source, record.destination} for record in fetches(log))
    assert cluster.executor.prefix_caches.matched(dead, requests_of(FETCHING)[2].request) == 0


class OnlyOnce:
    """Lets every request in, and none a second time."""

    def __init__(self):
        self.seen = set()

    def admit(self, request, proposed, view, *, estimate, slo):
        """Not again."""
        del view, estimate, slo
        if request.id in self.seen:
            return Rejection(request_id=request.id, stage="arrival", reason="again")
        self.seen.add(request.id)
        return proposed

    def double_check(self, request, decode, *, estimate, slo):
        """Nothing against it."""
        del request, decode, estimate, slo


@pytest.mark.parametrize("dead", ["decode-0", "prefill-0"])
def test_who_was_let_in_is_not_refused_after_a_death(dead):
    """A request whose instance dies is placed again, whatever admission would say to a new one like it."""
    rows = [(0.0, 4000, 60, 0), (0.0, 4000, 60, 1), (0.0, 4000, 60, 2)]
    _, log = run(rows, [(dead, 0.3 if "prefill" in dead else 1.5)], admission=OnlyOnce())
    assert sum(isinstance(record, Placed) for record in log) > 3
    assert sum(isinstance(record, Finished) for record in log) == 3


def test_a_prompt_whose_holder_dies_is_computed_where_it_is():
    """It is placed once: what was fetched is there, and what was not is computed without waiting for it."""
    rows = [(0.0, 2560, 5, 0), (1.0, 3900, 5, 1), (1.01, 3900, 5, 0)]
    for died_s, reused in ((1.2, 0), (1.48, 2560)):  # the copy arrives at 1.35 s
        _, log = run(rows, [("prefill-0", died_s)])
        placed = [record for record in log if isinstance(record, Placed) and record.request_id == 2]
        assert len(placed) == 1
        assert placed[0].fetched_tokens == 2560
        [prefilled] = [record for record in log if isinstance(record, Prefilled) and record.request_id == 2]
        assert prefilled.reused_tokens == reused
        assert sum(isinstance(record, Finished) for record in log) == 3
