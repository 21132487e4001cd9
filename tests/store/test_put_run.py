"""`put_run` is a faster way to say `put` many times, and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.store import EVICTION_POLICIES, BlockStore, Stored
from mooncake_lab.store.blockstore import Block
from mooncake_lab.store.eviction import LRU, make_policy

POLICIES = st.sampled_from([name for name in EVICTION_POLICIES if name != "belady"])
KEYS = st.integers(0, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.lists(KEYS, max_size=16)),
        st.tuples(st.just("prefix"), st.lists(KEYS, max_size=6)),
        st.tuples(st.just("pin"), st.lists(KEYS, max_size=3)),
        st.tuples(st.just("unpin"), st.lists(KEYS, max_size=3)),
        st.tuples(st.just("evict"), st.just([])),
    ),
    max_size=14,
)


def size_of(key):
    return 1 + key % 3


def one_by_one(store, keys):
    """What came, what left and how many were refused, by single puts."""
    stored, evicted, refused = [], [], 0
    for position, key in enumerate(keys):
        outcome = store.put(key, f"payload {key}", size_bytes=size_of(key), position=position)
        if not isinstance(outcome, Stored):
            refused += 1
        elif not outcome.was_held:
            stored.append(key)
            evicted += outcome.evicted
    return stored, evicted, refused


def at_once(store, keys):
    """The same by one run."""
    return tuple(store.put_run(keys, (Block(f"payload {key}", size_of(key), i) for i, key in enumerate(keys))))


def act(store, step, *, runs):
    """One step on a store; whatever it answers."""
    verb, keys = step
    if verb == "run":
        return at_once(store, keys) if runs else one_by_one(store, keys)
    if verb == "prefix":
        if runs:
            return store.touch_prefix(keys)
        held = store.match_prefix(keys)
        for key in keys[:held]:
            store.touch(key)
        return held
    if verb == "evict":
        return store.evict()
    for key in keys:
        if verb == "pin" and key in store:
            store.pin(key)
        if verb == "unpin" and key in store.pins:
            store.unpin(key)
    return None


def contents(store):
    return {key: store.peek(key) for key in store}, dict(store.pins), store.used_bytes, store.pinned_bytes


@settings(max_examples=300, deadline=None)
@given(POLICIES, STEPS, st.integers(0, 14))
def test_a_run_is_as_many_puts(policy, steps, capacity):
    """Same evictions in the same order, same refusals, same contents and same next victims, pins or not."""
    fast, slow = (BlockStore(capacity, make_policy(policy, 12)) for _ in range(2))
    for step in steps:
        assert act(fast, step, runs=True) == act(slow, step, runs=False)
        assert contents(fast) == contents(slow)
        assert list(fast) == list(slow)
        fast.check()
    for store in (fast, slow):
        for key in list(store.pins):
            while key in store.pins:
                store.unpin(key)
    while fast:
        assert fast.evict() == slow.evict()
    assert not slow


@pytest.mark.parametrize(("size_bytes", "why"), [(0, "at least 1"), (2, "one key names one content")])
def test_a_bad_block_ends_a_run(size_bytes, why):
    """The blocks before a bad one are held, and the books still add up."""
    store = BlockStore(9, LRU())
    store.put("b", None, size_bytes=1)
    with pytest.raises(ValueError, match=why):
        store.put_run("ab", [Block(None, 1), Block(None, size_bytes)])
    store.check()
    assert set(store) == {"a", "b"}
