"""The pure part of a tiered store: its rules without bytes, and with transfers that take no time."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_lab.simulation.prefix_caches import InstanceCache
from mooncake_lab.store import Block, BlockStore
from mooncake_lab.store.eviction import make_policy
from mooncake_lab.store.tiers import Entry, Tier, TierChange, TierSpec, TierStack

SIZE = 10


def stack_of(*blocks, queue=2, eviction="lru", reports_changes=False):
    """Tiers of so many blocks, and queues of `queue` blocks."""
    queues = [queue * SIZE] * (len(blocks) - 1) + [0]
    return TierStack(
        [
            TierSpec(name=f"tier {i}", capacity_bytes=count * SIZE + wait, queue_bytes=wait, eviction=eviction)
            for i, (count, wait) in enumerate(zip(blocks, queues, strict=True))
        ],
        reports_changes=reports_changes,
    )


def put_at_once(stack, key, handle, position=0):
    """Put a block into the first tier and demote what it evicts, without delay; whether the tier holds it."""
    if stack.tiers[0].has_intact(key):
        stack.tiers[0].touch(key)
        return True
    is_stored = write_at_once(stack.tiers[0], key, handle, position)
    for tier in stack.tiers[:-1]:
        while tier.queue:
            evicted = tier.queue.popleft()
            pending = tier.pending[evicted]
            write_at_once(stack.tiers[tier.index + 1], evicted, pending.handle, pending.position)
            free_at_once(tier, tier.end_demotion(evicted))
    return is_stored


def write_at_once(tier, key, handle, position=0):
    """Write a block into one tier; whether the tier takes it."""
    entry, unused = tier.begin_write(key, SIZE, position)
    free_at_once(tier, unused)
    if entry is None:
        return False
    entry.handle = handle
    tier.end_write(key)
    return True


def free_at_once(tier, handles):
    """Report that everything is freed."""
    for handle in handles:
        tier.freed(handle)


class Transfers(RuleBasedStateMachine):
    """Writes, reads and demotions that begin and end in any order, with bytes that exist until they are freed."""

    def __init__(self):
        super().__init__()
        self.stack = stack_of(2, 3, 4, reports_changes=True)
        self.all_tiers = list(self.stack.tiers)
        self.reported = {}
        self.dropped = set()  # writes that were under way when the tiers were emptied
        self.bytes = [{}, {}, {}]  # handle: key, of each tier's device
        self.writing = []
        self.reading = []
        self.handles = 0

    def free(self, index, handles):
        """Free at once."""
        for handle in handles:
            del self.bytes[index][handle]
            self.all_tiers[index].freed(handle)

    def begin(self, index, key):
        """Place a block, and give it bytes."""
        entry, unused = self.stack.tiers[index].begin_write(key, SIZE, 0)
        self.free(index, unused)
        if entry is not None:
            self.handles += 1
            entry.handle = self.handles
            self.bytes[index][self.handles] = key
        return entry is not None

    @rule(tier=st.integers(0, 2), key=st.integers(0, 9))
    def write(self, tier, key):
        """A write begins where the tier takes the block."""
        if tier < len(self.stack.tiers) and self.begin(tier, key):
            self.writing.append((tier, key))
            self.dropped.discard((tier, key))

    @precondition(lambda self: self.writing)
    @rule(draw=st.data(), succeeds=st.booleans())
    def end_write(self, draw, succeeds):
        """It ends, or it is aborted and its bytes are freed."""
        tier, key = self.writing.pop(draw.draw(st.integers(0, len(self.writing) - 1)))
        if succeeds:
            self.free(tier, self.all_tiers[tier].end_write(key))
            assert self.all_tiers[tier].holds(key) == ((tier, key) not in self.dropped)
        else:
            self.free(tier, self.all_tiers[tier].abort_write(key))

    @rule(key=st.integers(0, 9))
    def read(self, key):
        """A held block is read where its bytes are."""
        tier = self.stack.tier_of(key)
        if tier is not None:
            handle = tier.begin_read(key)
            assert self.bytes[tier.index][handle] == key
            self.reading.append((tier.index, key, handle))

    @precondition(lambda self: self.reading)
    @rule(draw=st.data(), damaged=st.booleans())
    def end_read(self, draw, damaged):
        """Its bytes were there until now; a damaged block is not read again."""
        index, key, handle = self.reading.pop(draw.draw(st.integers(0, len(self.reading) - 1)))
        tier = self.all_tiers[index]
        assert self.bytes[index][handle] == key
        is_leaving = key in tier.pending and tier.pending[key].handle == handle
        self.free(index, tier.end_read(key, handle, is_damaged=damaged))
        if damaged and not is_leaving:
            assert not tier.holds(key)

    @precondition(lambda self: any(tier.queue for tier in self.stack.tiers))
    @rule()
    def demote(self):
        """The first queued block of a tier goes into the tier below, if that takes it."""
        tier = next(tier for tier in self.stack.tiers if tier.queue)
        key = tier.queue.popleft()
        assert self.bytes[tier.index][tier.pending[key].handle] == key
        if tier.below is not None and self.begin(tier.index + 1, key):
            self.stack.tiers[tier.index + 1].end_write(key)
        self.free(tier.index, tier.end_demotion(key))

    @rule(tier=st.integers(0, 2))
    def evict(self, tier):
        """One block more leaves, unless all are pinned."""
        self.free(tier, self.all_tiers[tier].evict_one() or ())

    @precondition(lambda self: not any(tier.queue for tier in self.stack.tiers))
    @rule()
    def clear(self):
        """No tier holds a block any more but for those that leave; what is read or written keeps its bytes."""
        self.dropped |= {(index, key) for index, key in self.writing if index < len(self.stack.tiers)}
        for tier in self.stack.tiers:
            self.free(tier.index, tier.clear())
            assert not any(tier.holds(key) for key in tier.blocks)

    @rule()
    def detach_or_attach(self):
        """The last tier goes with all of its blocks, or comes back with them."""
        if len(self.stack.tiers) == 3:
            assert self.stack.detach() is self.all_tiers[-1]
        else:
            self.stack.attach(self.all_tiers[-1])

    @rule()
    def report(self):
        """Changes lead from what was reported to what is there, and are of changed blocks only."""
        for key, before, now, is_missing in self.stack.changes():
            assert self.reported.pop(key, ()) == before != now
            assert not is_missing
            self.reported[key] = now
        places = {key: tuple(t.spec.name for t in self.stack.tiers if t.holds(key)) for key in range(10)}
        assert {key: held for key, held in self.reported.items() if held} == {k: v for k, v in places.items() if v}

    @invariant()
    def every_byte_is_known(self):
        """The devices hold what the tiers know, and what is read or written is never freed."""
        for tier, held in zip(self.all_tiers, self.bytes, strict=True):
            tier.check()
            known = {block.payload.handle for key in tier.blocks if (block := tier.blocks.peek(key))}
            assert known | {pending.handle for pending in tier.pending.values()} == set(held)
            read = {key for index, key, _ in self.reading if index == tier.index}
            assert set(tier.pending) <= {*tier.queue, *read}
        for index, _, handle in self.reading:
            assert handle in self.bytes[index]


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


OPERATIONS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 14), unique=True, min_size=1, max_size=8)), max_size=25
)


@settings(max_examples=150, deadline=None)
@given(operations=OPERATIONS, sizes=st.tuples(st.integers(1, 5), st.integers(1, 8)))
@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo", "sieve"])
def test_tiers_at_once_are_two_stores(operations, sizes, eviction):
    """In the simulator, where transfers take no time, tiers are two stores: what one evicts the other holds."""
    dram, ssd = (BlockStore(count * SIZE, make_policy(eviction, count)) for count in sizes)
    simulated = InstanceCache(sizes[0] * SIZE, sizes[1] * SIZE, SIZE, eviction)
    blocks = [Block(Entry(is_ready=True), SIZE, position) for position in range(8)]
    for reads, keys in operations:
        if reads:
            held = list(itertools.takewhile(lambda key: key in dram or key in ssd, keys))
            kept = [(key, block) for key, block in zip(held, blocks, strict=False) if key not in dram]
            for key in held:
                (dram if key in dram else ssd).touch(key)
            reused = simulated.reuse(keys, blocks)
            assert (reused.blocks, reused.from_ssd) == (len(held), len(kept))
        else:
            kept = list(zip(keys, blocks, strict=False))
            simulated.keep(keys, blocks)
        evicted = dram.put_run([key for key, _ in kept], [block for _, block in kept]).evicted
        ssd.put_run([key for key, _ in evicted], [block for _, block in evicted])
        assert (set(simulated.dram), set(simulated.ssd)) == (set(dram), set(ssd))
        simulated.check()


def test_a_report_costs_what_changed():
    """However many blocks are held, a report looks at those that changed, and at none when nothing did."""

    def counted(counts, plain=Tier.holds):
        return lambda tier, key: counts.append(key) or plain(tier, key)

    looked = {}
    for blocks in (100, 10_000):
        stack = stack_of(blocks, 10, reports_changes=True)
        for key in range(blocks):
            write_at_once(stack.tiers[0], key, key)
        assert len(stack.changes()) == blocks
        counts = looked[blocks] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tier, "holds", counted(counts))
            assert stack.changes() == []
            assert counts == []
            put_at_once(stack, "new", "new")
            counts.clear()
            found = {change.key: (change.before, change.now) for change in stack.changes()}
        assert found == {"new": ((), ("tier 0",)), 0: (("tier 0",), ("tier 1",))}
    assert len(looked[100]) == len(looked[10_000]) <= 8


def test_what_a_shared_device_lacks_is_reported():
    """A block that was asked for and is nowhere is reported as missing, also where nobody here knew of it."""
    specs = [TierSpec(name=name, capacity_bytes=4 * SIZE, is_shared=name == "pool") for name in ("dram", "pool")]
    stack = TierStack(specs, reports_changes=True)
    dram, pool = stack.tiers
    pool.learn("ab", {"a": ("A", SIZE, 0)})
    assert set(stack.changes()) == {TierChange("a", (), ("pool",), False), TierChange("b", (), (), True)}
    write_at_once(dram, "c", "C")
    dram.evict_one()
    assert stack.changes() == []
    pool.learn("a", {})
    assert stack.changes() == [TierChange("a", ("pool",), (), True)]
    for key in "defgh":
        write_at_once(pool, key, key.upper())  # there is space for four
    assert {change.key: change.now for change in stack.changes()} == dict.fromkeys("efgh", ("pool",)) | {"d": ()}
    write_at_once(pool, "i", "I")
    assert {change.key: change.now for change in stack.changes()} == {"e": (), "i": ("pool",)}


def test_bad_changes_of_tiers_are_refused():
    """Two tiers of one name cannot be told apart in a report, and the last tier stays."""
    stack = stack_of(1, reports_changes=True)
    with pytest.raises(ValueError, match="a tier named 'tier 0' is there already; the names are"):
        stack.attach(Tier(TierSpec(name="tier 0", capacity_bytes=SIZE)))
    with pytest.raises(ValueError, match="tier 0 is the only tier and cannot be detached"):
        stack.detach()


def test_a_full_queue_drops():
    """No request waits: what finds the queue full is freed and counted."""
    stack = stack_of(1, 4, queue=1)
    first, unused = stack.tiers[0], []
    for key in range(4):
        entry, new = first.begin_write(key, SIZE, 0)
        entry.handle = key
        first.end_write(key)
        unused += new
    assert (list(first.queue), unused) == ([0], [1, 2])
    assert first.counters.dropped == 2
    assert stack.tier_of(0) is first  # still readable on its way down


def test_what_a_pool_lacks_is_forgotten_with_its_last_pin():
    """What its device has is held with its place, and again where it was written anew; an open write stays."""
    tier = TierStack([TierSpec(name="pool", capacity_bytes=10 * SIZE, is_shared=True)]).tiers[0]
    tier.learn("abc", {key: (key.upper(), SIZE, place) for place, key in enumerate("abc", 5)})
    assert [tier.position_of(key) for key in "abc"] == [5, 6, 7]
    assert tier.begin_read("b") == "B"
    entry, _ = tier.begin_write("d", SIZE, 0)
    tier.learn("abcd", {"c": ("anew", SIZE, 7)})
    assert [tier.holds(key) for key in "abcd"] == [False, False, True, False]
    assert tier.handle_of("c") == "anew"
    assert tier.counters.evicted == 3
    assert ("b" in tier.blocks, tier.end_read("b", "B"), "b" in tier.blocks) == (True, [], False)
    entry.handle = "D"
    tier.end_write("d")
    assert tier.holds("d")
    assert tier.evict_one() is None  # its device chooses
    tier.check()


def test_a_block_that_could_not_be_read_is_replaced():
    """Two failures in a row are told from one; the next writer frees the old bytes, but not under a reader."""
    tier = stack_of(2).tiers[0]
    assert write_at_once(tier, "a", 1, 0)
    assert not tier.mark_read("a", 2, has_failed=True)  # of other bytes
    assert [tier.mark_read("a", 1, has_failed=failed) for failed in (True, True, False, True)] == [
        False,
        True,
        False,
        False,
    ]
    assert tier.begin_read("a") == 1
    assert tier.begin_write("a", SIZE, 0) == (None, [])
    assert tier.end_read("a", 1) == []
    assert tier.begin_write("a", SIZE, 0).unused == [1]


def test_the_pure_part_needs_no_arrays():
    """It runs where the simulator runs: without numpy and torch."""
    code = "import sys, mooncake_lab.store.tiers; assert not {'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
