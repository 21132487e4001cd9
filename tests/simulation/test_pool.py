"""Who holds which prefix: per-node caches and one shared store."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.core import Request
from mooncake_lab.simulation import PrefixPool


def request(i, family, blocks) -> Request:
    keys = tuple(family * 100 + k for k in range(blocks))
    return Request(id=i, arrival_s=0.0, input_tokens=blocks * 512, block_keys=keys)


def pool(capacity_blocks=8, *, shared=False, ssd_blocks=0) -> PrefixPool:
    return PrefixPool(
        ["a", "b"],
        capacity_tokens=capacity_blocks * 512,
        bytes_per_token=1,
        shared=shared,
        ssd_tokens=ssd_blocks * 512,
    )


class TestPerNode:
    def test_a_node_finds_only_what_it_kept(self):
        """Without a shared store the other node has no match."""
        caches = pool()
        caches.keep("a", request(0, 1, 4))
        assert caches.matches(request(1, 1, 6)) == [4, 0]
        assert caches.replicas() == {100: 1, 101: 1, 102: 1, 103: 1}

    def test_both_may_hold_a_block(self):
        """A block kept twice counts two replicas, and one copy may go."""
        caches = pool()
        caches.keep("a", request(0, 1, 2))
        caches.keep("b", request(1, 1, 2))
        assert caches.replicas() == {100: 2, 101: 2}
        caches.drop("a")
        assert caches.matches(request(2, 1, 2)) == [0, 2]


class TestShared:
    def test_every_node_finds_what_any_node_kept(self):
        """One store: what a node keeps, all match, and its room is that of all nodes together."""
        caches = pool(4, shared=True)
        caches.keep("a", request(0, 1, 8))
        assert caches.matches(request(1, 1, 9)) == [8, 8]
        assert caches.reuse("b", request(1, 1, 9)).blocks == 8

    def test_what_one_node_evicts_is_gone_for_all(self):
        """The store is one: there is no second copy to fall back on."""
        caches = pool(4, shared=True)
        caches.keep("a", request(0, 1, 8))
        caches.keep("b", request(1, 2, 8))
        assert caches.matches(request(2, 1, 8)) == [0, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 9)), max_size=30),
    st.booleans(),
    st.integers(0, 9),
)
def test_index_says_what_the_stores_hold(steps, shared, ssd_blocks):
    """Whatever is kept where, the index agrees with the stores, and matches with a walk through them (I3)."""
    caches = pool(6, shared=shared, ssd_blocks=ssd_blocks)
    for i, (node, family, blocks) in enumerate(steps):
        wanted = request(i, family, blocks)
        before = caches.matches(wanted)
        assert caches.reuse(node, wanted).blocks == before["ab".index(node)]
        caches.keep(node, wanted)
        caches.check()
