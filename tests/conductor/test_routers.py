"""Routers in front of instances that do not cooperate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import ClusterView, DecodeView, LatencyEstimator, PrefillView
from mooncake_lab.conductor.placement import PLACEMENT_POLICIES, FewestRequests, LeastTokens, named_placement
from mooncake_lab.core import Placed, Request, TracedRequest
from mooncake_lab.simulation import Cluster

REQUEST = Request(id=0, arrival_s=0.0, input_tokens=600, block_keys=(1, 2))
BELIEF = LatencyEstimator(paper_node_latency())
COUNTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.floats(0, 9)), min_size=1, max_size=8)


def seen(counts):
    """A view of coupled instances: requests in each, requests ever sent there, seconds of backlog."""
    prefill = tuple(PrefillView(f"i{k}", backlog, 0, sent, 0) for k, (_, sent, backlog) in enumerate(counts))
    decode = tuple(DecodeView(f"i{k}", here, 0, 10**6) for k, (here, _, _) in enumerate(counts))
    return ClusterView(0.0, prefill, decode)


@given(COUNTS)
def test_fewest_requests_wins_and_ties_take_turns(counts):
    """The chosen instance has the fewest requests, and among those the fewest ever."""
    placed = FewestRequests().place(REQUEST, seen(counts), BELIEF)
    assert counts[int(placed.prefill[1:])][:2] == min((here, sent) for here, sent, _ in counts)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=8))
def test_least_tokens_wins_and_ties_take_turns(counts):
    """The chosen instance holds the fewest tokens, however many requests they belong to."""
    view = seen([(here, sent, 0.0) for here, sent, _ in counts])
    held = zip(view.decode, counts, strict=True)
    view = view.replace(decode=tuple(each.replace(context_tokens=tokens) for each, (_, _, tokens) in held))
    placed = LeastTokens().place(REQUEST, view, BELIEF)
    _, sent, tokens = counts[int(placed.prefill[1:])]
    assert (tokens, sent) == min((tokens, sent) for _, sent, tokens in counts)
    assert placed.decode == placed.prefill


def test_tokens_of_waiting_prompts_are_held():
    """Three prompts arrive at two idle instances: the third goes where the shorter one waits."""
    lengths = (500, 100, 100)
    arriving = [
        TracedRequest(Request(id=i, arrival_s=0.0, input_tokens=n, block_keys=(i,)), output_tokens=2)
        for i, n in enumerate(lengths)
    ]
    log = Cluster(ClusterSpec.coupled(nodes=2, placement=LeastTokens()), paper_node_latency()).run(arriving)
    placed = {record.request_id: record.prefill_instance for record in log if isinstance(record, Placed)}
    assert placed[2] == placed[1] != placed[0]


@pytest.mark.parametrize("name", PLACEMENT_POLICIES)
def test_the_reason_is_what_decided(name):
    """The log says what each policy looked at; here the instance with fewest requests has most backlog."""
    reasons = {
        "random": "drawn by chance",
        "round_robin": "least assigned_requests",
        "load_balance": "least backlog_s",
        "fewest_requests": "fewest requests",
        "least_tokens": "least tokens",
        "longest_prefix": "longest prefix",
        "session_affinity": "least backlog_s",  # of a request without a session
        "cache_aware": "shortest expected TTFT, local prefix",
        "kvcache_centric": "shortest expected TTFT, local prefix",
    }
    placed = named_placement(name, 0).place(REQUEST, seen([(5, 9, 0.0), (1, 3, 8.0)]), BELIEF)
    assert placed.reason == reasons[name]
    if name == "fewest_requests":
        assert (placed.prefill, placed.decode) == ("i1", "i1")


@pytest.mark.parametrize("router", [FewestRequests(), LeastTokens()])
def test_routers_count_instances_that_do_both(router):
    """A pool of which a view is missing cannot be counted."""
    with pytest.raises(ValueError, match="longer"):
        router.place(REQUEST, seen([(0, 0, 0.0)] * 2).replace(decode=()), BELIEF)


@given(COUNTS)
def test_round_robin_looks_at_turns_alone(counts):
    """The chosen instance was given the fewest requests, however many it still has."""
    placed = named_placement("round_robin", 0).place(REQUEST, seen(counts), BELIEF)
    assert counts[int(placed.prefill[1:])][1] == min(sent for _, sent, _ in counts)
