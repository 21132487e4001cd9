"""Which block is in which tier: the pure part of a tiered store, without I/O, clock or threads.

The caller holds one lock around all calls, or has one thread. It frees the bytes whose handles it gets and reports
`freed`; it writes what is in a tier's `queue` into the tier below and reports `end_demotion`; and it reports what
came of its transfers (`end_write`, `abort_write`, `end_read`). A handle says where a block's bytes are, which only
the caller understands: a reservation, or a number in a simulation.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar, final

from mooncake_lab.core import BlockKey
from mooncake_lab.store.blockstore import Block, BlockStore, Refused, verify
from mooncake_lab.store.eviction import PolicyFactory, make_policy
from mooncake_lab.store.health import CircuitBreaker, Counters, TierStatistics

Handle = TypeVar("Handle", bound=Hashable)
_Noted: TypeAlias = dict[BlockKey, dict[str, bool]]
"""Of each block that changed since the last report: the tiers concerned, and whether each could read it then."""
_TYPICAL_BLOCK_BYTES: Final = 2 * 1024**2
"""Turns a capacity into blocks for policies that need to know it."""


@dataclass(slots=True)
class Entry(Generic[Handle]):
    """A block in a tier. Mutable: its bytes arrive after its key."""

    handle: Handle | None = None
    is_ready: bool = False
    """Whether the bytes are there and intact; until then the block is pinned and not read."""
    has_failed: bool = False
    """Whether a read of it failed: the same block may be written again."""
    is_dropped: bool = False
    """Whether its tier was emptied while it was in use: it leaves with its last user."""


@dataclass(slots=True)
class PendingEviction(Generic[Handle]):
    """An evicted block whose bytes stay until they are in the tier below, or dropped. Mutable: it counts users."""

    handle: Handle
    size_bytes: int
    position: int
    users: int = 1


class TierChange(NamedTuple):
    """A block whose tiers are not those of the last report.

    A block that a shared device was asked for and lacks is reported also where its tiers are the same.
    """

    key: BlockKey
    before: tuple[str, ...]
    """The tiers that could read it then, the fastest first."""
    now: tuple[str, ...]
    """The tiers that can read it now."""
    is_missing: bool
    """Whether a shared device was asked for it since then and lacks it now."""


class WriteOutcome(NamedTuple, Generic[Handle]):
    """Outcome of `put` and `begin_write`."""

    entry: Entry[Handle] | None
    """`None` where the tier does not take the block."""
    unused: list[Handle]
    """Handles to free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier of a stack.

    Raises:
        ValueError: when the queue would take all of the tier.
    """

    name: str
    capacity_bytes: int
    eviction: str | PolicyFactory = "lru"
    """A name in `EVICTION_POLICIES`, or a factory."""
    promotes: bool = True
    """Whether a block read here, below the first tier, is put into the first tier, too."""
    is_shared: bool = False
    """Whether clients share the device, which then evicts by itself: what leaves here is only forgotten."""
    queue_bytes: int = 0
    """Part of the capacity for evicted blocks that wait for the tier below, also one that is attached later.

    0 demotes nothing."""

    def __post_init__(self) -> None:
        if not 0 <= self.queue_bytes < self.capacity_bytes:
            raise ValueError(
                f"{self.name} of {self.capacity_bytes} bytes cannot keep a queue of {self.queue_bytes};"
                " allowed are 0 to its capacity"
            )


@final
class Tier(Generic[Handle]):
    """The blocks of one tier, and the rules between it and the tier below. Mutable.

    An evicted block goes to the tier below, where it is only touched if it is held there already; when the queue
    is full it is dropped, because no request may wait for it.

    Args:
        spec: its name, size and settings.
    """

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self.index = 0
        """How many tiers are faster."""
        self.below: Tier[Handle] | None = None
        """The next slower tier."""
        capacity = spec.capacity_bytes - spec.queue_bytes
        policy = make_policy(spec.eviction, max(1, capacity // _TYPICAL_BLOCK_BYTES))
        self.blocks = BlockStore[Entry[Handle]](capacity, policy)
        self.pending: dict[BlockKey, PendingEviction[Handle]] = {}
        self.queue = deque[BlockKey]()
        """Pending evictions that no demotion has begun for."""
        self.pending_bytes = 0
        self.freeing: dict[Handle, bool] = {}
        """Handles that are to be freed; true where that failed and is to be tried again."""
        self.noted: _Noted | None = None
        """Where changes are noted for the next report; None where nothing reports them."""
        self.counters = Counters()
        self.reads = CircuitBreaker(f"reading from {spec.name}", patience=3)
        self.writes = CircuitBreaker(f"writing to {spec.name}", patience=1)

    def holds(self, key: BlockKey) -> bool:
        """Whether the block can be read here now."""
        block = self.blocks.peek(key)
        return (block is not None and block.payload.is_ready) or key in self.pending

    def is_taken(self, key: BlockKey) -> bool:
        """Whether the block is here or being written here, so that no other writer is needed."""
        block = self.blocks.peek(key)
        return (block is not None and not block.payload.has_failed) or key in self.pending

    def is_replaceable(self, key: BlockKey) -> bool:
        """Whether a read of the block failed, nothing uses it, and intact bytes may replace it.

        While reading is degraded no block is replaceable: the device fails, and the block may be intact.
        """
        block = self.blocks.peek(key)
        is_unused = block is not None and block.payload.has_failed and key not in self.blocks.pins
        return is_unused and self.reads.reason is None

    def has_intact(self, key: BlockKey) -> bool:
        """Whether the block can be read here and need not be written again."""
        return self.holds(key) and not self.is_replaceable(key)

    def touch(self, key: BlockKey) -> None:
        """Count a use of a block, unless it is leaving."""
        if key in self.blocks:
            self.blocks.touch(key)

    def handle_of(self, key: BlockKey) -> Handle | None:
        """Where the block's bytes are; `None` where it is not held. Changes nothing."""
        pending = self.pending.get(key)
        block = self.blocks.peek(key)
        return pending.handle if pending else block.payload.handle if block else None

    def position_of(self, key: BlockKey) -> int:
        """Index of the block in its request, 0 where it is not held. Changes nothing."""
        found = self.pending.get(key) or self.blocks.peek(key)
        return 0 if found is None else found.position

    def begin_write(self, key: BlockKey, size_bytes: int, position: int) -> WriteOutcome[Handle]:
        """As `put`, with an entry whose bytes are still to come: pinned, and readable after `end_write`."""
        outcome = self.put(key, Entry[Handle](), size_bytes, position)
        if outcome.entry is not None:
            self.blocks.pin(key)
        return outcome

    def put(self, key: BlockKey, entry: Entry[Handle], size_bytes: int, position: int) -> WriteOutcome[Handle]:
        """Evict until the block fits and hold it.

        A block that could not be read is replaced, since its bytes are at hand now.
        """
        is_stale = self.is_replaceable(key)
        if (key in self.blocks and not is_stale) or key in self.pending or not self.writes.allows():
            return WriteOutcome(None, [])
        unused = self._remove(key) if is_stale else []
        outcome = self.blocks.put(key, entry, size_bytes=size_bytes, position=position)
        if isinstance(outcome, Refused):
            self.counters.refused += 1
            return WriteOutcome(None, unused)
        return WriteOutcome(entry, unused + self._depart(outcome.evicted))

    def end_write(self, key: BlockKey) -> list[Handle]:
        """The bytes of a block are there: it can be read, unless the tier was emptied meanwhile. What to free."""
        block = self.blocks.peek(key)
        if block is not None and not block.payload.is_dropped:
            self.note(key, was_held=block.payload.is_ready)
            block.payload.is_ready = True
        return self.unpin(key)

    def abort_write(self, key: BlockKey) -> list[Handle]:
        """The bytes of a block will not come; what to free."""
        self.blocks.unpin(key)
        return self._remove(key)

    def begin_read(self, key: BlockKey) -> Handle | None:
        """Where to read the block, which stays until `end_read`; `None` is a miss. Counts as a use."""
        handle = None
        if self.holds(key) and self.reads.allows():
            pending = self.pending.get(key)
            if pending is not None:
                pending.users += 1
                return pending.handle
            self.blocks.pin(key)
            handle = self.blocks.touch(key).payload.handle
        if handle is None:
            self.counters.misses += 1
        return handle

    def end_read(self, key: BlockKey, handle: Handle, *, is_damaged: bool = False) -> list[Handle]:
        """End a read; a damaged block is removed with its last pin. What to free."""
        pending = self.pending.get(key)
        if pending is not None and pending.handle == handle:
            return self._unref(key)
        block = self.blocks.peek(key)
        if block is not None and is_damaged:
            self.note(key, was_held=block.payload.is_ready)
            block.payload.is_ready, block.payload.has_failed = False, True
        return self.unpin(key)

    def mark_read(self, key: BlockKey, handle: Handle, *, has_failed: bool) -> bool:
        """Record whether a block could be read; whether it failed twice without a good read in between."""
        block = self.blocks.peek(key)
        if block is None or block.payload.handle != handle:
            return False  # it is leaving
        before, block.payload.has_failed = block.payload.has_failed, has_failed
        return before and has_failed

    def unpin(self, key: BlockKey) -> list[Handle]:
        """Undo one pin; what to free."""
        self.blocks.unpin(key)
        block = self.blocks.peek(key)
        if block is None or block.payload.is_ready or key in self.blocks.pins:
            return []
        return self._remove(key)

    def evict_one(self) -> list[Handle] | None:
        """Evict one block for space in one piece; `None` when all are pinned, or the device evicts by itself."""
        victim = None if self.spec.is_shared else self.blocks.evict()
        return None if victim is None else self._depart([victim])

    def end_demotion(self, key: BlockKey) -> list[Handle]:
        """A queued block was written into the tier below, or could not be; counts which. What to free."""
        is_below = self.below is not None and self.below.has_intact(key)
        self.counters.demoted += is_below
        self.counters.dropped += not is_below
        return self._unref(key)

    def freed(self, handle: Handle, *, has_failed: bool = False) -> None:
        """Report a free; one that failed is to be tried again, after those that have not failed."""
        self.freeing.pop(handle, None)
        if has_failed:
            self.freeing[handle] = True

    def recover(self, key: BlockKey, handle: Handle, *, size_bytes: int, position: int) -> list[Handle]:
        """Hold a block that was found on the device; those that are not held because of it."""
        entry = Entry(handle, is_ready=True)
        outcome = self.blocks.put(key, entry, size_bytes=size_bytes, position=position)
        if isinstance(outcome, Refused):
            return [handle]
        self.note(key, was_held=False)  # those that leave for it were noted so, too
        return [old.payload.handle for _, old in outcome.evicted if old.payload.handle is not None]

    def learn(self, asked: Iterable[BlockKey], found: Mapping[BlockKey, tuple[Handle, int, int]]) -> None:
        """Hold what a device that evicts by itself has of these keys, and forget the rest.

        Args:
            asked: the keys.
            found: handle, bytes and position of those that it has.
        """
        for key in asked:
            self.note(key, was_held=self.holds(key))
            block, there = self.blocks.peek(key), found.get(key)
            is_other = there is None or (block is not None and block.payload.handle != there[0])
            if block is not None and block.payload.is_ready and is_other:
                self.counters.evicted += 1
                if key in self.blocks.pins:  # it goes with its last pin
                    block.payload.handle, block.payload.is_ready = None, False
                else:
                    self.blocks.remove(key)
            if there is not None and key not in self.blocks:
                entry = Entry(there[0], is_ready=True)
                self.blocks.put(key, entry, size_bytes=there[1], position=there[2])

    def clear(self) -> list[Handle]:
        """Drop every block, those in use with their last user; what to free. Nothing waits for the tier below."""
        unused = list[Handle]()
        for key in list(self.blocks):
            block = self.blocks.peek(key)
            if block is None or key not in self.blocks.pins:
                unused += self._remove(key)
                continue
            self.note(key, was_held=block.payload.is_ready)
            block.payload.is_ready, block.payload.is_dropped = False, True
        return unused

    def check(self) -> None:
        """Verify its invariants; see `BlockStore.check`."""
        self.blocks.check()
        invariants = {
            "pending bytes add up": self.pending_bytes == sum(p.size_bytes for p in self.pending.values()),
            "pending bytes fit the queue": self.pending_bytes <= self.spec.queue_bytes,
            "queued blocks are pending": all(key in self.pending for key in self.queue),
            "no block is both held and pending": not any(key in self.blocks for key in self.pending),
        }
        verify(f"tier {self.spec.name}", invariants)

    def statistics(self) -> TierStatistics:
        """What it did so far, and its state."""
        return TierStatistics(
            name=self.spec.name,
            capacity_bytes=self.blocks.capacity_bytes,
            used_bytes=self.blocks.used_bytes,
            queued_bytes=self.pending_bytes,
            blocks=len(self.blocks),
            read_errors=self.reads.errors,
            write_errors=self.writes.errors,
            degraded=self.writes.reason or self.reads.reason,
            **asdict(self.counters),
        )

    def _depart(self, evicted: Iterable[tuple[BlockKey, Block[Entry[Handle]]]]) -> list[Handle]:
        """Queue what the tier below lacks or could not read; what of the rest is to be freed."""
        if self.spec.is_shared:
            for key, block in evicted:
                self.note(key, was_held=block.payload.is_ready)
            return []  # only forgotten: its device chooses what leaves
        below, unused = self.below, list[Handle]()
        for key, block in evicted:
            handle, size = block.payload.handle, block.size_bytes
            if handle is None:
                continue  # not reachable: an entry without bytes is pinned
            self.counters.evicted += 1
            if below is not None and below.has_intact(key):
                below.touch(key)
            elif below is not None and self.pending_bytes + size <= self.spec.queue_bytes:
                self.pending[key] = PendingEviction(handle, size, block.position)
                self.pending_bytes += size
                self.queue.append(key)
                continue
            else:
                self.counters.dropped += below is not None
            self.note(key, was_held=block.payload.is_ready)
            unused += self._free(handle)
        return unused

    def _unref(self, key: BlockKey) -> list[Handle]:
        """Remove one user of a pending eviction; after the last one its bytes are to be freed."""
        pending = self.pending[key]
        pending.users -= 1
        if pending.users:
            return []
        del self.pending[key]
        self.note(key, was_held=True)
        self.pending_bytes -= pending.size_bytes
        return self._free(pending.handle)

    def _remove(self, key: BlockKey) -> list[Handle]:
        """Hold a block no longer; what to free."""
        entry = self.blocks.remove(key).payload
        self.note(key, was_held=entry.is_ready)
        return self._free(entry.handle)

    def note(self, key: BlockKey, *, was_held: bool) -> None:
        """Note for the next report whether the block could be read here before this change."""
        if self.noted is not None:
            self.noted.setdefault(key, {}).setdefault(self.spec.name, was_held)

    def _free(self, handle: Handle | None) -> list[Handle]:
        """A handle that is to be freed, and counts as open until `freed`."""
        if handle is None:
            return []
        self.freeing[handle] = False
        return [handle]


@final
class TierStack(Generic[Handle]):
    """Tiers, the fastest first; a new block goes into the first one that takes it. Mutable.

    Args:
        specs: of the tiers.
        reports_changes: whether `changes` is called now and then; until it is, the keys that changed are kept.

    Raises:
        ValueError: when there are no tiers, or changes are reported and two tiers have one name.
    """

    def __init__(self, specs: Sequence[TierSpec], *, reports_changes: bool = False) -> None:
        if not specs:
            raise ValueError("a tiered store of 0 tiers; at least 1 is needed")
        self._noted: _Noted | None = {} if reports_changes else None
        self.tiers: list[Tier[Handle]] = []
        for spec in specs:
            self.attach(Tier[Handle](spec))

    def attach(self, tier: Tier[Handle]) -> None:
        """Demote to this tier from now on, and find what it holds.

        Raises:
            ValueError: when changes are reported and another tier has its name.
        """
        names = [other.spec.name for other in self.tiers]
        if self._noted is not None and tier.spec.name in names:
            raise ValueError(f"a tier named {tier.spec.name!r} is there already; the names are {names}")
        if self.tiers:
            self.tiers[-1].below = tier
        tier.index = len(self.tiers)
        self.tiers.append(tier)
        tier.noted = self._noted
        _note_all(tier, was_held=False)

    def detach(self) -> Tier[Handle]:
        """Do without the last tier from now on, and return it; what its users do to it is not reported.

        Raises:
            ValueError: when it is the only one.
        """
        if len(self.tiers) == 1:
            raise ValueError(f"{self.tiers[0].spec.name} is the only tier and cannot be detached")
        tier = self.tiers.pop()
        self.tiers[-1].below = None
        _note_all(tier, was_held=True)
        tier.noted = None
        return tier

    def tier_of(self, key: BlockKey) -> Tier[Handle] | None:
        """The first tier that holds a block; changes nothing."""
        return next((tier for tier in self.tiers if tier.holds(key)), None)

    def match_prefix(self, keys: Iterable[BlockKey]) -> int:
        """How many of these keys are held, in any tier, before the first that is not; changes nothing."""
        return sum(1 for _ in takewhile(self.tier_of, keys))

    def is_taken_above(self, key: BlockKey, index: int) -> bool:
        """Whether a tier above this one has the block by now, or another writer has begun to write it anywhere."""
        return any(tier.is_taken(key) and (tier.index < index or not tier.holds(key)) for tier in self.tiers)

    def changes(self) -> list[TierChange]:
        """What changed since this was last called, in work that follows the changes and not the blocks held."""
        found = list[TierChange]()
        tiers = {tier.spec.name: tier for tier in self.tiers}
        for key, noted in (self._noted or {}).items():
            before = [name for name, tier in tiers.items() if noted.get(name, tier.holds(key))]
            before += [name for name, was_held in noted.items() if was_held and name not in tiers]  # detached
            now = [name for name, tier in tiers.items() if tier.holds(key)]
            is_missing = any(
                name in noted and name not in now for name, tier in tiers.items() if tier.spec.is_shared
            )
            if before != now or is_missing:
                found.append(TierChange(key, tuple(before), tuple(now), is_missing))
        if self._noted:
            self._noted.clear()
        return found

    def check(self) -> None:
        """Verify every tier's invariants."""
        for tier in self.tiers:
            tier.check()


def _note_all(tier: Tier[Handle], *, was_held: bool) -> None:
    """Note every block of a tier that can be read there."""
    for key in (*tier.blocks, *tier.pending):
        if tier.holds(key):
            tier.note(key, was_held=was_held)
