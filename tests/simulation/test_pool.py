"""The KVCache stores of prefill nodes: one a node, or one for all."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import TierChanged, WorkerTable, WorkerUp
from mooncake_lab.conductor import History
from mooncake_lab.core import CacheChanged, Request
from mooncake_lab.simulation import PrefixPool


def request(i, family, blocks) -> Request:
    keys = tuple(family * 100 + k for k in range(blocks))
    return Request(id=i, arrival_s=0.0, input_tokens=blocks * 512, block_keys=keys)


def matches(caches, wanted):
    return [caches.matched(node, wanted) for node in "ab"]


def pool(capacity_blocks=8, *, shared=False, ssd_blocks=0, changed=None) -> PrefixPool:
    return PrefixPool(
        ["a", "b"],
        capacity_tokens=capacity_blocks * 512,
        bytes_per_token=1,
        shared=shared,
        ssd_tokens=ssd_blocks * 512,
        changed=changed,
    )


class TestPerNode:
    def test_a_node_finds_only_what_it_kept(self):
        """Without a shared store the other node has no match."""
        caches = pool()
        caches.keep("a", request(0, 1, 4))
        assert matches(caches, request(1, 1, 6)) == [4, 0]
        assert (caches.held("a"), caches.held("b")) == ({100, 101, 102, 103}, set())

    def test_both_may_hold_a_block(self):
        """A block may be on two nodes, and one copy may go."""
        caches = pool()
        caches.keep("a", request(0, 1, 2))
        caches.keep("b", request(1, 1, 2))
        assert caches.held("a") == caches.held("b") == {100, 101}
        caches.drop("a")
        assert matches(caches, request(2, 1, 2)) == [0, 2]


class TestShared:
    def test_every_node_finds_what_any_node_kept(self):
        """One store: what a node keeps, all match, and its room is that of all nodes together."""
        caches = pool(4, shared=True)
        caches.keep("a", request(0, 1, 8))
        assert matches(caches, request(1, 1, 9)) == [8, 8]
        assert caches.reuse("b", request(1, 1, 9)).blocks == 8

    def test_what_one_node_evicts_is_gone_for_all(self):
        """The store is one: there is no second copy to fall back on."""
        caches = pool(4, shared=True)
        caches.keep("a", request(0, 1, 8))
        caches.keep("b", request(1, 2, 8))
        assert matches(caches, request(2, 1, 8)) == [0, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 9)), max_size=30),
    st.booleans(),
    st.integers(0, 9),
)
def test_what_is_told_is_what_the_stores_hold(steps, shared, ssd_blocks):
    """Whatever is kept where, the changes add up to the contents and the tiers of the stores (I3)."""
    table = WorkerTable()

    def changed(cache, change):
        table.cache_changed(
            CacheChanged(at_s=0.0, instance=cache, added=tuple(change.added), removed=tuple(change.removed))
        )
        promoted, demoted = tuple(change.promoted), tuple(change.demoted)
        table.tier_changed(TierChanged(at_s=0.0, cache=cache, promoted=promoted, demoted=demoted))

    caches = pool(6, shared=shared, ssd_blocks=ssd_blocks, changed=changed)
    for node in "ab":
        table.add(WorkerUp(at_s=0.0, worker=node, role="prefill", cache=caches.caches[node]))
    for i, (node, family, blocks) in enumerate(steps):
        wanted = request(i, family, blocks)
        for seen in table.view(wanted, 0.0, History()).prefill:
            assert seen.matched_blocks == caches.matched(seen.name, wanted)
            assert seen.matched_on_ssd == caches.on_ssd(seen.name, wanted.block_keys[: seen.matched_blocks])
        before = caches.matched(node, wanted)
        assert caches.reuse(node, wanted).blocks == before
        caches.keep(node, wanted)
        caches.check()
