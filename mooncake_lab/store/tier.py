"""The blocks of one tier, and the uses that keep their bytes; pure, without I/O, clock or threads."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple, final

from mooncake_lab.core import BlockKey
from mooncake_lab.store.backends.base import Reservation
from mooncake_lab.store.blockstore import BlockStore
from mooncake_lab.store.eviction import PolicyFactory, make_policy
from mooncake_lab.store.health import CircuitBreaker, Counters, TierStatistics

_TYPICAL_BLOCK_BYTES: Final = 2 * 1024**2
"""Turns a capacity into blocks for policies that need to know it."""


@dataclass(slots=True)
class Entry:
    """A block in a tier. Mutable: its bytes arrive after its key."""

    handle: Reservation | None = None
    is_ready: bool = False
    """Whether the bytes are there and intact; until then the block is pinned and not read."""
    has_failed: bool = False
    """Whether a read of it failed: the same block may be written again."""


@dataclass(slots=True)
class PendingEviction:
    """An evicted block whose bytes stay until they are in the tier below, or dropped. Mutable: it counts users."""

    handle: Reservation
    size_bytes: int
    position: int
    users: int = 1


class Free(NamedTuple):
    """Command: free these bytes, then report `freed`."""

    tier: int
    handle: Reservation


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
    evicts: bool = False
    """Whether the device evicts by itself, as a shared pool does; a block that leaves here is only forgotten."""
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
class Tier:
    """The blocks of one tier. Mutable."""

    spec: TierSpec
    index: int
    is_last: bool
    blocks: BlockStore[Entry] = field(init=False)
    pending: dict[BlockKey, PendingEviction] = field(init=False, default_factory=dict[BlockKey, PendingEviction])
    queue: deque[BlockKey] = field(init=False, default_factory=deque[BlockKey])
    """Pending evictions that no demotion has begun for."""
    pending_bytes: int = field(init=False, default=0)
    freeing: dict[Reservation, bool] = field(init=False, default_factory=dict[Reservation, bool])
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

    def handle_of(self, key: BlockKey) -> Reservation | None:
        """Where the block's bytes are; `None` where it is not held. Changes nothing."""
        pending = self.pending.get(key)
        block = self.blocks.peek(key)
        return pending.handle if pending else block.payload.handle if block else None

    def position_of(self, key: BlockKey) -> int:
        """Index of the block in its request, 0 where it is not held. Changes nothing."""
        found = self.pending.get(key) or self.blocks.peek(key)
        return 0 if found is None else found.position

    def begin_read(self, key: BlockKey) -> Reservation | None:
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

    def end_read(self, key: BlockKey, handle: Reservation, *, is_damaged: bool = False) -> list[Free]:
        """End a read; a damaged block is removed with its last pin."""
        pending = self.pending.get(key)
        if pending is not None and pending.handle == handle:
            return self.unref(key)
        block = self.blocks.peek(key)
        if block is not None and is_damaged:
            block.payload.is_ready, block.payload.has_failed = False, True
        return self.unpin(key)

    def mark_read(self, key: BlockKey, handle: Reservation, *, has_failed: bool) -> bool:
        """Record whether a block could be read; whether it failed twice without a good read in between."""
        block = self.blocks.peek(key)
        if block is None or block.payload.handle != handle:
            return False  # it is leaving
        before, block.payload.has_failed = block.payload.has_failed, has_failed
        return before and has_failed

    def unpin(self, key: BlockKey) -> list[Free]:
        """Undo one pin."""
        self.blocks.unpin(key)
        block = self.blocks.peek(key)
        if block is None or block.payload.is_ready or key in self.blocks.pins:
            return []
        return self.free(self.blocks.remove(key).payload.handle)

    def unref(self, key: BlockKey) -> list[Free]:
        """Remove one user of a pending eviction; after the last one its bytes are freed."""
        pending = self.pending[key]
        pending.users -= 1
        if pending.users:
            return []
        del self.pending[key]
        self.pending_bytes -= pending.size_bytes
        return self.free(pending.handle)

    def free(self, handle: Reservation | None) -> list[Free]:
        """The command to free bytes, which counts as open until `freed`."""
        if handle is None:
            return []
        self.freeing[handle] = False
        return [Free(self.index, handle)]

    def freed(self, handle: Reservation, *, has_failed: bool = False) -> None:
        """Report a `Free`; one that failed is to be tried again, after those that have not failed."""
        self.freeing.pop(handle, None)
        if has_failed:
            self.freeing[handle] = True

    def learn(self, asked: Iterable[BlockKey], found: Mapping[BlockKey, tuple[Reservation, int, int]]) -> None:
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

    def _forget(self, key: BlockKey, entry: Entry) -> None:
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
