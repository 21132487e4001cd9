"""Which block is in which tier: the pure part of a tiered store, without I/O, clock or threads.

The caller holds one lock around all calls, or has one thread. It carries out the commands that it gets (`Free`,
`Demote`) and reports what came of its transfers (`end_write`, `abort_write`, `end_read`, `end_demotion`). Where a
block's bytes are is a handle, which only the caller understands: a reservation, or a number in a simulation.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Final, Generic, NamedTuple, TypeVar, final

from mooncake_lab.core import BlockKey
from mooncake_lab.store.blockstore import Block, BlockStore, Refused
from mooncake_lab.store.eviction import PolicyFactory, make_policy
from mooncake_lab.store.health import CircuitBreaker, Counters, TierStatistics

Handle = TypeVar("Handle", bound=Hashable)
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


@dataclass(slots=True)
class PendingEviction(Generic[Handle]):
    """An evicted block whose bytes stay until they are in the tier below, or dropped. Mutable: it counts users."""

    handle: Handle
    size_bytes: int
    position: int
    users: int = 1


class Free(NamedTuple, Generic[Handle]):
    """Command: free these bytes, then report `freed`."""

    tier: int
    handle: Handle


class Demote(NamedTuple):
    """Command: write the first block of this tier's queue into the tier below, then report `end_demotion`."""

    tier: int


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
    """Part of the capacity that is kept for evicted blocks that wait for the tier below; 0 demotes nothing."""

    def __post_init__(self) -> None:
        if not 0 <= self.queue_bytes < self.capacity_bytes:
            raise ValueError(
                f"{self.name} of {self.capacity_bytes} bytes cannot keep a queue of {self.queue_bytes};"
                " allowed are 0 to its capacity"
            )


@final
@dataclass(slots=True, eq=False)
class Tier(Generic[Handle]):
    """The blocks of one tier. Mutable."""

    spec: TierSpec
    index: int
    is_last: bool
    blocks: BlockStore[Entry[Handle]] = field(init=False)
    pending: dict[BlockKey, PendingEviction[Handle]] = field(
        init=False, default_factory=dict[BlockKey, PendingEviction[Handle]]
    )
    queue: deque[BlockKey] = field(init=False, default_factory=deque[BlockKey])
    """Pending evictions that no demotion has begun for."""
    pending_bytes: int = field(init=False, default=0)
    freeing: dict[Handle, bool] = field(init=False, default_factory=dict[Handle, bool])
    """Handles that are to be freed; true where that failed and is to be tried again."""
    counters: Counters = field(init=False, default_factory=Counters)
    reads: CircuitBreaker = field(init=False)
    writes: CircuitBreaker = field(init=False)

    def __post_init__(self) -> None:
        capacity = self.spec.capacity_bytes - (0 if self.is_last else self.spec.queue_bytes)
        policy = make_policy(self.spec.eviction, max(1, capacity // _TYPICAL_BLOCK_BYTES))
        self.blocks = BlockStore(capacity, policy)
        self.reads = CircuitBreaker(f"reading from {self.spec.name}", patience=3)
        self.writes = CircuitBreaker(f"writing to {self.spec.name}", patience=1)

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

    def end_read(self, key: BlockKey, handle: Handle, *, is_damaged: bool = False) -> list[Free[Handle]]:
        """End a read; a damaged block is removed with its last pin."""
        pending = self.pending.get(key)
        if pending is not None and pending.handle == handle:
            return self.unref(key)
        block = self.blocks.peek(key)
        if block is not None and is_damaged:
            block.payload.is_ready, block.payload.has_failed = False, True
        return self.unpin(key)

    def mark_read(self, key: BlockKey, handle: Handle, *, has_failed: bool) -> bool:
        """Record whether a block could be read; whether it failed twice without a good read in between."""
        block = self.blocks.peek(key)
        if block is None or block.payload.handle != handle:
            return False  # it is leaving
        before, block.payload.has_failed = block.payload.has_failed, has_failed
        return before and has_failed

    def unpin(self, key: BlockKey) -> list[Free[Handle]]:
        """Undo one pin."""
        self.blocks.unpin(key)
        block = self.blocks.peek(key)
        if block is None or block.payload.is_ready or key in self.blocks.pins:
            return []
        return self.free(self.blocks.remove(key).payload.handle)

    def unref(self, key: BlockKey) -> list[Free[Handle]]:
        """Remove one user of a pending eviction; after the last one its bytes are freed."""
        pending = self.pending[key]
        pending.users -= 1
        if pending.users:
            return []
        del self.pending[key]
        self.pending_bytes -= pending.size_bytes
        return self.free(pending.handle)

    def free(self, handle: Handle | None) -> list[Free[Handle]]:
        """The command to free bytes, which counts as open until `freed`."""
        if handle is None:
            return []
        self.freeing[handle] = False
        return [Free(self.index, handle)]

    def freed(self, handle: Handle, *, has_failed: bool = False) -> None:
        """Report a `Free`; one that failed is to be tried again, after those that have not failed."""
        self.freeing.pop(handle, None)
        if has_failed:
            self.freeing[handle] = True

    def learn(self, asked: Iterable[BlockKey], found: Mapping[BlockKey, tuple[Handle, int, int]]) -> None:
        """Hold what a device that evicts by itself has of these keys, and forget the rest.

        Args:
            asked: the keys.
            found: handle, bytes and position of those that it has.
        """
        for key in asked:
            block = self.blocks.peek(key)
            if block is not None and (key not in found or block.payload.handle != found[key][0]):
                self._forget(key, block.payload)
            if key in found and key not in self.blocks:
                handle, size_bytes, position = found[key]
                self.blocks.put(key, Entry(handle, is_ready=True), size_bytes=size_bytes, position=position)

    def _forget(self, key: BlockKey, entry: Entry[Handle]) -> None:
        """Stop holding a block whose bytes are gone, with its last pin; one that is being written stays."""
        if not entry.is_ready:
            return
        self.counters.evicted += 1
        if key in self.blocks.pins:
            entry.handle, entry.is_ready = None, False
        else:
            self.blocks.remove(key)

    def check(self) -> None:
        """Verify its invariants."""
        self.blocks.check()
        invariants = {
            "pending bytes add up": self.pending_bytes == sum(p.size_bytes for p in self.pending.values()),
            "pending bytes fit the queue": self.pending_bytes <= self.spec.queue_bytes,
            "queued blocks are pending": all(key in self.pending for key in self.queue),
            "no block is both held and pending": not any(key in self.blocks for key in self.pending),
        }
        broken = [name for name, holds in invariants.items() if not holds]
        if broken:
            raise AssertionError(f"broken invariants of tier {self.spec.name}: {'; '.join(broken)}")

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


class WriteOutcome(NamedTuple, Generic[Handle]):
    """Outcome of `put` and `begin_write`: the entry, None where the tier does not take the block; and commands."""

    entry: Entry[Handle] | None
    commands: Sequence[Free[Handle] | Demote] = ()


@final
class TierStack(Generic[Handle]):
    """Tiers, the fastest first, and the rules between them. Mutable.

    A new block goes into the first tier that takes it. An evicted block goes to the tier below, where it is only
    touched if it is held there already; when the queue is full it is dropped, because no request may wait for it.

    Args:
        specs: the fastest first.

    Raises:
        ValueError: when there are none.
    """

    __slots__ = ("tiers",)

    def __init__(self, specs: Sequence[TierSpec]) -> None:
        if not specs:
            raise ValueError("a tiered store of 0 tiers; at least 1 is needed")
        self.tiers: list[Tier[Handle]] = [
            Tier(spec, index, is_last=index + 1 == len(specs)) for index, spec in enumerate(specs)
        ]

    def tier_of(self, key: BlockKey) -> int | None:
        """The first tier that holds a block; changes nothing."""
        return next((tier.index for tier in self.tiers if tier.holds(key)), None)

    def match_prefix(self, keys: Iterable[BlockKey]) -> int:
        """How many of these keys are held, in any tier, before the first that is not; changes nothing."""
        return sum(1 for _ in takewhile(lambda key: self.tier_of(key) is not None, keys))

    def is_taken(self, key: BlockKey) -> bool:
        """Whether any tier has the block or is being written."""
        return any(tier.is_taken(key) for tier in self.tiers)

    def is_taken_above(self, key: BlockKey, index: int) -> bool:
        """Whether a tier above this one has the block by now, or another writer has begun to write it anywhere."""
        return any(tier.is_taken(key) and (tier.index < index or not tier.holds(key)) for tier in self.tiers)

    def begin_write(self, index: int, key: BlockKey, size_bytes: int, position: int) -> WriteOutcome[Handle]:
        """As `put`, with an entry whose bytes are still to come: pinned, and readable after `end_write`."""
        outcome = self.put(index, key, Entry[Handle](), size_bytes, position)
        if outcome.entry is not None:
            self.tiers[index].blocks.pin(key)
        return outcome

    def put(
        self, index: int, key: BlockKey, entry: Entry[Handle], size_bytes: int, position: int
    ) -> WriteOutcome[Handle]:
        """Evict until the block fits and hold it.

        A block that could not be read is replaced, since its bytes are at hand now.
        """
        tier = self.tiers[index]
        is_stale = tier.is_replaceable(key)
        if (key in tier.blocks and not is_stale) or key in tier.pending or not tier.writes.allows():
            return WriteOutcome(None)
        commands: list[Free[Handle] | Demote] = []
        if is_stale:
            commands += tier.free(tier.blocks.remove(key).payload.handle)
        outcome = tier.blocks.put(key, entry, size_bytes=size_bytes, position=position)
        if isinstance(outcome, Refused):
            tier.counters.refused += 1
            return WriteOutcome(None, commands)
        return WriteOutcome(entry, commands + self._depart(tier, outcome.evicted))

    def end_write(self, index: int, key: BlockKey) -> None:
        """The bytes of a block are there: it can be read."""
        blocks = self.tiers[index].blocks
        block = blocks.peek(key)
        if block is not None:
            block.payload.is_ready = True
        blocks.unpin(key)

    def abort_write(self, index: int, key: BlockKey) -> list[Free[Handle]]:
        """The bytes of a block will not come."""
        tier = self.tiers[index]
        tier.blocks.unpin(key)
        return tier.free(tier.blocks.remove(key).payload.handle)

    def evict_one(self, index: int) -> Sequence[Free[Handle] | Demote] | None:
        """Evict one block for space in one piece; `None` when all are pinned, or the device evicts by itself."""
        tier = self.tiers[index]
        if tier.spec.is_shared:
            return None
        victim = tier.blocks.evict()
        return None if victim is None else self._depart(tier, [victim])

    def end_demotion(self, index: int, key: BlockKey) -> list[Free[Handle]]:
        """A `Demote` has ended; counts whether the block is in the tier below now."""
        tier = self.tiers[index]
        is_below = self.tiers[index + 1].has_intact(key)
        tier.counters.demoted += is_below
        tier.counters.dropped += not is_below
        return tier.unref(key)

    def recover(
        self, index: int, key: BlockKey, handle: Handle, *, size_bytes: int, position: int
    ) -> list[Handle]:
        """Hold a block that was found on the device; those that are not held because of it."""
        entry = Entry(handle, is_ready=True)
        outcome = self.tiers[index].blocks.put(key, entry, size_bytes=size_bytes, position=position)
        if isinstance(outcome, Refused):
            return [handle]
        return [old.payload.handle for _, old in outcome.evicted if old.payload.handle is not None]

    def check(self) -> None:
        """Verify every tier's invariants."""
        for tier in self.tiers:
            tier.check()

    def _depart(
        self, tier: Tier[Handle], evicted: Iterable[tuple[BlockKey, Block[Entry[Handle]]]]
    ) -> list[Free[Handle] | Demote]:
        """Queue what the tier below lacks or could not read, and free the rest."""
        below = None if tier.is_last else self.tiers[tier.index + 1]
        commands: list[Free[Handle] | Demote] = []
        for key, block in evicted:
            handle, size = block.payload.handle, block.size_bytes
            if handle is None:
                continue  # not reachable: an entry without bytes is pinned
            if tier.spec.is_shared:
                continue  # only forgotten: its device chooses what leaves
            tier.counters.evicted += 1
            if below is not None and below.has_intact(key):
                below.touch(key)
                commands += tier.free(handle)
            elif below is not None and tier.pending_bytes + size <= tier.spec.queue_bytes:
                tier.pending[key] = PendingEviction(handle, size, block.position)
                tier.pending_bytes += size
                tier.queue.append(key)
                commands.append(Demote(tier.index))
            else:
                tier.counters.dropped += below is not None
                commands += tier.free(handle)
        return commands
