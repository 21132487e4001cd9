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


TAKEN = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 4)), max_size=20)


@settings(max_examples=60, deadline=None)
@given(TAKEN, st.sampled_from([0, 1, 6]))
def test_a_change_says_what_came_left_and_moved(steps, ssd_blocks):
    """Each change leads from the tiers before to those after; what was held does not come, it only moves."""
    told = []
    caches = pool(4, ssd_blocks=ssd_blocks, changed=lambda _, change: told.append(change))
    store = caches.stores["a"]
    for i, (family, blocks, first) in enumerate(steps):
        for act in (caches.reuse, lambda node, wanted, first=first: caches.keep(node, wanted, first=first)):
            before, dram = store.keys(), set(store.dram)
            told.clear()
            act("a", request(i, family, blocks))
            after, dram_after = store.keys(), set(store.dram)
            if not told:
                assert (before, dram) == (after, dram_after)
                continue
            (change,) = told
            assert after == (before | set(change.added)) - set(change.removed)
            assert before.isdisjoint(change.added)
            assert (dram_after - dram) & before <= set(change.promoted) <= dram_after & before
            assert (dram - dram_after) & after <= set(change.demoted) <= after - dram_after
            for listed in (change.added, change.removed, change.promoted, change.demoted):
                assert len(set(listed)) == len(listed)


@settings(max_examples=60, deadline=None)
@given(TAKEN, st.sampled_from([0, 6]))
def test_a_block_has_its_place_in_its_prompt(steps, ssd_blocks):
    """Whatever part of a prompt is kept, each block that is held knows how many stand before it."""
    caches = pool(5, ssd_blocks=ssd_blocks)
    for i, (family, blocks, first) in enumerate(steps):
        caches.keep("a", request(i, family, blocks), first=first)
        kept = range(first, blocks)
        assert len(kept) > 5 or all(family * 100 + place in caches.stores["a"] for place in kept)
        for store in filter(None, (caches.stores["a"].dram, caches.stores["a"].ssd)):
            assert [store.peek(key).position for key in store] == [key % 100 for key in store]


@settings(max_examples=60, deadline=None)
@given(TAKEN, st.sampled_from([0, 6]))
def test_the_blocks_before_the_ssd_are_those_in_dram(steps, ssd_blocks):
    """A node that would read no block of a prompt from SSD says None; without an SSD that is always so."""
    caches = pool(3, ssd_blocks=ssd_blocks)
    assert caches.has_ssd == (ssd_blocks > 0)
    for i, (family, blocks, _) in enumerate(steps):
        wanted = request(i, family, blocks)
        caches.keep("a", wanted)
        store = caches.stores["a"]
        held = wanted.block_keys[: caches.matched("a", wanted)]
        below = [place for place, key in enumerate(held) if key not in store.dram]
        assert caches.before_ssd("a", wanted) == (below[0] if below else None)


def test_each_node_has_a_cache_of_its_own_unless_it_is_told_to_share():
    """By default what one node keeps is not on another."""
    caches = PrefixCaches(["a", "b"], capacity_tokens=4096, bytes_per_token=3)
    caches.keep("a", request(0, 1, 2))
    assert not caches.is_shared
    assert [caches.matched(node, request(0, 1, 2)) for node in "ab"] == [2, 0]
