"""What the cluster believes about one worker: exact sums, and events that change nothing."""

import math

from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.cluster import Attempt, WorkerState, events
from mooncake_lab.conductor import PrefillView
from mooncake_lab.core import Request

ESTIMATES_S = st.lists(st.floats(4e-9, 1e4), min_size=1, max_size=8)


def queued(estimates_s):
    worker = WorkerState("prefill-0", "prefill", 0, None, up_s=0.0)
    for i, estimated_s in enumerate(estimates_s):
        worker.add_prompt(Attempt(i, 1), estimated_s)
    return worker


def backlog_s(worker, now_s=0.0):
    return worker.prefill_view(0, now_s).backlog_s


@given(ESTIMATES_S, st.randoms(use_true_random=False))
def test_the_backlog_is_the_exact_sum_of_what_is_queued(estimates_s, random):
    """In any order of adding and removing prompts, the backlog is the sum of the rest, rounded once."""
    worker, left = queued(estimates_s), dict(enumerate(estimates_s))
    assert backlog_s(worker) == math.fsum(estimates_s)
    for i in random.sample(sorted(left), len(left)):
        del left[i]
        assert worker.remove_prompt(Attempt(i, 1), 0.0)
        assert backlog_s(worker) == math.fsum(left.values())
    assert backlog_s(worker) == 0.0


def test_prompts_that_start_together_count_together():
    """Prompts of 2 s and 3 s that share an iteration are a backlog of 5 s, until the last one is done."""
    worker = queued([2.0, 3.0, 4.0])
    for i in (0, 1):
        assert worker.start_prompt(Attempt(i, 1), 10.0)
    assert backlog_s(worker, 10.0) == 9.0
    assert backlog_s(worker, 14.0) == 5.0
    for i in (0, 1):
        assert worker.remove_prompt(Attempt(i, 1), 14.0)
    assert backlog_s(worker, 14.0) == 4.0


def test_transfers_to_a_failed_worker_end_and_others_go_on():
    """Of what is read, sent and arriving, only the part for the failed receiver is dropped."""
    worker = WorkerState("prefill-0", "prefill", 0, None, up_s=0.0)
    for i, receiver in enumerate(("decode-0", "decode-1")):
        worker.reading[Attempt(i, 1)] = receiver
        worker.sending[Attempt(i, 2)] = receiver
        worker.arriving[Attempt(i, 3)] = receiver
    worker.stop_sending_to("decode-0")
    assert worker.reading == {Attempt(1, 1): "decode-1"}
    assert worker.sending == {Attempt(1, 2): "decode-1"}
    assert worker.arriving == {Attempt(1, 3): "decode-1"}
    assert [worker.end_sending(Attempt(1, n)) for n in (1, 2, 3, 3)] == [True, True, True, False]


def test_an_iteration_reports_each_request_once():
    """Events of one moment about different requests are all new; one of an earlier moment is late."""
    worker = WorkerState("coupled-0", "coupled", 100, "coupled-0", up_s=0.0)
    now, before = (
        [
            events.Preempted(at_s=at_s, attempt=Attempt(i, 1), worker="coupled-0", context_tokens=0)
            for i in range(2)
        ]
        for at_s in (2.0, 1.0)
    )
    assert [worker.is_news(event) for event in (*now, *now, *before)] == [True, True, False, False, False, False]


def test_a_request_that_is_partly_in_memory_is_released_whole():
    """What a request lost to a preemption is neither counted nor given back twice."""
    worker = WorkerState("coupled-0", "coupled", 100, "coupled-0", up_s=0.0)
    for i in range(2):
        worker.expect(Request(id=i, arrival_s=0.0, input_tokens=10, block_keys=(i,)), 1.0)
    worker.hold(0, 4)
    assert worker.context_tokens == 14
    worker.release(0)
    assert (worker.context_tokens, worker.contexts) == (10, {1: 10})
    worker.hold(1, 0)
    worker.hold(1, 10)
    assert worker.context_tokens == 10


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.floats(0, 5)), min_size=1, max_size=6))
def test_a_view_has_the_state_of_its_moment(moments):
    """Whatever was asked before, a view has the matches of its request, the transfers and the backlog of now."""
    worker = queued([2.0])
    worker.start_prompt(Attempt(0, 1), 0.0)
    worker.remove_prompt(Attempt(0, 1), 0.0)
    for matched, sends, now_s in moments:
        worker.sending.clear()
        if sends:
            worker.sending[Attempt(9, 1)] = "decode-0"
        assert worker.prefill_view(matched, now_s) == PrefillView(worker.name, 0.0, 0, 1, matched, int(sends))
    worker.add_prompt(Attempt(1, 1), 3.0)
    worker.start_prompt(Attempt(1, 1), 1.0)
    assert [backlog_s(worker, now_s) for now_s in (1.0, 3.5, 4.0, 9.0)] == [3.0, 0.5, 0.0, 0.0]
    assert worker.prefill_view(0, 9.0).queued_requests == 1
