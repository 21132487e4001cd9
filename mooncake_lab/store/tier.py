"""One tier: a block store that decides, over a medium that holds the bytes."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

from mooncake_lab.core import BlockKey
from mooncake_lab.store.backends import Reservation, StorageBackend
from mooncake_lab.store.blockstore import Block, BlockStore, Refused
from mooncake_lab.store.eviction import PolicyFactory, make_policy
from mooncake_lab.store.health import Health
from mooncake_lab.store.tier_statistics import Tally, TierStatistics

_ORDINARY_BLOCK_BYTES = 2 * 1024**2
"""What a policy that wants to know its capacity in blocks is told a block has."""


@dataclass(slots=True)
class Slot:
    """What a tier's store holds for a key. Mutable: its bytes arrive after its name does."""

    reservation: Reservation | None = None
    ready: bool = False
    """Whether the bytes are there and good; until they are, the block is pinned and not served."""
    failed: bool = False
    """Whether a read of it failed: the same bytes may be written anew."""


@dataclass(slots=True)
class Departure:
    """A block that left a tier's store and whose bytes stay until they are in the next tier, or not wanted there.

    Mutable: it counts who still reads the bytes.
    """

    reservation: Reservation
    size_bytes: int
    users: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """A tier as it is to be.

    Raises:
        ValueError: when the queue would take all of the medium.
    """

    medium: StorageBackend
    eviction: str | PolicyFactory = "lru"
    """A name in `EVICTION_POLICIES`, or what makes a policy."""
    promotes: bool = True
    """Whether a block read here, below the first tier, is put into the first tier too."""
    queue_bytes: int = 0
    """Evicted bytes that may wait for the tier below; they are kept free for it. 0 demotes nothing."""

    def __post_init__(self) -> None:
        if not 0 <= self.queue_bytes < self.medium.capacity_bytes:
            raise ValueError(
                f"{self.medium.name} of {self.medium.capacity_bytes} bytes cannot keep a queue of"
                f" {self.queue_bytes}; allowed are 0 to its capacity"
            )


@final
@dataclass(slots=True, eq=False)
class Tier:
    """The state of one tier; whoever calls it holds the lock of the whole store. Mutable: a cache's state."""

    settings: TierSettings
    has_tier_below: bool
    blocks: BlockStore[Slot] = field(init=False)
    leaving: dict[BlockKey, Departure] = field(init=False, default_factory=dict)
    queue: deque[BlockKey] = field(init=False, default_factory=deque)
    leaving_bytes: int = field(init=False, default=0)
    going: dict[Reservation, bool] = field(init=False, default_factory=dict)
    """What is to be freed: false while it is being freed, true once that failed and is to be tried again."""
    tally: Tally = field(init=False, default_factory=Tally)
    reads: Health = field(init=False)
    writes: Health = field(init=False)

    def __post_init__(self) -> None:
        capacity = self.medium.capacity_bytes - (self.settings.queue_bytes if self.has_tier_below else 0)
        policy = make_policy(self.settings.eviction, max(1, capacity // _ORDINARY_BLOCK_BYTES))
        self.blocks = BlockStore(capacity, policy)
        self.reads = Health(f"reading from {self.medium.name}", patience=3)
        self.writes = Health(f"writing to {self.medium.name}", patience=1)

    @property
    def is_shared(self) -> bool:
        """Whether other clients count on what the medium holds."""
        return self.medium.is_shared

    @property
    def medium(self) -> StorageBackend:
        """Where its bytes are."""
        return self.settings.medium

    def adopt(self) -> None:
        """Hold what the medium holds already, the oldest first, as far as the capacity goes.

        The rest is freed where the medium is ours alone; other clients of a shared one may count on it.
        """
        for reservation in list(self.medium.blocks()):
            size = self.medium.footprint_bytes(reservation.key, reservation.layer_bytes)
            slot = Slot(reservation, ready=True)
            outcome = self.blocks.put(reservation.key, slot, size_bytes=size, position=reservation.position)
            if isinstance(outcome, Refused):
                unwanted = [reservation]
            else:
                unwanted = [old.payload.reservation for _, old in outcome.evicted if old.payload.reservation]
            if unwanted and not self.is_shared:
                self.medium.free(*unwanted)

    def place(self, key: bytes, layer_bytes: Sequence[int], position: int) -> tuple[Slot | None, list[Departure]]:
        """A pinned slot for bytes to come, `None` where there is no room, and what left for it."""
        slot = Slot()
        size = self.medium.footprint_bytes(key, layer_bytes)
        outcome = self.blocks.put(key, slot, size_bytes=size, position=position)
        if isinstance(outcome, Refused):
            self.tally.refused += 1
            return None, []
        self.blocks.pin(key)
        return slot, self._depart(outcome.evicted)

    def squeeze(self) -> list[Departure] | None:
        """Let one more block leave, for room in one piece; `None` when none can."""
        victim = self.blocks.evict()
        return None if victim is None else self._depart([victim])

    def arrived(self, key: bytes, slot: Slot) -> None:
        """The bytes of a placed block are there."""
        slot.ready = True
        self.blocks.unpin(key)

    def withdraw(self, key: bytes) -> Reservation | None:
        """The bytes of a placed block will not come; what was reserved for them is to be freed."""
        self.blocks.unpin(key)
        return self.let_go(self.blocks.remove(key).payload.reservation)

    def holds(self, key: BlockKey) -> bool:
        """Whether the block could be read here now."""
        block = self.blocks.peek(key)
        return (block is not None and block.payload.ready) or key in self.leaving

    def is_taken(self, key: BlockKey) -> bool:
        """Whether the block is here, or somebody writes it here: nobody else need write it."""
        block = self.blocks.peek(key)
        return (block is not None and not block.payload.failed) or key in self.leaving

    def doubts(self, key: BlockKey) -> bool:
        """Whether a read of the block failed, nobody uses it, and good bytes may take its place.

        While reading is degraded none is in doubt: it is the device that fails, and the block may be good.
        """
        block = self.blocks.peek(key)
        is_free = block is not None and block.payload.failed and key not in self.blocks.pins
        return is_free and self.reads.reason is None

    def read(self, key: bytes, lent: Reservation, *, failed: bool) -> bool:
        """Note whether all of what was borrowed could be read; whether it failed twice, nothing good between."""
        block = self.blocks.peek(key)
        if block is None or block.payload.reservation != lent:
            return False  # it is leaving
        before, block.payload.failed = block.payload.failed, failed
        return before and failed

    def borrow(self, key: bytes) -> Reservation | None:
        """The block's reservation, which stays until `give_back`; `None` where it is not held. Counts as a use."""
        block = self.blocks.peek(key)
        if block is not None and block.payload.ready:
            self.blocks.touch(key)
            self.blocks.pin(key)
            return block.payload.reservation
        departure = self.leaving.get(key)
        if departure is None:
            return None
        departure.users += 1
        return departure.reservation

    def give_back(self, key: bytes, lent: Reservation, *, damaged: bool = False) -> Reservation | None:
        """End a `borrow`; what is returned is to be freed now."""
        departure = self.leaving.get(key)
        if departure is not None and departure.reservation == lent:
            return self.left(key)
        block = self.blocks.peek(key)
        if block is not None and damaged:
            block.payload.ready, block.payload.failed = False, True
        return self.unpin(key)

    def unpin(self, key: bytes) -> Reservation | None:
        """Undo one pin; a damaged block goes with its last one, and is then to be freed."""
        self.blocks.unpin(key)
        block = self.blocks.peek(key)
        if block is None or block.payload.ready or key in self.blocks.pins:
            return None
        return self.let_go(self.blocks.remove(key).payload.reservation)

    def left(self, key: bytes) -> Reservation | None:
        """One user less of a departing block; after the last one it is to be freed."""
        departure = self.leaving[key]
        departure.users -= 1
        if departure.users:
            return None
        del self.leaving[key]
        self.leaving_bytes -= departure.size_bytes
        return self.let_go(departure.reservation)

    def let_go(self, reservation: Reservation | None) -> Reservation | None:
        """The same, noted until it is freed: that is for its caller to do, once nobody waits for the books."""
        if reservation is not None:
            self.going[reservation] = False
        return reservation

    def enqueue(self, departure: Departure) -> bool:
        """Let a departing block wait for the tier below; false when the queue is full."""
        if self.leaving_bytes + departure.size_bytes > self.settings.queue_bytes:
            return False
        key = departure.reservation.key
        self.leaving[key] = departure
        self.leaving_bytes += departure.size_bytes
        self.queue.append(key)
        return True

    def check(self) -> None:
        """Verify its invariants.

        Raises:
            AssertionError: naming the one that is broken.
        """
        self.blocks.check()
        invariants = {
            "bytes on their way down add up": self.leaving_bytes
            == sum(d.size_bytes for d in self.leaving.values()),
            "bytes on their way down keep their bound": self.leaving_bytes <= self.settings.queue_bytes,
            "what is queued is on its way down": all(key in self.leaving for key in self.queue),
            "no block is both here and leaving": not any(key in self.blocks for key in self.leaving),
        }
        broken = [name for name, holds in invariants.items() if not holds]
        if broken:
            raise AssertionError(f"broken invariants of tier {self.medium.name}: {'; '.join(broken)}")

    def statistics(self) -> TierStatistics:
        """What it did so far, and how it is."""
        counted = {name: getattr(self.tally, name) for name in Tally.__slots__}
        return TierStatistics(
            name=self.medium.name,
            capacity_bytes=self.blocks.capacity_bytes,
            used_bytes=self.blocks.used_bytes,
            queued_bytes=self.leaving_bytes,
            blocks=len(self.blocks),
            read_errors=self.reads.errors,
            write_errors=self.writes.errors,
            degraded=self.writes.reason or self.reads.reason,
            **counted,
        )

    def _depart(self, evicted: Iterable[tuple[BlockKey, Block[Slot]]]) -> list[Departure]:
        """What is evicted always has its bytes: the others are pinned."""
        departures = [Departure(b.payload.reservation, b.size_bytes) for _, b in evicted if b.payload.reservation]
        self.tally.evicted += len(departures)
        return departures
