"""What the cluster believes about the load of one instance: exact sums, and events that change nothing."""

import math

from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.cluster import Attempt, DecodeLoad, InstanceState, PrefillLoad, events
from mooncake_lab.conductor import PrefillView
from mooncake_lab.core import Request

ESTIMATES_S = st.lists(st.floats(0, 1e4), min_size=1, max_size=8)


def queued(estimates_s):
    load = PrefillLoad("prefill-0")
    for i, estimated_s in enumerate(estimates_s):
        load.add(Attempt(i, 1), estimated_s)
    return load


def backlog_s(load, now_s=0.0):
    return load.view(0, now_s).backlog_s


@given(ESTIMATES_S, st.randoms(use_true_random=False))
def test_the_backlog_is_the_exact_sum_of_what_is_queued(estimates_s, random):
    """In any order of adding and removing prompts, the backlog is the sum of the rest, rounded once."""
    load, left = queued(estimates_s), dict(enumerate(estimates_s))
    assert backlog_s(load) == math.fsum(estimates_s)
    for i in random.sample(sorted(left), len(left)):
        del left[i]
        assert load.remove(Attempt(i, 1), 0.0)
        assert backlog_s(load) == math.fsum(left.values())
    assert backlog_s(load) == 0.0


def test_prompts_that_start_together_count_together():
    """Prompts of 2 s and 3 s that share an iteration are a backlog of 5 s, until the last one is done."""
    load = queued([2.0, 3.0, 4.0])
    for i in (0, 1):
        assert load.start(Attempt(i, 1), 10.0)
    assert backlog_s(load, 10.0) == 9.0
    assert backlog_s(load, 14.0) == 5.0
    for i in (0, 1):
        assert load.remove(Attempt(i, 1), 14.0)
    assert backlog_s(load, 14.0) == 4.0


def test_transfers_to_a_failed_instance_end_and_others_go_on():
    """Of what is read, sent and arriving, only the part for the failed receiver is dropped."""
    load = PrefillLoad("prefill-0")
    for i, receiver in enumerate(("decode-0", "decode-1")):
        load.reading[Attempt(i, 1)] = receiver
        load.sending[Attempt(i, 2)] = receiver
        load.arriving[Attempt(i, 3)] = receiver
    load.stop_sending_to("decode-0")
    assert load.reading == {Attempt(1, 1): "decode-1"}
    assert load.sending == {Attempt(1, 2): "decode-1"}
    assert load.arriving == {Attempt(1, 3): "decode-1"}
    assert [load.end_sending(Attempt(1, n)) for n in (1, 2, 3, 3)] == [True, True, True, False]


def test_an_iteration_reports_each_request_once():
    """Events of one moment about different requests are all new; one of an earlier moment is late."""
    loads = PrefillLoad("coupled-0"), DecodeLoad("coupled-0", 100, 0.0)
    instance = InstanceState("coupled-0", "coupled", "coupled-0", 0.0, *loads)
    now, before = (
        [
            events.Preempted(at_s=at_s, attempt=Attempt(i, 1), instance="coupled-0", context_tokens=0)
            for i in range(2)
        ]
        for at_s in (2.0, 1.0)
    )
    assert [instance.is_news(event) for event in (*now, *now, *before)] == [True, True, False, False, False, False]


def test_a_request_that_is_partly_in_memory_is_released_whole():
    """What a request lost to a preemption is neither counted nor given back twice."""
    load = DecodeLoad("coupled-0", 100, 0.0)
    for i in range(2):
        load.expect(Request(id=i, arrival_s=0.0, input_tokens=10, block_keys=(i,)), 1.0)
    load.hold(0, 4)
    assert load.context_tokens == 14
    load.release(0)
    assert (load.context_tokens, load.contexts) == (10, {1: 10})
    load.hold(1, 0)
    load.hold(1, 10)
    assert load.context_tokens == 10


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.floats(0, 5)), min_size=1, max_size=6))
def test_a_view_has_the_state_of_its_moment(moments):
    """Whatever was asked before, a view has the matches of its request, the transfers and the backlog of now."""
    load = queued([2.0])
    load.start(Attempt(0, 1), 0.0)
    load.remove(Attempt(0, 1), 0.0)
    for matched, sends, now_s in moments:
        load.sending.clear()
        if sends:
            load.sending[Attempt(9, 1)] = "decode-0"
        assert load.view(matched, now_s) == PrefillView(load.name, 0.0, 0, 1, matched, int(sends))
    load.add(Attempt(1, 1), 3.0)
    load.start(Attempt(1, 1), 1.0)
    assert [backlog_s(load, now_s) for now_s in (1.0, 3.5, 4.0, 9.0)] == [3.0, 0.5, 0.0, 0.0]
    assert load.view(0, 9.0).queued_requests == 1


def test_a_new_instance_was_sent_nothing():
    """The requests that were ever sent to an instance count from none."""
    load = PrefillLoad("prefill-0")
    assert load.view(0, 0.0).assigned_requests == 0
    load.add(Attempt(0, 1), 1.0)
    load.remove(Attempt(0, 1), 2.0)
    assert load.view(0, 2.0).assigned_requests == 1


def test_a_read_prefix_is_news_once_and_is_sent_then():
    """An instance reads from SSD for another, which receives, or for its own prompt; a second report is late."""
    load = queued([1.0])
    load.reading[Attempt(7, 1)] = "prefill-1"
    assert load.read_tier(Attempt(7, 1)) is True
    assert (load.reading, load.sending) == ({}, {Attempt(7, 1): "prefill-1"})
    assert [load.read_tier(Attempt(0, 1)) for _ in range(2)] == [True, False]
    assert load.read_tier(Attempt(7, 1)) is False
    assert load.sending == {Attempt(7, 1): "prefill-1"}
