"""A store over several tiers: DRAM over SSD over remote memory. Hits are promoted, evicted blocks are demoted."""

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from mooncake_lab.store.backends import (
    BlockNotFoundError,
    Buffer,
    DamagedBlockError,
    Reservation,
    StorageBackend,
    StorageError,
)
from mooncake_lab.store.eviction import PolicyFactory
from mooncake_lab.store.health import TierStatistics, is_checksum_error, may_be_bad_sector
from mooncake_lab.store.interrupts import Uninterrupted
from mooncake_lab.store.tier_writer import BlockWriter, TierWriter, WriteBack
from mooncake_lab.store.tiers import Tier, TierSpec, TierStack


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """One tier of a store: a backend, and what `TierSpec` says of the tier."""

    medium: StorageBackend
    eviction: str | PolicyFactory = "lru"
    promotes: bool = True
    queue_bytes: int = 0

    @property
    def spec(self) -> TierSpec:
        """The tier without its backend."""
        return TierSpec(
            name=self.medium.name,
            capacity_bytes=self.medium.capacity_bytes,
            eviction=self.eviction,
            promotes=self.promotes,
            is_shared=self.medium.is_shared,
            queue_bytes=self.queue_bytes,
        )


@final
class TieredStore:
    """Blocks of one model in several tiers, the fastest first (FAST'25 §3): a node of Mooncake Store.

    `TierStack` decides which block is in which tier; this class moves the bytes. A new block goes into the first
    tier. Evicted blocks wait in a bounded queue for a thread that writes them into the tier below. A block that is
    read whole from a lower tier is put into the first one, too. A tier whose device fails is skipped and keeps its
    blocks; only a block that is not what was written is dropped: its checksum is wrong, or the device reported
    that twice.

    Keys are chained hashes, so one key names one content. Methods may be called from several threads. Mutable: it
    owns threads. Its backends stay open after `close`.

    Args:
        tiers: the fastest first; blocks that durable backends hold already are recovered.

    Raises:
        ValueError: when there are no tiers, or a queue would take all of its backend.
        OSError: when a backend cannot list its blocks.
    """

    def __init__(self, tiers: Sequence[TierSettings]) -> None:
        self._stack = TierStack[Reservation]([settings.spec for settings in tiers])
        self._backends = [settings.medium for settings in tiers]
        self._recover()
        self._lock = threading.RLock()  # a `with` of a plain lock cannot be interrupted between block and release
        self._changed = threading.Condition(self._lock)  # guards the stack; backends are called without it
        self._writer = TierWriter(self._stack, self._backends, self._changed)
        self._write_backs = [WriteBack(self._writer, index) for index in range(len(tiers) - 1)]
        self._pinned_in: dict[bytes, list[int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return isinstance(key, bytes) and self._stack.tier_of(key) is not None

    def match_prefix(self, keys: Iterable[bytes], *, first: int = 0) -> int:
        """How many of these keys are held, in any tier, before the first that is not; no use is counted.

        A tier that several clients share is asked, because the others store and evict there, too.

        Args:
            keys: of consecutive blocks of a prompt.
            first: position of the first of them in the prompt.
        """
        keys = list(keys)
        for tier, backend in zip(self._stack.tiers, self._backends, strict=True):
            if backend.is_shared:
                self._ask_pool(tier, backend, keys, first)
        with self._lock:
            return self._stack.match_prefix(keys)

    def tier_of(self, key: bytes) -> str | None:
        """The name of the first tier that holds the block, `None` where none does; changes nothing."""
        with self._lock:
            index = self._stack.tier_of(key)
        return None if index is None else self._backends[index].name

    def put(self, key: bytes, layers: Sequence[Buffer], *, position: int = 0) -> bool:
        """Hold a block in the first tier that takes it; whether it can be read now. A held block is only touched.

        A block that another thread is writing gets no second space, in no tier.

        Raises:
            ValueError: when the key or the layers are out of bounds, or backends cannot copy such memory.
        """
        sizes = [memoryview(layer).nbytes for layer in layers]  # pyright: ignore[reportArgumentType]  # arrays are
        for index in range(len(self._backends)):
            with self._lock:
                if self._stack.is_taken_above(key, index):
                    return self._stack.tier_of(key) is not None
            if self._writer.put(index, key, sizes, layers, position):
                return True
        return False

    def open(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> BlockWriter | None:
        """Space for a block whose layers come later, in the first tier that has it; `None` where none has.

        A block that is held already, or that another thread is writing, gets no second space.

        Raises:
            ValueError: when the key or the layers are out of bounds.
        """
        block: BlockWriter | None = None
        try:
            with Uninterrupted():
                block = self._open(key, layer_bytes, position)
            return block  # noqa: TRY300, RET504  # inside, so that an interrupt here is caught too
        except BaseException:  # an interrupt: the caller does not get the block
            if block is not None:
                block.abandon()
            raise

    def read_into(self, key: bytes, buffers: Sequence[Buffer], *, first_layer: int = 0) -> str | None:
        """Fill buffers with layers of a block; the tier that had it, or `None` where no tier could deliver it.

        After `None` the buffers are invalid, and the block has to be computed again.

        Raises:
            ValueError: when the buffers do not fit the layers.
        """
        for tier, backend in zip(self._stack.tiers, self._backends, strict=True):
            found = self._read_from(tier.index, key, buffers, first_layer)
            if found is None:
                continue
            layer_bytes, position = found
            if tier.index and tier.spec.promotes and len(buffers) == len(layer_bytes):
                is_promoted = self._writer.put(0, key, layer_bytes, buffers, position)
                with self._lock:
                    tier.counters.promoted += is_promoted
            return backend.name
        return None

    def promote(self, keys: Iterable[bytes]) -> None:
        """Put blocks that only lower tiers hold into the first one, after they were read layer by layer."""
        for key in keys:
            with self._lock:
                index = self._stack.tier_of(key)
                block = self._stack.tiers[index].handle_of(key) if index else None
            if index and block is not None and self._stack.tiers[index].spec.promotes:
                self.read_into(key, [np.empty(size, np.uint8) for size in block.layer_bytes])

    def pin(self, key: bytes) -> None:
        """Keep the block in the first tier that has it, until it is unpinned as often as it was pinned.

        Raises:
            KeyError: when no tier holds it.
        """
        with Uninterrupted(), self._lock:
            for tier in self._stack.tiers:
                block = tier.blocks.peek(key)
                if block is not None and block.payload.is_ready:
                    tier.blocks.pin(key)
                    self._pinned_in.setdefault(key, []).append(tier.index)
                    return
        raise KeyError(f"block {key.hex()} is held in none of {len(self._backends)} tiers")

    def unpin(self, key: bytes) -> None:
        """Undo one `pin`.

        Raises:
            ValueError: when the key is not pinned.
        """
        with Uninterrupted():
            with self._lock:
                if not self._pinned_in.get(key):
                    raise ValueError(f"block {key.hex()} is not pinned, so it cannot be unpinned")
                tier = self._stack.tiers[self._pinned_in[key].pop()]
                if not self._pinned_in[key]:
                    del self._pinned_in[key]
                commands = tier.unpin(key)
            self._writer.carry_out(commands)

    def sink(self, into: str | None = None) -> None:
        """Demote every block that is not pinned to a tier, so that a durable one keeps it over a restart.

        Args:
            into: the name of that tier, below which nothing is waited for; None is the last one.

        Raises:
            ValueError: when a queue has no space for its tier's largest block, which would be lost.
            RuntimeError: when a write-back thread crashed.
        """
        for tier in itertools.takewhile(lambda tier: tier.spec.name != into, self._stack.tiers[:-1]):
            with self._lock:
                blocks = (tier.blocks.peek(key) for key in tier.blocks)
                largest_bytes = max((block.size_bytes for block in blocks if block), default=0)
            room_bytes = tier.spec.queue_bytes - largest_bytes
            if room_bytes < 0:
                raise ValueError(
                    f"{tier.spec.name} cannot sink a block of {largest_bytes} bytes: its queue has"
                    f" {tier.spec.queue_bytes}"
                )
            has_more = True
            while has_more:
                if tier.pending_bytes > room_bytes:
                    self._flush(self._write_backs[: tier.index + 1])
                has_more = self._writer.evict_one(tier.index)
            self._flush(self._write_backs[: tier.index + 1])

    def flush(self) -> None:
        """Return when no evicted block waits for the tier below.

        Raises:
            RuntimeError: when a write-back thread crashed.
        """
        self._flush(self._write_backs)

    def _flush(self, write_backs: Sequence[WriteBack]) -> None:
        with self._lock:
            self._changed.wait_for(lambda: all(write_back.is_idle() for write_back in write_backs))
        for write_back in write_backs:
            if write_back.crash is not None:
                raise RuntimeError("a write-back thread died") from write_back.crash

    def close(self) -> None:
        """Demote what waits, free what could not be freed before, and stop; the backends stay open.

        Raises:
            RuntimeError: when a write-back thread crashed.
        """
        for write_back in self._write_backs:
            write_back.stop()
        for index in range(len(self._backends)):
            self._writer.free_again(index)
        self.flush()

    def statistics(self) -> list[TierStatistics]:
        """What each tier did so far, the fastest first."""
        with self._lock:
            return [tier.statistics() for tier in self._stack.tiers]

    def check(self) -> None:
        """Verify every tier's invariants while no other thread uses the store.

        Raises:
            AssertionError: naming the invariant that is broken.
        """
        with self._lock:
            self._stack.check()

    def leaked_bytes(self) -> int:
        """Bytes in own backends that no tier knows, and bytes that shared backends did not free.

        0, or there is a bug or a shared backend that does not answer. Call it after `flush`.
        """
        with self._lock:
            return sum(
                sum(backend.footprint_bytes(space.key, space.layer_bytes) for space in tier.freeing)
                if backend.is_shared  # its used bytes include those of other clients
                else backend.used_bytes - tier.blocks.used_bytes - tier.pending_bytes
                for tier, backend in zip(self._stack.tiers, self._backends, strict=True)
            )

    def _ask_pool(
        self, tier: Tier[Reservation], backend: StorageBackend, keys: Sequence[bytes], first: int
    ) -> None:
        """Learn which of these keys a shared pool has; none, where it does not answer.

        Positions are those in the prompt: a Mooncake Store does not keep them.
        """
        positions = {key: position for position, key in enumerate(keys, first)}
        with self._lock:
            own = [other for other in self._stack.tiers if not other.spec.is_shared]
            asked = [key for key in keys if not any(other.holds(key) for other in own)]
            if not asked:
                return
            is_tried = tier.reads.allows()
        found: list[Reservation] = []
        error: Exception | None = None
        try:
            found = backend.find(asked) if is_tried else []
        except (StorageError, OSError) as raised:
            error = raised
        with self._lock:
            if error is not None:
                tier.reads.failed(error)
            elif is_tried:
                tier.reads.worked()
            tier.learn(asked, {block.key: (block, block.size_bytes, positions[block.key]) for block in found})

    def _recover(self) -> None:
        """Hold what the backends hold, oldest first; what does not fit is freed unless the backend is shared."""
        for index, backend in enumerate(self._backends):
            for block in list(backend.blocks()):
                size = backend.footprint_bytes(block.key, block.layer_bytes)
                unwanted = self._stack.recover(index, block.key, block, size_bytes=size, position=block.position)
                if unwanted and not backend.is_shared:
                    backend.free(*unwanted)

    def _open(self, key: bytes, layer_bytes: Sequence[int], position: int) -> BlockWriter | None:
        for index in range(len(self._backends)):
            with self._lock:
                if self._stack.is_taken(key):
                    return None
            block = self._writer.open(index, key, layer_bytes, position)
            if block is not None:
                return block
        return None

    def _read_from(
        self, index: int, key: bytes, buffers: Sequence[Buffer], first_layer: int
    ) -> tuple[tuple[int, ...], int] | None:
        """Read from one tier; bytes per layer and position, or `None` where it was not read as it was written."""
        tier = self._stack.tiers[index]
        with Uninterrupted():
            with self._lock:
                block = tier.begin_read(key)
                position = tier.position_of(key)
            if block is None:
                return None
            started_s = time.perf_counter()
            try:
                self._backends[index].read_into(block, buffers, first_layer=first_layer)
            except BaseException as error:
                self._end_failed_read(index, block, error)
                if isinstance(error, (StorageError, OSError)):
                    return None
                raise
            seconds = time.perf_counter() - started_s
            with self._lock:
                layers = block.layer_bytes[first_layer : first_layer + len(buffers)]
                tier.counters.hits += 1
                tier.counters.read_bytes += sum(layers)
                tier.counters.read_s += seconds
                tier.reads.worked()
                if len(layers) == len(block.layer_bytes):
                    tier.mark_read(block.key, block, has_failed=False)
                commands = tier.end_read(block.key, block)
            self._writer.carry_out(commands)
        return block.layer_bytes, position

    def _end_failed_read(self, index: int, block: Reservation, error: BaseException) -> None:
        """A block that is not what was written is dropped; after an error of the device it stays."""
        tier = self._stack.tiers[index]
        is_gone = isinstance(error, (DamagedBlockError, BlockNotFoundError))
        with self._lock:
            has_failed_before = may_be_bad_sector(
                error, is_shared=self._backends[index].is_shared
            ) and tier.mark_read(block.key, block, has_failed=True)
            is_bad = has_failed_before and is_checksum_error(error)
            commands = tier.end_read(block.key, block, is_damaged=is_gone or is_bad)
            if isinstance(error, (StorageError, OSError)):
                tier.counters.misses += 1
                tier.counters.damaged += is_bad or isinstance(error, DamagedBlockError)
                if not (is_gone or has_failed_before):  # a second failure says nothing new of the device
                    tier.reads.failed(error)
        self._writer.carry_out(commands)
