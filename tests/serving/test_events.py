"""The events of live runs, fed to a coordinator without any cluster."""

import threading

import pytest
from recorded import Follower

from mooncake_lab.cluster import Coordinator, events
from mooncake_lab.core import CacheChanged
from mooncake_lab.metrics import check_log
from mooncake_lab.serving.spec import coordinator_rules

COUPLED = {"coupled_nodes": 2}
PAIRS = {"prefill_nodes": 2, "decode_nodes": 2}


@pytest.fixture(
    scope="module",
    params=[
        (PAIRS, "prefill-0"),
        (PAIRS, "decode-0"),
        (PAIRS | {"first_shown_by": "prefill"}, "decode-1"),
        (COUPLED, "coupled-0"),
    ],
    ids=["prefill", "decode", "shown by prefill", "coupled"],
)
def live(request, open_cluster, traced, expected):
    """A run in which a worker is killed, with the tokens of an undisturbed one."""
    nodes, killed = request.param
    requests = traced(24, output_tokens=24)
    with open_cluster(**nodes) as cluster:
        timer = threading.Timer(0.15, cluster.kill, (killed,))
        timer.start()
        cluster.run(requests)
        timer.join()
        assert cluster.outputs == expected(requests)
        assert any(isinstance(event, events.InstanceDown) for event, _ in cluster.events)
        yield cluster


def by_time(log):
    """The records that a run's log has, in its order."""
    return sorted((one for one in log if not isinstance(one, CacheChanged)), key=lambda one: one.at_s)


def replay(live, events):
    """A coordinator that was told these events, its log and its decisions."""
    grown = {(one.request.id, one.request.input_tokens): one.request for one in live.decisions}
    log, decisions = [], []
    coordinator = Coordinator(
        live.spec,
        live.estimate,
        coordinator_rules(live.options),
        write=log.append,
        extend=lambda request, tokens: grown.get((request.id, request.input_tokens + tokens)),
        observe=decisions.append,
    )
    for event, now_s in events:
        coordinator.on(event, now_s)
    return coordinator, by_time(log), decisions


def test_the_same_events_give_the_same_log_and_decisions(live):
    """The coordinator depends on nothing but its events: no clock, no order of clients, no worker."""
    coordinator, log, decisions = replay(live, live.events)
    assert log == live.log
    assert decisions == live.decisions
    assert check_log(log) == ()
    assert not coordinator.requests


def test_nothing_is_left_of_requests_that_ended(live):
    """What the cluster knows about its workers is as if no request had come, once all have ended."""
    coordinator, _, _ = replay(live, live.events)
    for worker in coordinator.instances.up:
        assert not worker.decode.contexts
        assert not worker.decode.present
        assert not worker.decode.coming
        assert worker.decode.context_tokens == 0
        assert not worker.decode.started


def test_events_that_are_reported_twice_change_nothing(live):
    """Each event of a live run may be reported again at once; only a worker comes up once."""
    twice = [one for one in live.events for _ in range(1 if isinstance(one[0], events.InstanceUp) else 2)]
    _, log, decisions = replay(live, twice)
    assert log == live.log
    assert decisions == live.decisions


def test_the_laws_hold_after_each_event(live):
    """Beliefs about workers equal a recount of the live attempts all along, while a worker is killed as well."""
    grown = {(one.request.id, one.request.input_tokens): one.request for one in live.decisions}
    follower = Follower(
        live.spec,
        coordinator_rules(live.options),
        live.estimate,
        extend=lambda request, tokens: grown.get((request.id, request.input_tokens + tokens)),
    )
    follower.follow(list(live.events))  # a replaced worker may come up meanwhile
    follower.log = by_time(follower.log)
    follower.check_log()
    assert follower.log == live.log
