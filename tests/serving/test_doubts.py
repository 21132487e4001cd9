"""A dying worker fails its peers' attempts before its parent hears of it: no attempts are spent on that."""

import time

import numpy as np
import pytest

from mooncake_lab.conductor import LatencyEstimator
from mooncake_lab.perf import model_shape
from mooncake_lab.serving import LiveSpec
from mooncake_lab.serving.dispatcher import Dispatcher
from mooncake_lab.serving.journal import Journal
from mooncake_lab.serving.messages import VERSION, Compute, Generation, Ping, Pong, Ready, Trouble


class Line:
    """A link to a worker that only notes what it is told."""

    def __init__(self, name):
        self.heard = []
        self.ready = Ready(
            version=VERSION, name=name, pid=0, port=1, fingerprint=b"f", window=4096, capacity_tokens=4096,
            shape=model_shape("lab-tiny"), end_tokens=(), device="cpu",
        )  # fmt: skip

    def send(self, *orders):
        self.heard += orders

    def of(self, kind):
        return [order for order in self.heard if isinstance(order, kind)]


@pytest.fixture
def floor(believed):
    """A dispatcher, its two lines, and one request under way."""
    dispatcher = Dispatcher(LiveSpec(), Journal(time.monotonic(), lambda _: None), lambda _: None)
    dispatcher.placer.estimate = LatencyEstimator(believed)
    lines = {name: Line(name) for name in ("prefill-0", "decode-0")}
    for name, line in lines.items():
        dispatcher.born(name, line)
    ticket = dispatcher.submit(np.arange(40, dtype=np.int32), Generation(prompt=b"", max_new_tokens=4))
    return dispatcher, lines, ticket


def fail(dispatcher, ticket):
    dispatcher.heard("prefill-0", Trouble(job=ticket.job, reason="connection reset"))


def test_nothing_is_placed_until_both_are_known(floor):
    """After trouble on the way, the request waits for the answer of each worker it went through."""
    dispatcher, lines, ticket = floor
    fail(dispatcher, ticket)
    numbers = {name: line.of(Ping)[-1].number for name, line in lines.items()}
    assert ticket.attempt == 1
    dispatcher.heard("prefill-0", Pong(numbers["prefill-0"], 0.0))
    assert ticket.attempt == 1
    dispatcher.heard("decode-0", Pong(numbers["decode-0"], 0.0))
    assert ticket.attempt == 2
    assert len(lines["prefill-0"].of(Compute)) == 2


def test_death_ends_the_doubt(floor):
    """A worker that dies instead of answering costs one attempt, and the request goes on when it is born again."""
    dispatcher, lines, ticket = floor
    fail(dispatcher, ticket)
    dispatcher.heard("prefill-0", Pong(lines["prefill-0"].of(Ping)[-1].number, 0.0))
    dispatcher.died("decode-0", "it is gone")
    assert (ticket.attempt, ticket.end) == (1, None)
    dispatcher.born("decode-0", Line("decode-0"))
    assert ticket.attempt == 2


def test_late_news_of_a_failed_attempt_are_nothing(floor):
    """Troubles that come twice of one attempt count once."""
    dispatcher, lines, ticket = floor
    fail(dispatcher, ticket)
    fail(dispatcher, ticket)
    assert len(lines["decode-0"].of(Ping)) == 1


def test_cancelled_in_doubt(floor):
    """A request cancelled while it waits is not placed."""
    dispatcher, lines, ticket = floor
    fail(dispatcher, ticket)
    dispatcher.cancel(ticket)
    for name, line in lines.items():
        dispatcher.heard(name, Pong(line.of(Ping)[-1].number, 0.0))
    assert (ticket.attempt, ticket.end.reason) == (1, "cancelled")


def test_attempts_are_bounded(floor):
    """A request that fails everywhere is given up, though every worker lives."""
    dispatcher, lines, ticket = floor
    for _ in range(10):
        fail(dispatcher, ticket)
        for name, line in lines.items():
            dispatcher.heard(name, Pong(line.of(Ping)[-1].number, 0.0))
    assert ticket.end.reason == "failed"
    assert ticket.attempt == LiveSpec().most_attempts
