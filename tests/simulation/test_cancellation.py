"""Clients that leave: their tokens, what stays behind, and that a stretch of steps changes nothing."""

from unittest import mock

import pytest
from drawn import REALISTIC, REQUESTS
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import Instance, SteadyDecodeOnly
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import Finished, Rejected
from mooncake_lab.metrics import check_log, token_times_s
from mooncake_lab.simulation import Cluster

CLUSTERS = {
    "apart": lambda: ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=1),
    "little memory": lambda: ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=1, device_tokens=9000),
    "together": lambda: ClusterSpec.coupled(nodes=2),
    "together with a cache": lambda: ClusterSpec.coupled(nodes=1, prefix_caching=True, device_tokens=16_384),
}
LEAVING = st.lists(st.tuples(st.integers(0, 24), st.floats(0.0, 8.0)), max_size=12)


def run(kind, rows, leaving):
    """A run in which clients leave: the log, and the cluster."""
    cluster = Cluster(CLUSTERS[kind](), REALISTIC)
    for request_id, at_s in leaving:
        timeout = cluster.env.timeout(at_s)
        timeout.callbacks.append(lambda _, request_id=request_id: cluster.cancel(request_id))
    return cluster.run(requests_of(rows)), cluster


def outcome(log):
    """How each request ended, and when each of its tokens came."""
    ends = {record.request_id: record for record in log if isinstance(record, Finished | Rejected)}
    return ends, {request_id: pytest.approx(times, abs=1e-6) for request_id, times in token_times_s(log)}


@pytest.mark.parametrize("kind", CLUSTERS)
@settings(max_examples=40, deadline=None)
@given(rows=REQUESTS, leaving=LEAVING)
def test_leaving_during_a_stretch_is_as_between_steps(kind, rows, leaving):
    """Every request ends as in a run of single steps, with the same tokens at the same times."""
    log, cluster = run(kind, rows, leaving)
    assert check_log(log) == ()
    assert not cluster.coordinator.requests
    with (
        mock.patch.object(SteadyDecodeOnly, "steady_steps", return_value=1),
        mock.patch.object(Instance, "steady_steps", return_value=1),
    ):
        stepwise, _ = run(kind, rows, leaving)
    ends, tokens = outcome(log)
    for request_id, record in outcome(stepwise)[0].items():
        assert type(ends[request_id]) is type(record)
        assert ends[request_id].at_s == pytest.approx(record.at_s, abs=1e-6)
    assert dict(token_times_s(stepwise)) == tokens


@pytest.mark.parametrize("kind", CLUSTERS)
@settings(max_examples=20, deadline=None)
@given(rows=REQUESTS, leaving=LEAVING)
def test_nothing_is_left_of_those_who_left(kind, rows, leaving):
    """No instance counts tokens or prompts of a request that has ended, and no transfer goes on for ever."""
    _, cluster = run(kind, rows, leaving)
    for instance in cluster.coordinator.instances.up:
        assert not instance.decode.contexts
        assert not instance.decode.context_tokens
        assert not instance.prefill.prompts
    if kind in ("apart", "little memory"):
        network = cluster.executor._transfer._network
        assert not network._paced
        assert not network._greedy
    else:
        for instance in cluster.executor.instances.values():
            instance.instance.check()
            assert not instance.instance.running
            assert not instance.instance.waiting


def test_a_client_that_leaves_a_long_answer_has_the_tokens_up_to_its_step():
    """The step under way ends; the rest of the answer is never computed, and another request has the room."""
    requests = requests_of([(0.0, 1000, 5000, 0), (0.0, 1000, 300, 1)])
    cluster = Cluster(ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1), REALISTIC)
    cluster.env.timeout(3.0).callbacks.append(lambda _: cluster.cancel(0))
    cluster.env.timeout(3.0).callbacks.append(lambda _: cluster.cancel(9))  # an unknown one changes nothing
    log = cluster.run(requests)
    (left,) = [record for record in log if isinstance(record, Rejected)]
    assert (left.request_id, left.stage) == (0, "client")
    assert 3.0 <= left.at_s < 3.05
    times_s = dict(token_times_s(log))
    assert times_s[0][-1] == pytest.approx(left.at_s)
    assert len(times_s[1]) == 300


def test_a_request_that_is_cancelled_as_it_is_sent_arrives_and_ends():
    """Its client gets the rejection, and the log has both."""
    cluster = Cluster(ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1), REALISTIC)
    (traced,) = requests_of([(0.0, 1000, 10, 0)])
    ended = cluster.submit(traced)
    cluster.cancel(0, "changed its mind")
    log = cluster.run()
    assert check_log(log) == ()
    assert (ended.value.stage, ended.value.reason) == ("client", "changed its mind")
    assert [type(record).__name__ for record in log[:1]] == ["Arrived"]
