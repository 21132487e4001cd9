"""The network: fair shares by hand and by law."""

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.simulation import Network


def run(flows, rate=100.0, latency_s=0.0):
    """When each flow (start, source, destination, bytes) arrives."""
    env = simpy.Environment()
    network = Network(env, rate, latency_s)
    arrived = {}

    def flow(i, start_s, source, destination, size):
        yield env.timeout(start_s)
        yield network.transfer(source, destination, size)
        arrived[i] = env.now

    for i, row in enumerate(flows):
        env.process(flow(i, *row))
    env.run()
    return [arrived[i] for i in range(len(flows))]


class TestByHand:
    def test_alone(self):
        """One flow takes bytes over rate, plus the latency."""
        assert run([(1.0, "a", "b", 200.0)], latency_s=0.5) == [3.5]

    def test_two_senders_share_a_receiver(self):
        """Two flows into one card run at half rate until the shorter one is through."""
        assert run([(0.0, "a", "c", 100.0), (0.0, "b", "c", 300.0)]) == [2.0, 4.0]

    def test_disjoint_pairs_do_not_disturb(self):
        """Flows that share no card run at full rate."""
        assert run([(0.0, "a", "b", 100.0), (0.0, "c", "d", 100.0)]) == [1.0, 1.0]

    def test_duplex(self):
        """Sending and receiving do not share."""
        assert run([(0.0, "a", "b", 100.0), (0.0, "b", "a", 100.0)]) == [1.0, 1.0]

    def test_to_itself_is_refused(self):
        """A node needs no network to reach itself."""
        with pytest.raises(ValueError, match="from a to itself"):
            Network(simpy.Environment(), 1.0).transfer("a", "a", 1.0)

    def test_a_node_that_goes_frees_the_cards_of_others(self):
        """Its transfers end at once, and those that shared a card with them run at full rate from then on."""
        env = simpy.Environment()
        network = Network(env, 100.0)
        ends = {}
        for name, source in (("lost", "a"), ("kept", "b")):
            done = network.transfer(source, "c", 200.0)
            done.callbacks.append(lambda _, name=name: ends.setdefault(name, env.now))
        env.timeout(1.0).callbacks.append(lambda _: network.cancel("a"))
        env.run()
        assert ends == {"lost": 1.0, "kept": 2.5}
        assert network.flows_from("a") == network.flows_from("b") == 0


FLOWS = st.lists(
    st.tuples(st.floats(0, 10), st.sampled_from("ab"), st.sampled_from("cd"), st.floats(1, 1e6)), max_size=12
)


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
    @given(FLOWS, st.floats(1.5, 8))
    def test_more_bandwidth_never_ends_later(self, flows, factor):
        """The last flow ends no later on a faster network."""
        if flows:
            assert max(run(flows, 100.0 * factor)) <= max(run(flows)) + 1e-6
