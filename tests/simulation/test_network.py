"""The network: fair shares by hand and by law."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.simulation import EventLoop
from mooncake_lab.simulation.network import Network


def run(flows, rate=100.0, latency_s=0.0):
    """When each flow (start, source, destination, bytes) arrives."""
    loop, arrived = EventLoop(), {}
    network = Network(loop, rate, latency_s)
    for i, (start_s, *row) in enumerate(flows):
        loop.call_later(start_s, network.transfer, *row, lambda i=i: arrived.setdefault(i, loop.now_s))
    loop.run()
    return [arrived[i] for i in range(len(flows))]


class TestByHand:
    def test_paced_flow_keeps_its_pace_until_it_is_released(self):
        """A flow of 20 bytes/s leaves 80 to another, has 40 of 100 bytes left after 3 s, and then half a card."""
        loop = EventLoop()
        network = Network(loop, 100.0)
        ends = {}
        paced = network.transfer("a", "b", 100.0, lambda: ends.update(paced=loop.now_s), most_bytes_per_s=20.0)
        network.transfer("a", "c", 300.0, lambda: ends.update(other=loop.now_s))
        assert network._sending["a"].greedy == 1
        loop.call_later(3.0, network.release, paced)
        loop.run()
        assert ends == {"paced": pytest.approx(3.8), "other": pytest.approx(3.0 + 0.8 + 0.2)}

    def test_a_node_that_goes_frees_the_cards_of_others(self):
        """Its transfers end at once, and those that shared a card with them run at full rate from then on."""
        loop = EventLoop()
        network = Network(loop, 100.0)
        ends = {}
        for name, source in (("lost", "a"), ("kept", "b")):
            network.transfer(source, "c", 200.0, lambda name=name: ends.setdefault(name, loop.now_s))
        loop.call_later(1.0, network.cancel, "a")
        loop.run()
        assert ends == {"lost": 1.0, "kept": 2.5}
        assert [network._sending[name].greedy for name in "ab"] == [0, 0]


FLOWS = st.lists(
    st.tuples(st.floats(0, 10), st.sampled_from("ab"), st.sampled_from("cd"), st.floats(1, 1e6)), max_size=12
)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_network_without_a_rate_is_refused(rate):
    """Nothing would ever arrive."""
    with pytest.raises(ValueError, match="the rate must be positive"):
        Network(EventLoop(), rate)


class TestLaws:
    @settings(max_examples=80, deadline=None)
    @given(FLOWS)
    def test_no_flow_beats_the_link_and_no_card_beats_its_rate(self, flows):
        """Each flow takes at least bytes over rate, and what one node sent by the end fits its card."""
        ends = run(flows)
        for (start_s, _, _, size), end_s in zip(flows, ends, strict=True):
            assert end_s - start_s >= size / 100.0 - 1e-6
        for node in "ab":
            mine = [(f[0], f[3], e) for f, e in zip(flows, ends, strict=True) if f[1] == node]
            if mine:
                busy_s = max(end for *_, end in mine) - min(start for start, *_ in mine)
                assert sum(size for _, size, _ in mine) <= 100.0 * busy_s * (1 + 1e-9) + 1e-3

    @settings(max_examples=40, deadline=None)
    @given(FLOWS, st.floats(0.001, 5))
    def test_latency_delays_each_arrival_and_holds_no_card(self, flows, latency_s):
        """Each flow arrives as long after its last byte was sent, however many there are."""
        assert run(flows, latency_s=latency_s) == pytest.approx([end_s + latency_s for end_s in run(flows)])

    @settings(max_examples=40, deadline=None)
    @given(FLOWS, st.floats(1.5, 8))
    def test_more_bandwidth_never_ends_later(self, flows, factor):
        """The last flow ends no later on a faster network."""
        if flows:
            assert max(run(flows, 100.0 * factor)) <= max(run(flows)) + 1e-6
