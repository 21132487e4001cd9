"""What is admitted: by what requests are expected to need, not by the most that they may."""

import math
from dataclasses import replace

import numpy as np
import pytest
from quiet_workers import QuietCluster

from mooncake_lab.conductor import LatencyEstimator
from mooncake_lab.perf import DecodeLatency
from mooncake_lab.serving import RejectedError

WINDOW = 8192
CAPACITY = 65_536


class Floor(QuietCluster):
    """A cluster whose workers do nothing, with room for many requests."""

    def __init__(self, believed, **changes):
        super().__init__(believed, max_context_tokens=WINDOW, capacity_tokens=CAPACITY, **changes)

    @property
    def clients(self):
        """Of its run."""
        return self.runtime._clients

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

    fetches_by_layer = False

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
    floor = make(device_tokens=CAPACITY)
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(1500):
        held = floor.clients.held_tokens()
        try:
            floor.one(tokens=int(rng.integers(1, 4000)), most=int(rng.integers(1, 4000)))
            assert floor.clients.held_tokens() <= 4 * CAPACITY
        except RejectedError:
            refused += 1
            assert floor.clients.held_tokens() == held
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
    assert floor.clients.expected_tokens(stream) == 20 + answer


def test_alone_everything_that_fits_is_taken(make):
    """A budget smaller than one request admits one at a time."""
    floor = make(max_kv_oversubscription=0.001)
    first = floor.one(tokens=4000)
    with pytest.raises(RejectedError, match=r"this one 532; allowed are 65$"):
        floor.one()
    floor.runtime.stop(first)
    floor.one()


def test_retry_after_follows_the_model(make, believed):
    """A refused client waits for its share of the time in which the model expects everything to be done."""
    slow = replace(believed, decode=DecodeLatency(1.0, 0.0, 0.0))
    floor = make(estimate=LatencyEstimator(slow), max_inflight_requests=200)
    taken, refused = floor.fill()
    whole_s = 200 * slow.prefill.seconds(20, 0) + 512 * 1.0
    assert len(taken) == 200
    assert refused.retry_after_s == pytest.approx(whole_s / 200, abs=1)
    with pytest.raises(RejectedError) as long:
        floor.one(tokens=4000)
    assert long.value.retry_after_s == pytest.approx(whole_s * 4512 / (200 * 532), abs=1)


def test_retry_after_is_bounded(make):
    """Where the estimates know no end, a client waits ten minutes."""
    floor = make(estimate=KnowsNothing(), max_inflight_requests=4)
    _, refused = floor.fill()
    assert refused.retry_after_s == 600
