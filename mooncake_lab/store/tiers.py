"""Tiers: DRAM over SSD over remote memory; hits rise, evicted blocks sink, and no request waits for that."""

import threading
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Self, final

import numpy as np

from mooncake_lab.store.arrivals import Arrivals, free_again, free_quietly
from mooncake_lab.store.backends import (
    Buffer,
)
from mooncake_lab.store.interrupts import Uninterrupted
from mooncake_lab.store.open_block import OpenBlock
from mooncake_lab.store.reading import deliver
from mooncake_lab.store.tier import Tier, TierSettings, TierStatistics
from mooncake_lab.store.write_back import WriteBack


@final
class TieredStore:
    """Blocks of one model over several media, the fastest first (FAST'25 §3): a node of Mooncake Store.

    A new block goes into the first tier. What a tier evicts waits in a bounded queue for a thread that writes it
    into the tier below; when the queue is full it is dropped: a cache may forget, and a request must not wait. A
    block read whole from a lower tier is put into the first one as well. Each tier has its own `BlockStore` and
    policy. A tier that fails is skipped and says so, and keeps its blocks. Only a block that is not what was
    written is dropped: its checksum is wrong, or the device says so twice.

    Keys are chained hashes, so one key names one content. Methods may be called from several threads. Mutable: it
    is the state of a cache, and it owns threads. Its media are its maker's to close, after `close`.

    Args:
        tiers: the fastest first; blocks that durable media hold already are taken over.

    Raises:
        ValueError: when there are no tiers.
        OSError: when a medium cannot be asked what it holds.
    """

    def __init__(self, tiers: Sequence[TierSettings]) -> None:
        if not tiers:
            raise ValueError("a tiered store of 0 tiers; at least 1 is needed")
        self._tiers = [Tier(settings, has_tier_below=i + 1 < len(tiers)) for i, settings in enumerate(tiers)]
        for tier in self._tiers:
            tier.adopt()
        self._lock = threading.RLock()  # a `with` of a plain lock cannot be interrupted between block and release
        self._books = threading.Condition(self._lock)  # guards every tier; devices are only asked outside of it
        self._arrivals = Arrivals(self._tiers, self._books)
        self._write_backs = [WriteBack(self._tiers, i, self._books, self._arrivals) for i in range(len(tiers) - 1)]
        self._pinned_in: dict[bytes, list[int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return isinstance(key, bytes) and self._first_tier_with(key) is not None

    def match_prefix(self, keys: Iterable[bytes]) -> int:
        """How many of these keys are held, in whatever tier, before the first that is not; changes nothing."""
        with self._lock:
            return sum(1 for _ in takewhile(lambda key: self._first_tier_with(key) is not None, keys))

    def layer_bytes(self, key: bytes) -> tuple[int, ...] | None:
        """The bytes of each layer of a block, `None` where it is not held; changes nothing."""
        with self._lock:
            for tier in self._tiers:
                departure = tier.leaving.get(key)
                block = tier.blocks.peek(key)
                found = departure.reservation if departure else block.payload.reservation if block else None
                if found is not None:
                    return found.layer_bytes
        return None

    def tier_of(self, key: bytes) -> str | None:
        """The name of the first tier that holds the block, `None` where none does; changes nothing."""
        with self._lock:
            index = self._first_tier_with(key)
        return None if index is None else self._tiers[index].medium.name

    def put(self, key: bytes, layers: Sequence[Buffer], *, position: int = 0) -> bool:
        """Hold a block in the first tier that takes it; whether it can be read now. A held block is only touched.

        A block that somebody else is writing is left to them: it gets no second room, in no tier.

        Raises:
            ValueError: when the key or the layers are out of bounds, or media cannot copy such memory.
        """
        sizes = [memoryview(layer).nbytes for layer in layers]  # pyright: ignore[reportArgumentType]  # arrays are
        for index in range(len(self._tiers)):
            with self._lock:
                if self._is_in_other_hands(key, index):
                    return self._first_tier_with(key) is not None
            if self._arrivals.store(index, key, sizes, layers, position):
                return True
        return False

    def open(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> OpenBlock | None:
        """Room for a block whose layers are still to come, in the first tier that has it; `None` where none has.

        A block that is held already, or that somebody else is writing, gets no second room.

        Raises:
            ValueError: when the key or the layers are out of bounds.
        """
        block: OpenBlock | None = None
        try:
            with Uninterrupted():
                block = self._open(key, layer_bytes, position)
            return block  # noqa: TRY300, RET504  # inside, so that an interrupt here is caught too
        except BaseException:  # an interrupt: nobody will get the block
            if block is not None:
                block.abandon()
            raise

    def read_into(self, key: bytes, buffers: Sequence[Buffer], *, first_layer: int = 0) -> str | None:
        """Fill buffers with layers of a block; the tier that had it, or `None` where no tier could deliver it.

        After `None` the buffers hold nothing of use, and the block is to be computed again.

        Raises:
            ValueError: when the buffers do not fit the layers.
        """
        for index, tier in enumerate(self._tiers):
            lent = deliver(self._books, tier, key, buffers, first_layer)
            if lent is None:
                continue
            if index and tier.settings.promotes and len(buffers) == len(lent.layer_bytes):
                rose = self._arrivals.store(0, key, lent.layer_bytes, buffers, lent.position)
                with self._lock:
                    tier.tally.promoted += rose
            return tier.medium.name
        return None

    def promote(self, keys: Iterable[bytes]) -> None:
        """Put blocks that only lower tiers hold into the first one: for those that were read a layer at a time."""
        for key in keys:
            with self._lock:
                index, sizes = self._first_tier_with(key), self.layer_bytes(key)
            if index and sizes is not None and self._tiers[index].settings.promotes:
                self.read_into(key, [np.empty(size, np.uint8) for size in sizes])

    def pin(self, key: bytes) -> None:
        """Keep the block, in the first tier that has it, until it is unpinned as often as it was pinned.

        Raises:
            KeyError: when no tier holds it.
        """
        with Uninterrupted(), self._lock:
            for index, tier in enumerate(self._tiers):
                block = tier.blocks.peek(key)
                if block is not None and block.payload.ready:
                    tier.blocks.pin(key)
                    self._pinned_in.setdefault(key, []).append(index)
                    return
        raise KeyError(f"block {key.hex()} is held in none of {len(self._tiers)} tiers")

    def unpin(self, key: bytes) -> None:
        """Undo one `pin`.

        Raises:
            ValueError: when the key is not pinned.
        """
        with Uninterrupted():
            with self._lock:
                if not self._pinned_in.get(key):
                    raise ValueError(f"block {key.hex()} is not pinned, so it cannot be unpinned")
                tier = self._tiers[self._pinned_in[key].pop()]
                if not self._pinned_in[key]:
                    del self._pinned_in[key]
                unwanted = tier.unpin(key)
            free_quietly(tier, unwanted)

    def sink(self) -> None:
        """Move every block that is not pinned down to the last tier, so that what is durable survives a restart.

        Raises:
            ValueError: when a queue has not the room for its tier's largest block, which would be lost.
            RuntimeError: when a write-back thread died, which is a bug of ours.
        """
        for index, tier in enumerate(self._tiers[:-1]):
            with self._lock:
                blocks = (tier.blocks.peek(key) for key in tier.blocks)
                largest_bytes = max((block.size_bytes for block in blocks if block), default=0)
            room_bytes = tier.settings.queue_bytes - largest_bytes
            if room_bytes < 0:
                raise ValueError(
                    f"{tier.medium.name} cannot sink a block of {largest_bytes} bytes: its queue has"
                    f" {tier.settings.queue_bytes}"
                )
            while self._arrivals.squeeze(index):
                if tier.leaving_bytes > room_bytes:
                    self.flush()
            self.flush()

    def flush(self) -> None:
        """Return when no evicted block waits for the tier below.

        Raises:
            RuntimeError: when a write-back thread died, which is a bug of ours.
        """
        with self._lock:
            self._books.wait_for(lambda: all(write_back.is_idle() for write_back in self._write_backs))
        for write_back in self._write_backs:
            if write_back.crash is not None:
                raise RuntimeError("a write-back thread died") from write_back.crash

    def close(self) -> None:
        """Let evicted blocks sink, free what could not be freed before, and stop; the media stay open.

        Raises:
            RuntimeError: when a write-back thread died, which is a bug of ours.
        """
        for write_back in self._write_backs:
            write_back.stop()
        for tier in self._tiers:
            free_again(tier)
        self.flush()

    def statistics(self) -> list[TierStatistics]:
        """What each tier did so far, the fastest first."""
        with self._lock:
            return [tier.statistics() for tier in self._tiers]

    def check(self) -> None:
        """Verify every tier's invariants; call it while nothing else does.

        Raises:
            AssertionError: naming the invariant that is broken.
        """
        with self._lock:
            for tier in self._tiers:
                tier.check()

    def leaked_bytes(self) -> int:
        """Bytes that local media hold and no tier knows of, and bytes that remote ones would not free.

        0, or there is a bug or a remote medium that does not answer. Call it after `flush`.
        """
        with self._lock:
            return sum(
                sum(tier.medium.footprint_bytes(room.key, room.layer_bytes) for room in tier.going)
                if tier.is_shared  # what others hold there is in its used bytes
                else tier.medium.used_bytes - tier.blocks.used_bytes - tier.leaving_bytes
                for tier in self._tiers
            )

    def _open(self, key: bytes, layer_bytes: Sequence[int], position: int) -> OpenBlock | None:
        for index, tier in enumerate(self._tiers):
            with self._lock:
                if any(other.is_taken(key) for other in self._tiers):
                    return None
            slot = self._arrivals.place(index, key, layer_bytes, position)
            room = self._arrivals.reserve(index, key, slot, layer_bytes, position) if slot else None
            if slot is not None and room is not None:
                return OpenBlock(self._arrivals, tier, slot, room)
        return None

    def _first_tier_with(self, key: bytes) -> int | None:
        return next((index for index, tier in enumerate(self._tiers) if tier.holds(key)), None)

    def _is_in_other_hands(self, key: bytes, index: int) -> bool:
        """Whether a tier above this one has the block by now, or somebody writes it anywhere."""
        return any(
            tier.is_taken(key) and (above < index or not tier.holds(key)) for above, tier in enumerate(self._tiers)
        )
