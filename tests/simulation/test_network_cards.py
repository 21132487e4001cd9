"""The network cards: what is counted on them while flows come, are released, end and are cancelled."""

import math
from functools import partial

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


def is_bottleneck(card, flows, flow):
    """Whether a card is full, and nobody on it has more than this flow."""
    rates = [each.rate_bytes_per_s for each in flows]
    return sum(rates) >= card.bytes_per_s - 1e-6 and flow.rate_bytes_per_s >= max(rates) - 1e-6


def assert_fair(network):
    """Who has less than it can use passes a full card on which nobody has more: that is max-min fairness."""
    running = [*network._paced, *network._greedy]
    on = {id(card): [f for f in running if card in {f.sender, f.receiver}] for f in running
          for card in (f.sender, f.receiver)}  # fmt: skip
    for flow in running:
        assert 0 <= flow.rate_bytes_per_s <= flow.most_bytes_per_s
        if flow.rate_bytes_per_s < flow.most_bytes_per_s - 1e-6:
            assert any(is_bottleneck(card, on[id(card)], flow) for card in (flow.sender, flow.receiver))
    for card in {f.sender for f in running} | {f.receiver for f in running}:
        assert sum(f.rate_bytes_per_s for f in on[id(card)]) <= card.bytes_per_s + 1e-6


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from("cde"),
            st.sampled_from([math.inf, 0.0, 10.0, 25.0, 40.0, 60.0, 70.0]),
        ).filter(lambda flow: flow[0] != flow[1]),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from([1, 2]),
)
def test_rates_are_max_min_fair(flows, cards):
    """However many flows begin, paced or not, on nodes with one card or two."""
    network = Network(EventLoop(), 100.0, cards={"a": cards, "c": cards})
    for source, destination, most in flows:
        network.transfer(source, destination, 1e6, most_bytes_per_s=most)
        assert_fair(network)


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("cd"), st.floats(1, 500), PACES), min_size=2, max_size=8
    )
)
def test_rates_are_fair_whenever_a_flow_ends(flows):
    """What it leaves goes to the others, and those that are paced get their pace again."""
    loop = EventLoop()
    network = Network(loop, 100.0)
    for source, destination, size, pace in flows:
        network.transfer(source, destination, size, partial(assert_fair, network), most_bytes_per_s=pace)
    loop.run()


class Cards:
    """A network whose greedy flows are counted beside it."""

    def __init__(self):
        self.loop = EventLoop()
        self.network = Network(self.loop, 100.0)
        self.under_way = dict.fromkeys("ab", 0)
        self.up = set("abcd")
        self.flows, self.arrived = [], set()

    def begin(self, source, destination, size, pace, release_s):
        if {source, destination} <= self.up:
            place = len(self.flows)
            arrived = partial(self.arrived.add, place)
            flow = self.network.transfer(source, destination, size, arrived, most_bytes_per_s=pace)
            self.flows.append(flow)
            assert_fair(self.network)
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
            assert self.network._sending[flow.source].greedy == self.under_way[flow.source]
            assert_fair(self.network)

    def stop(self, place):
        if place < len(self.flows) and place not in self.arrived:
            flow = self.flows[place]
            if flow in self.network._greedy:
                self.under_way[flow.source] -= 1
            self.network.stop(flow)
            assert flow not in {*self.network._greedy, *self.network._paced}
            assert_fair(self.network)
            self.loop.call_later(1000.0, self.is_silent, place)

    def is_silent(self, place):
        assert place not in self.arrived

    def cancel(self, node):
        self.up.discard(node)
        self.network.cancel(node)
        assert_fair(self.network)


@settings(max_examples=40, deadline=None)
@given(
    FLOWS,
    st.none() | st.tuples(st.floats(0, 10), st.sampled_from("abcd")),
    st.none() | st.tuples(st.floats(0, 10), st.integers(0, 7)),
    st.lists(st.floats(0, 10), max_size=3),
)
def test_cards_are_as_new_when_all_is_over(flows, cancelled, stopped, moments_s):
    """Released, finished, stopped and cancelled flows leave no trace on a card, not even one of rounding.

    Rates are fair at any moment, and nobody is told of a flow that was stopped.
    """
    world = Cards()
    for at_s in moments_s:
        world.loop.call_later(at_s, assert_fair, world.network)
    if stopped:
        world.loop.call_later(stopped[0], world.stop, stopped[1])
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
