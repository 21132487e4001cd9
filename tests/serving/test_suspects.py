"""A dying worker fails its peers' attempts before its parent hears of it: no attempts are spent on that."""

import numpy as np
import pytest
from quiet_workers import QuietCluster

from mooncake_lab.cluster import events
from mooncake_lab.serving import LiveOptions
from mooncake_lab.serving.messages import Ping, Pong, PrefillOrder


@pytest.fixture
def quiet(believed):
    """A cluster and one request in flight."""
    cluster = QuietCluster(believed)
    return cluster, cluster.submit(np.arange(40, dtype=np.int32))


def fail(cluster, stream):
    failed = events.AttemptFailed(
        at_s=0.0, attempt=cluster.attempt(stream), reason="connection reset", retriable=True
    )
    cluster.hear("prefill-0", failed)


def answer(cluster, name, number=-1):
    cluster.receive(name, Pong(cluster.lines[name].of(Ping)[number].number, 0.0))


def test_nothing_is_placed_until_both_are_known(quiet):
    """After trouble on the way, the request waits for the answer of each worker it went through."""
    cluster, stream = quiet
    fail(cluster, stream)
    assert cluster.attempt(stream).n == 1
    answer(cluster, "prefill-0")
    assert cluster.attempt(stream).n == 1
    answer(cluster, "decode-0")
    assert cluster.attempt(stream).n == 2
    assert len(cluster.lines["prefill-0"].of(PrefillOrder)) == 2
    assert "trouble on prefill-0 (connection reset)" in cluster.records[-1].reason


def test_an_answer_to_an_earlier_ping_confirms_nothing(quiet):
    """A worker that was asked again has to answer the second ping: it may have gone down after the first."""
    cluster, stream = quiet
    other = cluster.submit(np.arange(50, dtype=np.int32))
    fail(cluster, stream)
    fail(cluster, other)
    for name in cluster.lines:
        answer(cluster, name, 0)
    assert (cluster.attempt(stream).n, cluster.attempt(other).n) == (1, 1)
    for name in cluster.lines:
        answer(cluster, name)
    assert (cluster.attempt(stream).n, cluster.attempt(other).n) == (2, 2)


def test_a_worker_that_goes_down_is_confirmed(quiet):
    """A worker that goes down instead of answering costs one attempt, and the request goes on with the next."""
    cluster, stream = quiet
    fail(cluster, stream)
    answer(cluster, "prefill-0")
    cluster.take_down("decode-0")
    assert (cluster.attempt(stream).n, stream.end) == (1, None)
    cluster.bring_up("decode-0")
    assert cluster.attempt(stream).n == 2


def test_a_failure_that_is_reported_twice(quiet):
    """Two reports of one failed attempt count once."""
    cluster, stream = quiet
    fail(cluster, stream)
    fail(cluster, stream)
    assert len(cluster.lines["decode-0"].of(Ping)) == 1


def test_cancelled_while_it_waits(quiet):
    """A request that is cancelled while its workers are suspects is not placed."""
    cluster, stream = quiet
    fail(cluster, stream)
    cluster.runtime.cancel(stream, "the client went away")
    for name in cluster.lines:
        answer(cluster, name)
    assert stream.end.reason == "cancelled"
    assert len(cluster.lines["prefill-0"].of(PrefillOrder)) == 1


def test_attempts_are_bounded(quiet):
    """A request that fails everywhere is given up, though every worker is up."""
    cluster, stream = quiet
    attempts = 0
    while stream.end is None:
        attempts += 1
        fail(cluster, stream)
        for name in cluster.lines:
            answer(cluster, name)
    assert stream.end.reason == "failed"
    assert attempts == LiveOptions().max_attempts
