"""SSD: blocks in aligned extents of a preallocated slab, and an LMDB index of those that are committed."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.doubts import Doubts
from mooncake_lab.store.media.extents import ExtentAllocator
from mooncake_lab.store.media.folder import FolderLock, room_of
from mooncake_lab.store.media.index import Index, is_sealed, write_index
from mooncake_lab.store.media.ledger import Ledger
from mooncake_lab.store.media.medium import (
    Bandwidth,
    Buffer,
    MediumError,
    MediumFullError,
    Reservation,
    check_block,
    check_run,
)
from mooncake_lab.store.media.meter import Meter
from mooncake_lab.store.media.record import (
    ALIGNMENT_BYTES,
    Record,
    extent_bytes,
    record_of,
    seed_of,
)
from mooncake_lab.store.media.recovery import find_records
from mooncake_lab.store.media.sealed import SealedBlocks
from mooncake_lab.store.media.slab import BeforeOperation, Slab, no_faults, slab_capacity


@final
class SsdMedium:
    """Durable blocks of one model in a folder (FAST'25 §3: the SSD part of Mooncake Store).

    A block's layers and its sealed header are synced before the index says that it is there, in one transaction
    for all blocks of a `commit`. Freed blocks leave the index with the next commit, and their bytes are not used
    again before. So a process killed at any moment leaves no torn block in the index, and loses no committed one.
    After a sync that failed nobody knows which bytes reached the device, and a later one would not say it again:
    whatever had begun to be written by then has to be freed and written anew.
    Every layer has its checksum, verified on every read. Mutable: it owns a folder.

    Args:
        folder: made where it is missing; one process at a time may have it open.
        capacity_bytes: size of the slab; an existing one may grow, and `None` leaves it as it is.
        fingerprint: names the model (weights, data type, block size, rope); other models' blocks are not seen.
        name: what statistics and messages call it.
        before: called before each device operation; faults are injected there.

    Raises:
        FolderInUseError: when another process has the folder open.
        OSError: when the folder or the slab cannot be made (no room, no permission).
        ValueError: when the slab would shrink, or has no size yet and is given none.
    """

    __slots__ = (
        "_blocks",
        "_checksums",
        "_closing",
        "_committing",
        "_doubts",
        "_folder_lock",
        "_freed",
        "_headed",
        "_index",
        "_ledger",
        "_lock",
        "_meter",
        "_name",
        "_records",
        "_seed",
        "_slab",
        "index_was_whole",
    )

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int | None,
        *,
        fingerprint: bytes,
        name: str = "ssd",
        before: BeforeOperation = no_faults,
    ) -> None:
        room = room_of(folder, fingerprint)
        self._name = name
        self._seed = seed_of(fingerprint)
        self._lock = threading.Lock()  # of the books
        self._closing = threading.Lock()
        self._committing = threading.Lock()  # one commit at a time, while readers go on
        self._meter = Meter()
        self._checksums: dict[Reservation, dict[int, int]] = {}
        self._doubts = Doubts(name)
        self._headed: set[int] = set()  # sequences of open reservations whose header is written
        self._records: dict[bytes, Record] = {}
        self._freed: list[Record] = []
        self._index: Index | None = None
        self._folder_lock = FolderLock(folder)
        try:
            room.mkdir(exist_ok=True)
            capacity = slab_capacity(room / "slab", capacity_bytes)
            self._ledger = Ledger(name, ExtentAllocator(capacity, ALIGNMENT_BYTES))
            self._slab = Slab(room / "slab", capacity, before)
            self._blocks = SealedBlocks(self._slab, self._seed)
            try:
                self._index = self._recover(room, before)
            except BaseException:
                self._slab.close()
                raise
        except BaseException:
            self._folder_lock.release()
            raise

    @property
    def name(self) -> str:
        """What statistics and messages call it."""
        return self._name

    @property
    def capacity_bytes(self) -> int:
        """The bytes it may hold, headers and padding included."""
        return self._ledger.extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes reserved or held now, headers and padding included."""
        with self._lock:
            return self._ledger.extents.used_bytes - sum(_size(record) for record in self._freed)

    @property
    def writes_directly(self) -> bool:
        """Whether aligned memory is written around the page cache."""
        return self._slab.writes_directly

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes such a block takes here: a header, and its layers, each rounded up to 4 KiB."""
        return extent_bytes(key, layer_bytes)

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Set room aside for a block; for its errors see `Medium.reserve`."""
        check_block(key, layer_bytes)
        size = extent_bytes(key, layer_bytes)
        with self._lock:
            try:
                return self._ledger.reserve(key, layer_bytes, position, size)
            except MediumFullError:
                if not self._freed:
                    raise
        self.commit()  # freed blocks leave the index, and their bytes can be used again
        with self._lock:
            return self._ledger.reserve(key, layer_bytes, position, size)

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Write layers into the slab; for its errors see `Medium.write`."""
        arrays = check_run(reservation, layers, first_layer)
        with self._lock:
            self._ledger.writable(reservation)
            self._doubts.begin(reservation)
            self._doubts.refuse(reservation)
        with self._meter.writing(sum([array.nbytes for array in arrays])):
            sums = self._write(reservation, arrays, first_layer)
        with self._lock:
            self._ledger.wrote(reservation, first_layer, len(arrays))
            self._checksums.setdefault(reservation, {}).update(enumerate(sums, first_layer))

    def commit(self, *reservations: Reservation) -> None:
        """Sync payloads, then let the index say so; for its errors see `Medium.commit`."""
        with self._committing:
            with self._lock:
                self._ledger.complete(reservations)
                self._doubts.refuse(*reservations)
                sums = [self._checksums[r] for r in reservations]
                records = [
                    record_of(r, [found[layer] for layer in range(len(found))])
                    for r, found in zip(reservations, sums, strict=True)
                ]
                freed, self._freed = self._freed, []
            try:
                for record in records:
                    if record.sequence not in self._headed:
                        self._blocks.write_header(record)
                if records:
                    self._sync()
                if records or freed:
                    self._opened().change(records, [record.key for record in freed])
            except BaseException:
                with self._lock:
                    self._freed += freed
                raise
            with self._lock:
                self._ledger.commit(reservations)
                self._records.update((record.key, record) for record in records)
                for reservation in reservations:
                    del self._checksums[reservation]
                    self._doubts.forget(reservation)
                    self._headed.discard(reservation.sequence)
                for record in freed:
                    self._ledger.extents.give(record.offset_bytes, _size(record))

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Read layers and verify their checksums; for its errors see `Medium.read_into`."""
        arrays = check_run(reservation, buffers, first_layer, writable=True)
        with self._lock:
            self._ledger.readable(reservation)
            sums = self._records[reservation.key].checksums
        with self._meter.reading(sum([array.nbytes for array in arrays])):
            self._blocks.read(reservation, arrays, first_layer, sums)

    def free(self, *reservations: Reservation) -> None:
        """Give room back; for its errors see `Medium.free`."""
        with self._lock:
            for reservation in reservations:
                was_committed = self._ledger.is_committed(reservation)
                self._ledger.forget(reservation)
                if was_committed:
                    self._freed.append(self._records.pop(reservation.key))
                else:
                    self._checksums.pop(reservation, None)
                    self._doubts.forget(reservation)
                    self._headed.discard(reservation.sequence)
                    size = extent_bytes(reservation.key, reservation.layer_bytes)
                    self._ledger.extents.give(reservation.offset_bytes, size)

    def blocks(self) -> Iterator[Reservation]:
        """The committed blocks, oldest first."""
        with self._lock:
            return self._ledger.committed()

    def bandwidth(self) -> Bandwidth:
        """Its own estimate of how fast it is."""
        return self._meter.bandwidth()

    def close(self) -> None:
        """Write down what was freed, and let others have the folder, once nobody commits, reads or writes."""
        with self._closing, contextlib.ExitStack() as last:  # an interrupt ends one step, and leaves none out
            if self._index is None:
                return
            last.callback(self._folder_lock.release)
            last.callback(self._slab.close)
            last.callback(self._blocks.close)
            last.callback(self._let_go_of_index)
            with contextlib.suppress(
                OSError, MediumError
            ):  # freed blocks stay in the index: they are found again, and right
                self.commit()

    def _recover(self, room: Path, before: BeforeOperation) -> Index:
        path = room / "index.mdb"
        was_sealed = is_sealed(path)
        found = find_records(path, self._seed, self._slab)
        adopted = [r for r in found.records if self._ledger.adopt(r.reservation(), _size(r))]
        self._records = {record.key: record for record in adopted}
        self.index_was_whole = found.index_was_whole
        if was_sealed and found.index_was_whole and len(adopted) == len(found.records):
            return Index(path, self._seed, len(adopted), before)
        return write_index(path, self._seed, adopted, before)

    def _write(
        self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]], first_layer: int
    ) -> list[int]:
        with self._lock:
            self._headed.discard(reservation.sequence)  # a header that is there already has other checksums
        if len(arrays) < len(reservation.layer_bytes):
            return self._blocks.write_layers(reservation, arrays, first_layer)
        sums = self._blocks.write_whole(reservation, arrays)
        with self._lock:
            self._headed.add(reservation.sequence)
        return sums

    def _sync(self) -> None:
        try:
            self._slab.sync()
        except BaseException:
            with self._lock:
                self._doubts.lost()
            raise

    def _let_go_of_index(self) -> None:
        with self._committing:
            index, self._index = self._index, None
        if index is not None:
            index.close()

    def _opened(self) -> Index:
        if self._index is None:
            raise MediumError(f"{self._name} is closed")
        return self._index


def _size(record: Record) -> int:
    return extent_bytes(record.key, record.layer_bytes)
