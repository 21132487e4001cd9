"""The network cards: what is counted on them while flows come, are released, end and are cancelled."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.simulation import EventLoop
from mooncake_lab.simulation.network import Network

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
