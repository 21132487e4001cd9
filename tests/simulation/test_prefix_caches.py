"""The KVCache stores of prefill nodes: one a node, or one for all."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import InstanceTable, events
from mooncake_lab.conductor import History
from mooncake_lab.core import CacheChanged, Request
from mooncake_lab.simulation.prefix_caches import PrefixCaches


def request(i, family, blocks) -> Request:
    keys = tuple(family * 100 + k for k in range(blocks))
    return Request(id=i, arrival_s=0.0, input_tokens=blocks * 512, block_keys=keys)


def pool(capacity_blocks=8, *, shared=False, ssd_blocks=0, changed=None) -> PrefixCaches:
    return PrefixCaches(
        ["a", "b"],
        capacity_tokens=capacity_blocks * 512,
        bytes_per_token=3,
        shared=shared,
        ssd_tokens=ssd_blocks * 512,
        changed=changed,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 9)), max_size=30),
    st.booleans(),
    st.integers(0, 9),
)
def test_what_is_told_is_what_the_stores_hold(steps, shared, ssd_blocks):
    """Whatever is kept where, the changes add up to the contents and the tiers of the stores (I3).

    A prompt that fits is there when it was kept, nothing leaves while there is room, and there is no more room.
    """
    table, kept = InstanceTable(view_age_s=0.0), {"a": set(), "b": set()}

    def changed(cache, change):
        table.cache_changed(CacheChanged(at_s=0.0, instance=cache, **msgspec.structs.asdict(change)))

    caches = pool(6, shared=shared, ssd_blocks=ssd_blocks, changed=changed)
    for node in "ab":
        table.add(events.InstanceUp(at_s=0.0, instance=node, role="prefill", cache=caches.caches[node]))
    for i, (node, family, blocks) in enumerate(steps):
        wanted = request(i, family, blocks)
        for seen in table.view(wanted, 0.0, History()).prefill:
            assert seen.matched_blocks == caches.matched(seen.name, wanted)
            assert seen.matched_on_ssd == caches.on_ssd(seen.name, wanted.block_keys[: seen.matched_blocks])
        before = caches.matched(node, wanted)
        assert caches.reuse(node, wanted).blocks == before
        caches.keep(node, wanted)
        kept[caches.caches[node]].update(wanted.block_keys)
        if blocks <= 6:
            assert caches.matched(node, wanted) == blocks
        for name, store in caches.stores.items():
            store.check()
            room = (6 + ssd_blocks) * (1 + shared)
            assert len(store.keys()) <= room
            assert len(store.dram) <= 6 * (1 + shared)
            if len(kept[caches.caches[name]]) <= 6 * (1 + shared):
                assert store.keys() == kept[caches.caches[name]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=20),
    st.none() | st.sampled_from("ab"),
    st.sampled_from([0, 3]),
)
def test_each_block_of_one_store_lies_on_one_node(steps, drops, ssd_blocks):
    """On the one that computed it while its share has room, else on the other; a failed one takes its share."""
    caches, owners, share = pool(6, shared=True, ssd_blocks=ssd_blocks), {}, 6 + ssd_blocks
    for i, (node, family, blocks) in enumerate(steps):
        wanted = request(i, family, blocks)
        caches.reuse(node, wanted)
        # what left may come back elsewhere
        owners = {key: owner for key, owner in owners.items() if key in caches.stores["a"]}
        caches.keep(node, wanted)
        held = sorted(caches.stores["a"].keys())
        owners = {key: owners.get(key) for key in held}
        places = {each: [held[place] for place in found] for each, found in caches.elsewhere("c", held).items()}
        assert sorted(key for keys in places.values() for key in keys) == held
        assert all(len(keys) <= share for keys in places.values())
        for each, keys in places.items():
            assert caches.elsewhere(each, keys) == {}
            for key in keys:
                is_new = owners[key] is None
                assert owners[key] in {each, None}  # it stays where it is
                assert not is_new or each == node or len(places[node]) == share
                owners[key] = each
    if drops:
        caches.drop(drops)
        assert caches.stores["a"].keys() == {key for key, owner in owners.items() if owner != drops}
