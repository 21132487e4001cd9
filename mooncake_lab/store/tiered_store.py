"""A store over several tiers: DRAM over SSD over remote memory. Hits are promoted, evicted blocks are demoted."""

import itertools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from mooncake_lab.core.interrupts import deferred_interrupts
from mooncake_lab.store.backed_tier import BackedTier, BlockWriter, WriteBack
from mooncake_lab.store.backends import Buffer, Reservation, StorageBackend
from mooncake_lab.store.calls import Calls, call
from mooncake_lab.store.eviction import PolicyFactory
from mooncake_lab.store.health import TierStatistics
from mooncake_lab.store.tiers import Tier, TierChange, TierSpec, TierStack


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

    `TierStack` decides which block is in which tier, and each `BackedTier` moves the bytes of one. A new block
    goes into the first tier. Evicted blocks wait in a bounded queue for a thread that writes them into the tier
    below. A block that is read whole from a lower tier is put into the first one, too. A tier whose device fails
    is skipped and keeps its blocks; only a block that is not what was written is dropped: its checksum is wrong,
    or the device reported that twice.

    Keys are chained hashes, so one key names one content. Methods may be called from several threads. Mutable: it
    owns threads. Its backends stay open after `close`.

    Ctrl-C: a store that is opened in the main thread lets each call there finish; `KeyboardInterrupt` is raised at
    its end. A second Ctrl-C ends the call at once, and with it the store: it refuses all further calls but
    `close`. What was committed to a durable backend is then recovered by the next process that opens it.

    Args:
        tiers: the fastest first; blocks that durable backends hold already are recovered.
        reports_changes: whether `changes` is called now and then; until it is, the keys that changed are kept.

    Raises:
        ValueError: when there are no tiers, or a queue would take all of its backend.
        OSError: when a backend cannot list its blocks.
    """

    def __init__(self, tiers: Sequence[TierSettings], *, reports_changes: bool = False) -> None:
        self.calls = Calls()
        self._lock = self.calls.lock
        specs = [settings.spec for settings in tiers]
        self._stack = TierStack[Reservation](specs, reports_changes=reports_changes)
        # tuples, replaced as a whole: a call goes on with the tiers that it began with
        self._tiers = tuple(
            BackedTier(tier, settings.medium, self.calls)
            for tier, settings in zip(self._stack.tiers, tiers, strict=True)
        )
        for backed in self._tiers:
            backed.recover()
        self._write_backs = tuple(WriteBack(*pair) for pair in itertools.pairwise(self._tiers))
        self._pinned_in: dict[bytes, list[BackedTier]] = {}
        self._detached_damaged = 0
        self._deferral = ExitStack()
        self._deferral.enter_context(deferred_interrupts())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def attach(self, settings: TierSettings) -> None:
        """Demote to a further tier from now on, and find the blocks that it holds.

        Evicted blocks wait for it in the `queue_bytes` of the tier above.

        Raises:
            ValueError: when the store reports changes and has a tier of that name.
            OSError: when the backend cannot list its blocks.
        """
        backed = BackedTier(Tier[Reservation](settings.spec), settings.medium, self.calls)
        with self.calls:
            self.calls.check_open()
            backed.recover()
            with self._lock:
                self._stack.attach(backed.tier)
                self._write_backs += (WriteBack(self._tiers[-1], backed),)
                self._tiers += (backed,)

    def detach(self) -> None:
        """Do without the last tier from now on.

        Blocks that wait for it are still written to it. Close its backend to end that, and reads that are under
        way, when it does not answer. The backend keeps its blocks.

        Raises:
            ValueError: when it is the only tier.
            RuntimeError: when its write-back thread crashed.
        """
        with self.calls:
            self.calls.check_open()
            with self._lock:
                tier = self._stack.detach()
                *left, write_back = self._write_backs
                self._tiers, self._write_backs = self._tiers[:-1], tuple(left)
                self._detached_damaged += tier.counters.damaged
            write_back.stop()
            self._flush([write_back])

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return isinstance(key, bytes) and self._stack.tier_of(key) is not None

    @call
    def match_prefix(self, keys: Iterable[bytes], *, first: int = 0) -> int:
        """How many of these keys are held, in any tier, before the first that is not; no use is counted.

        A tier that several clients share is asked, because the others store and evict there, too.

        Args:
            keys: of consecutive blocks of a prompt.
            first: position of the first of them in the prompt.
        """
        keys = list(keys)
        for backed in self._tiers:
            if backed.backend.is_shared:
                self._ask_shared(backed, keys, first)
        with self._lock:
            return self._stack.match_prefix(keys)

    def tier_of(self, key: bytes) -> str | None:
        """The name of the first tier that holds the block, `None` where none does; changes nothing."""
        with self._lock:
            self.calls.check_open()
            tier = self._stack.tier_of(key)
        return None if tier is None else tier.spec.name

    @call
    def changes(self) -> list[TierChange]:
        """What changed since this was last called, in a store that reports changes; see `TierChange`."""
        with self._lock:
            return self._stack.changes()

    @call
    def clear(self) -> list[TierChange]:
        """Drop every block, those that are read or written with the end of that; the `changes` up to then.

        It waits until no evicted block is on its way to the tier below. Shared backends keep their blocks.

        Raises:
            RuntimeError: when a write-back thread crashed.
        """
        with self._lock:
            self._flush(self._write_backs)
            unused = [(backed, backed.tier.clear()) for backed in self._tiers]
            found = self._stack.changes()
        for backed, blocks in unused:
            backed.free(blocks)
        return found

    @call
    def put(self, key: bytes, layers: Sequence[Buffer], *, position: int = 0) -> bool:
        """Hold a block in the first tier that takes it; whether it can be read now. A held block is only touched.

        A block that another thread is writing gets no second space, in no tier.

        Raises:
            ValueError: when the key or the layers are out of bounds, or backends cannot copy such memory.
        """
        sizes = [memoryview(layer).nbytes for layer in layers]  # pyright: ignore[reportArgumentType]  # arrays are
        for backed in self._tiers:
            with self._lock:
                if self._stack.is_taken_above(key, backed.tier.index):
                    return self._stack.tier_of(key) is not None
            if backed.put(key, sizes, layers, position):
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
            with self.calls:
                self.calls.check_open()
                for backed in self._tiers:
                    with self._lock:
                        if any(tier.is_taken(key) for tier in self._stack.tiers):
                            break
                    block = backed.open(key, layer_bytes, position)
                    if block is not None:
                        break
            return block  # noqa: TRY300  # inside, so that an interrupt here is caught too
        except BaseException:  # an interrupt: the caller does not get the block
            if block is not None:
                block.abandon()
            raise

    @call
    def read_into(self, key: bytes, buffers: Sequence[Buffer], *, first_layer: int = 0) -> str | None:
        """Fill buffers with layers of a block; the tier that had it, or `None` where no tier could deliver it.

        After `None` the buffers are invalid, and the block has to be computed again.

        Raises:
            ValueError: when the buffers do not fit the layers.
        """
        for backed in self._tiers:
            found = backed.read_into(key, buffers, first_layer)
            if found is None:
                continue
            tier, (layer_bytes, position) = backed.tier, found
            if tier.index and tier.spec.promotes and len(buffers) == len(layer_bytes):
                is_promoted = self._tiers[0].put(key, layer_bytes, buffers, position)
                with self._lock:
                    tier.counters.promoted += is_promoted
            return tier.spec.name
        return None

    def promote(self, keys: Iterable[bytes]) -> None:
        """Put blocks that only lower tiers hold into the first one, after they were read layer by layer."""
        for key in keys:
            with self._lock:
                tier = self._stack.tier_of(key)
                block = tier.handle_of(key) if tier is not None and tier.index and tier.spec.promotes else None
            if block is not None:
                self.read_into(key, [np.empty(size, np.uint8) for size in block.layer_bytes])

    @call
    def pin(self, key: bytes) -> None:
        """Keep the block in the first tier that has it, until it is unpinned as often as it was pinned.

        Raises:
            KeyError: when no tier holds it.
        """
        with self._lock:
            for backed in self._tiers:
                block = backed.tier.blocks.peek(key)
                if block is not None and block.payload.is_ready:
                    backed.tier.blocks.pin(key)
                    self._pinned_in.setdefault(key, []).append(backed)
                    return
        raise KeyError(f"block {key.hex()} is held in none of {len(self._tiers)} tiers")

    @call
    def unpin(self, key: bytes) -> None:
        """Undo one `pin`.

        Raises:
            ValueError: when the key is not pinned.
        """
        with self._lock:
            if not self._pinned_in.get(key):
                raise ValueError(f"block {key.hex()} is not pinned, so it cannot be unpinned")
            backed = self._pinned_in[key].pop()
            if not self._pinned_in[key]:
                del self._pinned_in[key]
            unused = backed.tier.unpin(key)
        backed.free(unused)

    def sink(self, into: str | None = None) -> None:
        """Demote every block that is not pinned to a tier, so that a durable one keeps it over a restart.

        Args:
            into: the name of that tier, below which nothing is waited for; None is the last one.

        Raises:
            ValueError: when a queue has no space for its tier's largest block, which would be lost.
            RuntimeError: when a write-back thread crashed.
        """
        for backed in itertools.takewhile(lambda backed: backed.backend.name != into, self._tiers[:-1]):
            tier = backed.tier
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
                with self.calls:
                    self.calls.check_open()
                    has_more = backed.evict_one()
            self._flush(self._write_backs[: tier.index + 1])

    def flush(self) -> None:
        """Return when no evicted block waits for the tier below.

        Raises:
            RuntimeError: when a write-back thread crashed.
        """
        self._flush(self._write_backs)

    def _flush(self, write_backs: Sequence[WriteBack]) -> None:
        with self._lock:
            self.calls.changed.wait_for(lambda: all(write_back.is_idle() for write_back in write_backs))
        for write_back in write_backs:
            if write_back.crash is not None:
                raise RuntimeError("a write-back thread crashed") from write_back.crash

    def close(self) -> None:
        """Demote what waits, free what could not be freed before, and stop; the backends stay open.

        It waits for calls of other threads, and refuses later ones.

        Raises:
            RuntimeError: when a write-back thread crashed.
        """
        with self._deferral:
            self.calls.close()
            if self.calls.was_interrupted:  # its threads may wait for a lock that is not released any more
                return
            for write_back in self._write_backs:
                write_back.stop()
            for backed in self._tiers:
                backed.free_again()
            self._flush(self._write_backs)

    def statistics(self) -> list[TierStatistics]:
        """What each tier did so far, the fastest first."""
        with self._lock:
            return [tier.statistics() for tier in self._stack.tiers]

    def damaged_blocks(self) -> int:
        """Blocks that were found damaged so far, those of detached tiers included."""
        with self._lock:
            return self._detached_damaged + sum(tier.counters.damaged for tier in self._stack.tiers)

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
            return sum(backed.leaked_bytes() for backed in self._tiers)

    def _ask_shared(self, shared: BackedTier, keys: Sequence[bytes], first: int) -> None:
        """Learn which of these keys a shared tier has, but not of those that lie in this store's own tiers."""
        with self._lock:
            own = [tier for tier in self._stack.tiers if not tier.spec.is_shared]
            asked = {
                key: position
                for position, key in enumerate(keys, first)
                if not any(tier.holds(key) for tier in own)
            }
        if asked:
            shared.ask(asked)
