"""What is admitted: by what requests are expected to need, not by the most that they may."""

import math

import numpy as np
import pytest
from quiet_workers import QuietCluster

from mooncake_lab.serving import RejectedError

WINDOW = 8192
CAPACITY = 65_536


class Floor(QuietCluster):
    """A cluster whose workers do nothing, with room for many requests."""

    def __init__(self, believed, **changes):
        super().__init__(believed, window=WINDOW, capacity_tokens=CAPACITY, **changes)

    @property
    def budget(self):
        """Of its run."""
        return self.runtime._clients.budget

    def one(self, tokens=20, most=None):
        """A request that may use the whole window."""
        return self.submit(np.ones(tokens, dtype=np.int32), WINDOW - tokens if most is None else most)

    def fill(self, **asked):
        """Submit until one is refused; those that were taken, and the refusal."""
        taken = []
        while True:
            try:
                taken.append(self.one(**asked))
            except RejectedError as refused:
                return taken, refused


class KnowsNothing:
    """Estimates that everything takes forever."""

    def decode_step_s(self, requests, context_tokens):
        """Forever."""
        del requests, context_tokens
        return math.inf

    def prefill_s(self, request_id, input_tokens, reused_tokens):
        """No time: the backlog is not what is tested."""
        del request_id, input_tokens, reused_tokens
        return 0.0

    def transfer_s(self, tokens, flows):
        """No time."""
        del tokens, flows
        return 0.0


@pytest.fixture
def make(believed):
    return lambda **changes: Floor(believed, **changes)


def test_100_chats_without_a_limit_are_taken(make):
    """Chats that may use the whole window are not refused for what they will not use."""
    floor = make()
    for _ in range(100):
        floor.one()
    assert len(floor.runtime.streams) == 100


def test_the_budget_is_bounded(make):
    """No request is admitted beyond the budget, however long the answers under way get."""
    floor = make(decode_tokens=CAPACITY)
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(1500):
        held = floor.budget.held()
        try:
            floor.one(tokens=int(rng.integers(1, 4000)), most=int(rng.integers(1, 4000)))
            assert floor.budget.held() <= 4 * CAPACITY
        except RejectedError:
            refused += 1
            assert floor.budget.held() == held
        streams = list(floor.runtime.streams.values())
        for i in rng.choice(len(streams), size=min(4, len(streams)), replace=False):
            stream = streams[i]
            room = stream.params.max_new_tokens - len(stream.tokens)
            stream.tokens += [1] * int(min(room, rng.integers(0, 600)))
        if rng.random() < 0.3:
            floor.runtime.stop(streams[int(rng.integers(len(streams)))])
    assert refused > 0


@pytest.mark.parametrize(
    ("most", "made", "answer"), [(100, 0, 100), (4000, 0, 512), (4000, 300, 600), (4000, 3000, 4000)]
)
def test_what_an_answer_is_expected_to_be(make, most, made, answer):
    """The assumption at first, then twice what there is, and never more than is allowed or less than there is."""
    floor = make()
    stream = floor.one(most=most)
    stream.tokens += [1] * made
    assert floor.budget.tokens(stream) == 20 + answer


def test_alone_everything_that_fits_is_taken(make):
    """A budget smaller than one request admits one at a time."""
    floor = make(most_waiting=0.001)
    first = floor.one(tokens=4000)
    with pytest.raises(RejectedError, match=r"this one 532; allowed are 65$"):
        floor.one()
    floor.runtime.stop(first)
    floor.one()


def test_retry_after_is_the_backlog(make, monkeypatch):
    """Refused clients are told when their turn comes at the rate at which requests ended, one behind the other."""
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    floor = make(estimate=KnowsNothing())  # only what was seen counts
    taken, first = floor.fill(most=512)
    assert len(taken) == 4 * CAPACITY // 532
    assert first.retry_after_s == 1  # nothing is known yet
    for _ in range(5):
        now_s += 2
        floor.runtime.stop(taken.pop())
    _, _ = floor.fill(most=512)
    told = []
    for _ in range(1000):
        with pytest.raises(RejectedError) as refused:
            floor.one(most=512)
        told.append(refused.value.retry_after_s)
    assert told == sorted(told)
    assert told[0] >= 2
    assert told[3] > told[0]
    rate = 5 * 532 / 8  # tokens a second, over the time since the first of them ended
    assert told[-1] == min(600, int(np.ceil(floor.budget.held() / rate)))
    now_s += 700
    with pytest.raises(RejectedError) as refused:
        floor.one(most=512)
    assert refused.value.retry_after_s == 1  # nothing ended for long, and nothing is known again


def test_retry_after_follows_the_model_where_nothing_ended(make, believed):
    """By the latency model, the first who is refused waits for one request, the last for all under way."""
    floor = make(max_inflight_requests=200)
    taken, refused = floor.fill()
    step_s = believed.decode.step_s(200, 200 * 20)
    whole_s = 200 * believed.prefill.seconds(20, 0) + 512 * step_s
    assert len(taken) == 200
    assert refused.retry_after_s == 1
    for _ in range(300):
        with pytest.raises(RejectedError) as last:
            floor.one()
    assert np.ceil(512 * step_s) <= last.value.retry_after_s <= np.ceil(whole_s)


def test_what_is_remembered_of_refused_clients_is_bounded(make):
    """However many are refused, no more is remembered of them than what all requests under way need."""
    floor = make(max_inflight_requests=100)
    taken, _ = floor.fill()
    for _ in range(1000):
        with pytest.raises(RejectedError):
            floor.one()
    budget = floor.budget
    refused = [tokens for _, tokens in budget._refused]
    assert len(refused) <= len(taken) + 1
    assert sum(refused) == budget._refused_tokens
