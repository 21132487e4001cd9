"""BlockStore: what it promises, one sentence each, and its invariants after any sequence of calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mooncake_lab.store import EVICTION_POLICIES, BlockStore, Refused, Stored
from mooncake_lab.store.blockstore import Block
from mooncake_lab.store.eviction import LRU, make_policy

KEYS = st.integers(0, 9)


class StoreMachine(RuleBasedStateMachine):
    """I3: a store holds at most its capacity, and no block is lost or counted twice."""

    @initialize(policy=st.sampled_from([name for name in EVICTION_POLICIES if name != "belady"]))
    def build(self, policy):
        """Start with an empty store."""
        self.store = BlockStore(12, make_policy(policy, 12))
        self.held = {}
        self.pins = {}

    @rule(key=KEYS)
    def put(self, key):
        """What leaves is exactly what was evicted, never a pinned block; a refusal changes nothing."""
        size = 1 + key % 4
        outcome = self.store.put(key, f"payload {key}", size_bytes=size)
        if isinstance(outcome, Refused):
            pinned = sum(self.held[held] for held in self.pins)
            assert pinned + size > 12
            return
        assert outcome.was_held == (key in self.held)
        for victim, block in outcome.evicted:
            assert victim not in self.pins
            assert block.payload == f"payload {victim}"
            assert self.held.pop(victim) == block.size_bytes
        self.held[key] = size

    @rule(key=KEYS)
    def touch(self, key):
        """A held block is returned, a missing one is an error."""
        if key in self.held:
            assert self.store.touch(key).payload == f"payload {key}"
        else:
            with pytest.raises(KeyError, match=f"block {key} is not held"):
                self.store.touch(key)

    @rule(key=KEYS)
    def pin(self, key):
        """Pins are counted."""
        if key in self.held:
            self.store.pin(key)
            self.pins[key] = self.pins.get(key, 0) + 1
        else:
            with pytest.raises(KeyError):
                self.store.pin(key)

    @rule(key=KEYS)
    def unpin(self, key):
        """Unpinning what is not pinned is an error."""
        if key not in self.pins:
            with pytest.raises(ValueError, match="not pinned"):
                self.store.unpin(key)
            return
        self.store.unpin(key)
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]

    @rule(key=KEYS)
    def remove(self, key):
        """Only held, unpinned blocks can be removed."""
        if key in self.pins:
            with pytest.raises(ValueError, match="is pinned"):
                self.store.remove(key)
        elif key in self.held:
            assert self.store.remove(key).size_bytes == self.held.pop(key)
        else:
            with pytest.raises(KeyError):
                self.store.remove(key)

    @rule()
    def evict(self):
        """One unpinned block leaves, or there is none."""
        outcome = self.store.evict()
        if outcome is None:
            assert set(self.pins) == set(self.held)
        else:
            assert outcome[0] not in self.pins
            assert self.held.pop(outcome[0]) == outcome[1].size_bytes

    @invariant()
    def agrees_with_a_dict(self):
        """The store holds exactly what a plain dict says."""
        self.store.check()
        assert set(self.store) == set(self.held)
        assert self.store.used_bytes == sum(self.held.values()) <= self.store.capacity_bytes
        assert self.store.pinned_bytes == sum(self.held[key] for key in self.pins)
        assert dict(self.store.pins) == self.pins


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def lru_store(capacity_bytes, *keys):
    """A store of one-byte blocks that already holds some."""
    store = BlockStore(capacity_bytes, LRU())
    for key in keys:
        store.put(key, None, size_bytes=1)
    return store


def test_peeking_changes_nothing_and_touching_does():
    """A peeked block is still the next to leave; a touched one is not."""
    store = lru_store(2, "a", "b")
    assert store.peek("a") is not None
    assert store.match_prefix(["a", "b"]) == 2
    assert store.put("c", None, size_bytes=1).evicted[0][0] == "a"
    store = lru_store(2, "a", "b")
    store.touch("a")
    assert store.put("c", None, size_bytes=1).evicted[0][0] == "b"


def test_a_prefix_ends_at_the_first_missing_block():
    """Blocks behind a gap do not match."""
    store = lru_store(4, 1, 2, 4)
    assert [store.match_prefix(keys) for keys in ([1, 2, 3, 4], [3, 1], [4], [])] == [2, 0, 1, 0]


def test_one_key_names_one_content():
    """Putting a held key with another size is an error; with the same size it is a touch."""
    store = lru_store(2, "a", "b")
    with pytest.raises(ValueError, match="one key names one content"):
        store.put("a", None, size_bytes=2)
    assert store.put("a", None, size_bytes=1).was_held
    assert store.put("c", None, size_bytes=1).evicted[0][0] == "b"


def test_bad_construction_is_refused():
    """A negative capacity, a used policy and an empty block are errors."""
    with pytest.raises(ValueError, match="-1 bytes"):
        BlockStore(-1, LRU())
    used = LRU()
    used.insert(1)
    with pytest.raises(ValueError, match="holds 1 keys"):
        BlockStore(1, used)
    with pytest.raises(ValueError, match="at least 1"):
        lru_store(1).put("a", None, size_bytes=0)


def test_check_names_the_broken_invariant():
    """A store whose books were cooked says which invariant broke."""
    store = lru_store(2, "a")
    store.used_bytes = 7
    with pytest.raises(AssertionError, match=r"2 bytes: used bytes are the sum of the blocks$"):
        store.check()


RUN_KEYS = st.integers(0, 12)
POLICIES = st.sampled_from([name for name in EVICTION_POLICIES if name != "belady"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.lists(RUN_KEYS, max_size=16)),
        st.tuples(st.just("prefix"), st.lists(RUN_KEYS, max_size=6)),
        st.tuples(st.just("pin"), st.lists(RUN_KEYS, max_size=3)),
        st.tuples(st.just("unpin"), st.lists(RUN_KEYS, max_size=3)),
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


class Witness(LRU):
    """Remembers what it was asked to spare."""

    def __init__(self):
        super().__init__()
        self.spared = []

    def victim(self, incoming=None, spared=frozenset(), /):
        self.spared.append(spared)
        return super().victim(incoming, spared)


@pytest.mark.parametrize(
    "evict",
    [
        lambda store: store.put("new", None, size_bytes=1),
        lambda store: store.put_run(["new"], [Block(None, 1)]),
        lambda store: store.evict(),
    ],
)
def test_a_policy_gets_what_its_contract_says(evict):
    """However a block is evicted, `spared` is the frozenset of the keys pinned at that moment."""
    policy = Witness()
    store = BlockStore(9, policy)
    changes = (
        lambda: None,
        *[lambda: store.pin("h")] * 2,
        lambda: store.pin("i"),
        *[lambda: store.unpin("h")] * 2,
    )
    pinned = []
    store.put_run("abcdefghi", [Block(None, 1)] * 9)
    for change in changes:
        change()
        pinned.append(frozenset(store.pins))
        evict(store)
        if "new" in store:
            store.remove("new")
        store.put(len(pinned), None, size_bytes=1)
    assert policy.spared == pinned
    assert {type(spared) for spared in policy.spared} == {frozenset}
    assert pinned == [frozenset(keys) for keys in ("", "h", "h", "hi", "hi", "i")]
