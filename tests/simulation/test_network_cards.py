"""The network cards: what is counted on them while flows come, are released, end and are cancelled."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.simulation import EventLoop, Network
from mooncake_lab.simulation.network import _Card

PACES = st.sampled_from([math.inf, 10.1, 33.3, 70.7])
FLOWS = st.lists(
    st.tuples(
        st.floats(0, 5),
        st.sampled_from("ab"),
        st.sampled_from("cd"),
        st.floats(1, 500),
        PACES,
        st.floats(0.1, 5),
    ),
    min_size=1,
    max_size=8,
)


class Cards:
    """A network whose greedy flows are counted beside it."""

    def __init__(self):
        self.loop = EventLoop()
        self.network = Network(self.loop, 100.0)
        self.under_way = dict.fromkeys("ab", 0)
        self.up = set("abcd")

    def begin(self, source, destination, size, pace, release_s):
        if {source, destination} <= self.up:
            flow = self.network.transfer(source, destination, size, most_bytes_per_s=pace)
            if pace < math.inf:
                self.loop.call_later(release_s, self.release, flow)
            else:
                self.release(flow)

    def release(self, flow):
        if {flow.source, flow.destination} <= self.up:
            self.network.release(flow)
            if flow in self.network._greedy:
                self.under_way[flow.source] += 1
                flow.sent = lambda: self.under_way.update({flow.source: self.under_way[flow.source] - 1})
            assert self.network.flows_from(flow.source) == self.under_way[flow.source]

    def cancel(self, node):
        self.up.discard(node)
        self.network.cancel(node)


@settings(max_examples=40, deadline=None)
@given(FLOWS, st.none() | st.tuples(st.floats(0, 10), st.sampled_from("abcd")))
def test_cards_are_as_new_when_all_is_over(flows, cancelled):
    """Released, finished and cancelled flows leave no trace on a card, not even one of rounding."""
    world = Cards()
    for start_s, *row in flows:
        world.loop.call_later(start_s, world.begin, *row)
    if cancelled:
        world.loop.call_later(cancelled[0], world.cancel, cancelled[1])
    world.loop.run()
    assert world.loop.now_s < math.inf
    assert world.under_way == {"a": 0, "b": 0}
    assert world.network._crowded == 0
    for card in (*world.network._sending.values(), *world.network._receiving.values()):
        assert (card.greedy, card.paced, card.crowded) == (0, 0, False)
        assert card.rest_bytes_per_s == card.bytes_per_s == 100.0


def arrivals_s(flows, unit):
    """When each flow arrives, with `unit` times as many bytes everywhere."""
    loop, arrived = EventLoop(), {}
    network = Network(loop, 100.0 * unit)

    def begin(i, source, destination, size, pace, release_s):
        flow = network.transfer(
            source, destination, size * unit, lambda: arrived.update({i: loop.now_s}), most_bytes_per_s=pace * unit
        )
        loop.call_later(release_s, network.release, flow)

    for i, (start_s, *row) in enumerate(flows):
        loop.call_later(start_s, begin, i, *row)
    loop.run()
    return arrived


@settings(max_examples=40, deadline=None)
@given(FLOWS)
def test_times_do_not_depend_on_the_unit_of_bytes(flows):
    """With a thousandth of the bytes on cards that are a thousand times slower, every flow arrives as before."""
    assert arrivals_s(flows, 0.001) == pytest.approx(arrivals_s(flows, 1.0), rel=1e-9, abs=1e-6)


def test_paced_flows_leave_the_rest_of_a_slow_card():
    """One flow of 0.2 bytes/s leaves two others 0.4 each on a card of 1 byte/s; it ends when it is released."""
    flows = [
        (0.0, "a", "c", 80.0, 20.0, 4.0),
        (0.0, "a", "c", 160.0, math.inf, 1.0),
        (0.0, "a", "d", 160.0, math.inf, 1.0),
    ]
    assert arrivals_s(flows, 0.01) == {0: pytest.approx(4.0), 1: pytest.approx(4.0), 2: pytest.approx(4.0)}


def test_a_card_is_crowded_when_something_is_to_be_shared():
    """Two greedy flows, or paced ones that take more than half, crowd a card; one flow of either kind does not."""
    card = _Card(100.0, 100.0)
    assert (card.count(1, 0, 0.0), card.crowded) == (0, False)
    assert (card.count(1, 0, 0.0), card.crowded) == (1, True)
    assert (card.count(1, 0, 0.0), card.crowded) == (0, True)
    assert (card.count(-2, 0, 0.0), card.crowded) == (-1, False)
    card = _Card(100.0, 100.0)
    assert (card.count(0, 1, 50.0), card.crowded) == (0, False)
    assert (card.count(0, 1, 1.0), card.crowded) == (1, True)
    assert (card.count(0, -1, -50.0), card.crowded) == (-1, False)


def test_only_greedy_flows_count_as_sent():
    """A node that was never heard of sends nothing, and a paced flow counts from its release."""
    loop = EventLoop()
    network = Network(loop, 100.0)
    assert network.flows_from("a") == 0
    paced = network.transfer("a", "b", 100.0, most_bytes_per_s=10.0)
    assert network.flows_from("a") == 0
    network.release(paced)
    assert network.flows_from("a") == 1
    network.release(paced)  # a second time changes nothing
    assert network.flows_from("a") == 1
    loop.run()
    assert network.flows_from("a") == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_must_be_positive(rate):
    """A network that moves nothing is refused."""
    with pytest.raises(ValueError, match="the rate must be positive"):
        Network(EventLoop(), rate)


def test_a_run_ends_after_a_cancellation():
    """When the last transfer is cancelled, no timer is set for a moment that never comes."""
    loop = EventLoop()
    network = Network(loop, 100.0)
    network.transfer("a", "b", 1e6)
    loop.call_later(2.0, network.cancel, "b")
    loop.run()
    assert loop.now_s == 1e6 / 100.0  # the moment for which the transfer had set its timer
