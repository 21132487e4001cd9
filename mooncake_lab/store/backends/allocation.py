"""Which bytes of a backend are free, and which blocks are reserved or committed."""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import final

from mooncake_lab.store.backends.base import (
    BlockExistsError,
    BlockNotFoundError,
    Reservation,
    StorageFullError,
    check_block,
    check_commit,
)


@final
class ExtentAllocator:
    """The free runs of `capacity_bytes`, in multiples of `alignment_bytes`; first fit, neighbours are merged.

    First fit wastes nothing on blocks of one size, the usual case. Mutable, and not locked.
    """

    def __init__(self, capacity_bytes: int, alignment_bytes: int = 4096) -> None:
        if alignment_bytes < 1 or capacity_bytes < alignment_bytes:
            raise ValueError(
                f"{capacity_bytes} bytes aligned to {alignment_bytes}; at least one aligned run must fit"
            )
        self._alignment_bytes = alignment_bytes
        self.capacity_bytes: int = capacity_bytes - capacity_bytes % alignment_bytes
        """Bytes that can be allocated."""
        self._starts = [0]
        self._sizes = {0: self.capacity_bytes}
        self._free_bytes = self.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Allocated bytes."""
        return self.capacity_bytes - self._free_bytes

    def aligned(self, size_bytes: int) -> int:
        """The size rounded up to the alignment."""
        return -(-size_bytes // self._alignment_bytes) * self._alignment_bytes

    def take(self, size_bytes: int) -> int | None:
        """Allocate a run of at least that size; its start, or `None` when no free run is long enough."""
        size = self.aligned(size_bytes)
        for start in self._starts:
            if self._sizes[start] >= size:
                self.take_at(start, size)
                return start
        return None

    def take_at(self, start: int, size_bytes: int) -> bool:
        """Allocate this run; false, and nothing changes, where part of it is not free."""
        size = self.aligned(size_bytes)
        index = bisect_left(self._starts, start + 1) - 1
        if index < 0 or size < 1 or start % self._alignment_bytes:
            return False
        run = self._starts[index]
        run_end = run + self._sizes[run]
        if start + size > run_end:
            return False
        del self._sizes[run]
        pieces = [(run, start - run), (start + size, run_end - start - size)]
        kept = [(begin, length) for begin, length in pieces if length]
        self._starts[index : index + 1] = [begin for begin, _ in kept]
        self._sizes.update(kept)
        self._free_bytes -= size
        return True

    def give(self, start: int, size_bytes: int) -> None:
        """Free an allocated run and merge it with its free neighbours."""
        size = self.aligned(size_bytes)
        index = bisect_left(self._starts, start)
        before = self._starts[index - 1] if index else None
        after = self._starts[index] if index < len(self._starts) else None
        ends = start + size
        overlaps = before is not None and before + self._sizes[before] > start
        if overlaps or (after is not None and ends > after) or start < 0 or ends > self.capacity_bytes:
            raise ValueError(f"{size} bytes from {start} are not in use; only used runs can be freed")
        self._free_bytes += size
        if after is not None and after == ends:
            size += self._sizes.pop(after)
            del self._starts[index]
        if before is not None and before + self._sizes[before] == start:
            self._sizes[before] += size
            return
        self._starts.insert(index, start)
        self._sizes[start] = size


class AllocatedBackend:
    """What the backends of this process share: which blocks are reserved, which are committed, and where they lie.

    Mutable; each method holds the lock.
    """

    is_shared: bool = False

    def __init__(self, name: str, capacity_bytes: int, alignment_bytes: int) -> None:
        self.name: str = name
        self._extents = ExtentAllocator(capacity_bytes, alignment_bytes)
        self._lock = threading.RLock()  # reentrant: backends hold it to change this and their own state together
        self._committed: dict[bytes, Reservation] = {}
        self._missing: dict[bytes, tuple[Reservation, set[int]]] = {}  # and the layers not yet written
        self._sequence = 0

    @property
    def capacity_bytes(self) -> int:
        """The bytes it may hold, padding included."""
        return self._extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes that are reserved or held, padding included."""
        return self._extents.used_bytes

    def blocks(self) -> Iterator[Reservation]:
        """The committed blocks, oldest first."""
        with self._lock:
            return iter(sorted(self._committed.values(), key=lambda block: block.sequence))

    def find(self, keys: Iterable[bytes]) -> list[Reservation]:
        """The committed blocks that have one of these keys."""
        with self._lock:
            return [self._committed[key] for key in keys if key in self._committed]

    def _reserve(self, key: bytes, layer_bytes: Sequence[int], position: int, footprint_bytes: int) -> Reservation:
        """Allocate `footprint_bytes` for the block; for its errors see `StorageBackend.reserve`."""
        check_block(key, layer_bytes)
        with self._lock:
            if key in self._committed or key in self._missing:
                raise BlockExistsError(f"{self.name} has block {key.hex()} already; one key names one content")
            offset = self._extents.take(footprint_bytes)
            if offset is None:
                free = self._extents.capacity_bytes - self._extents.used_bytes
                raise StorageFullError(
                    f"{self.name} has no run of {footprint_bytes} bytes for block {key.hex()}; {free} are free"
                )
            self._sequence += 1
            reservation = Reservation(key, tuple(layer_bytes), position, offset, self._sequence)
            self._missing[key] = (reservation, set(range(len(layer_bytes))))
            return reservation

    def _recover(self, reservation: Reservation, footprint_bytes: int) -> bool:
        """Hold a block that was found on the device; false where another block has its key or its bytes."""
        known = reservation.key in self._committed
        if known or not self._extents.take_at(reservation.offset_bytes, footprint_bytes):
            return False
        self._committed[reservation.key] = reservation
        self._sequence = max(self._sequence, reservation.sequence)
        return True

    def _check_open(self, reservation: Reservation) -> None:
        """Refuse what is not reserved, or is committed."""
        if self._missing.get(reservation.key, (None,))[0] != reservation:
            raise BlockNotFoundError(f"{self.name} has no open reservation for block {reservation.key.hex()}")

    def _mark_written(self, reservation: Reservation, first_layer: int, layers: int) -> None:
        """Record layers that were written; nothing changes if the reservation was freed meanwhile."""
        with self._lock:
            held = self._missing.get(reservation.key)
            if held and held[0] == reservation:
                held[1].difference_update(range(first_layer, first_layer + layers))

    def _check_complete(self, reservations: Sequence[Reservation]) -> None:
        """Refuse reservations with unwritten layers."""
        with self._lock:
            for reservation in reservations:
                self._check_open(reservation)
            check_commit((block, self._missing[block.key][1]) for block in reservations)

    def _hold(self, reservations: Sequence[Reservation]) -> None:
        """Commit reservations that `_check_complete` accepted."""
        with self._lock:
            for reservation in reservations:
                self._committed[reservation.key] = self._missing.pop(reservation.key)[0]

    def _is_committed(self, reservation: Reservation) -> bool:
        return self._committed.get(reservation.key) == reservation

    def _check_committed(self, reservation: Reservation) -> None:
        """Refuse what is not committed."""
        if not self._is_committed(reservation):
            raise BlockNotFoundError(f"{self.name} does not hold block {reservation.key.hex()}")

    def _remove(self, reservation: Reservation) -> bool:
        """Stop holding a block; whether it was committed. Its bytes stay allocated until `_extents.give`."""
        with self._lock:
            if self._is_committed(reservation):
                del self._committed[reservation.key]
                return True
            self._check_open(reservation)
            del self._missing[reservation.key]
            return False
