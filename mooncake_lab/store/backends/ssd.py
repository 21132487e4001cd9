"""SSD: durable blocks in a preallocated slab, and a log of those that are committed."""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from mooncake_lab.store.backends.allocation import AllocatedBackend
from mooncake_lab.store.backends.base import (
    Buffer,
    CopyingBackend,
    Reservation,
    StorageFullError,
    SuspectBlockError,
    check_block,
    check_buffers,
)
from mooncake_lab.store.backends.ssd_folder import FolderLock, find_records, index_path, model_folder
from mooncake_lab.store.backends.ssd_index import BeforeOperation, Index, Record, no_faults, seed_of
from mooncake_lab.store.backends.ssd_slab import ALIGNMENT_BYTES, BlockFile, Slab, extent_bytes


@dataclass(slots=True)
class _Written:
    """What was written of an open reservation. Mutable."""

    failed_syncs: int
    """Failed syncs of the device before the first write."""
    checksums: dict[int, int] = field(default_factory=dict[int, int])
    """By layer."""
    has_header: bool = False


@final
class SsdBackend(CopyingBackend, AllocatedBackend):
    """Durable blocks of one model in a folder (FAST'25 §3: the SSD part of Mooncake Store).

    A commit syncs the layers and sealed headers of its blocks before the index records them in one entry. Freed
    blocks leave the index with the next commit, and their bytes are not reused before. So a process killed at any
    moment leaves no torn block in the index and loses no committed one. After a failed sync it is unknown which
    bytes reached the device, and a later sync would not report it: blocks that were being written have to be freed
    and written again. Every read verifies the checksum of every layer. Mutable: it owns a folder.

    Args:
        folder: created where it is missing; one process at a time may have it open.
        capacity_bytes: size of the slab; an existing slab may grow, and `None` leaves it as it is.
        fingerprint: names the model (weights, data type, block size, rope); other models' blocks are not seen.
        name: its name in statistics and messages.
        before: called before each device operation, to inject faults.

    Raises:
        FolderInUseError: when another process has the folder open.
        OSError: when the folder or the slab cannot be made (no space, no permission).
        ValueError: when the slab would shrink, or has no size yet and is given none.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int | None,
        *,
        fingerprint: bytes,
        name: str = "ssd",
        before: BeforeOperation = no_faults,
    ) -> None:
        model = model_folder(folder, fingerprint)
        self._closing = threading.Lock()
        self._committing = threading.Lock()  # one commit at a time, while readers go on
        self._failed_syncs = 0
        self._written: dict[Reservation, _Written] = {}
        self._freed: list[Record] = []
        self._is_open = True
        with contextlib.ExitStack() as undo:
            self._folder_lock = FolderLock(folder)
            undo.callback(self._folder_lock.release)
            model.mkdir(exist_ok=True)
            capacity = _slab_capacity(model / "slab", capacity_bytes)
            super().__init__(name, capacity, ALIGNMENT_BYTES)
            self._slab = Slab(model / "slab", capacity, before)
            undo.callback(self._slab.close)
            seed = seed_of(fingerprint)
            self._file = BlockFile(self._slab, seed)
            records, self.index_was_whole = find_records(model, seed, self._slab)
            kept = [record for record in records if self._table.recover(record.block, _footprint(record.block))]
            self._index = Index(index_path(model), seed, kept, before)
            undo.pop_all()

    @property
    def used_bytes(self) -> int:
        """The bytes that are reserved or held, headers and padding included."""
        with self._table.lock:
            return self._table.extents.used_bytes - sum(_footprint(record.block) for record in self._freed)

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes of a header and of the layers, each rounded up to 4 KiB."""
        return extent_bytes(key, layer_bytes)

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Reserve space for a block; for its errors see `StorageBackend.reserve`."""
        check_block(key, layer_bytes)
        size = extent_bytes(key, layer_bytes)
        try:
            return self._table.reserve(key, layer_bytes, position, size)
        except StorageFullError:
            if not self._freed:
                raise
        self.commit()  # freed blocks leave the index, and their bytes can be reused
        return self._table.reserve(key, layer_bytes, position, size)

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Write layers into the slab; for its errors see `StorageBackend.write`."""
        arrays = check_buffers(reservation, layers, first_layer)
        is_whole = len(arrays) == len(reservation.layer_bytes)
        with self._table.lock:
            self._table.check_open(reservation)
            written = self._written.setdefault(reservation, _Written(self._failed_syncs))
            self._check_synced(reservation)
            written.has_header = False  # a header that is there already has other checksums
        if is_whole:
            sums = self._file.write_block(reservation, arrays)
        else:
            sums = self._file.write_layers(reservation, arrays, first_layer)
        with self._table.lock:
            self._table.written(reservation, first_layer, len(arrays))
            written.checksums.update(enumerate(sums, first_layer))
            written.has_header = is_whole

    def commit(self, *reservations: Reservation) -> None:
        """Sync the blocks, then record them in the index; for its errors see `StorageBackend.commit`."""
        with self._committing:
            with self._table.lock:
                self._table.check_complete(reservations)
                self._check_synced(*reservations)
                written = [self._written[reservation] for reservation in reservations]
                records = [
                    Record(block, tuple(found.checksums[layer] for layer in range(len(block.layer_bytes))))
                    for block, found in zip(reservations, written, strict=True)
                ]
                freed, self._freed = self._freed, []
            try:
                for record, found in zip(records, written, strict=True):
                    if not found.has_header:
                        self._file.write_header(record)
                if records:
                    self._sync()
                if records or freed:
                    self._index.change([record.block.key for record in freed], records)
            except BaseException:
                with self._table.lock:
                    self._freed += freed
                raise
            with self._table.lock:
                self._table.commit(reservations)
                for reservation in reservations:
                    del self._written[reservation]
                for record in freed:
                    self._table.extents.give(record.block.offset_bytes, _footprint(record.block))

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Read layers and verify their checksums; for its errors see `StorageBackend.read_into`."""
        arrays = check_buffers(reservation, buffers, first_layer, writable=True)
        with self._table.lock:
            self._table.check_committed(reservation)
            record = self._index.records[reservation.key]
        self._file.read(record, arrays, first_layer)

    def free(self, *reservations: Reservation) -> None:
        """Release the space of blocks; for its errors see `StorageBackend.free`."""
        with self._table.lock:
            for reservation in reservations:
                if self._table.remove(reservation):
                    self._freed.append(self._index.records[reservation.key])
                else:
                    self._written.pop(reservation, None)
                    self._table.extents.give(reservation.offset_bytes, _footprint(reservation))

    def close(self) -> None:
        """Record what was freed and let other processes have the folder, when no thread uses it any more."""
        with self._closing, contextlib.ExitStack() as last:  # an interrupt ends one step, and skips no other
            if not self._is_open:
                return
            last.callback(self._folder_lock.release)
            last.callback(self._slab.close)
            last.callback(self._file.close)
            last.callback(self._close_index)
            with contextlib.suppress(OSError):  # freed blocks that stay in the index are still right
                self.commit()

    def _close_index(self) -> None:
        with self._committing:
            self._is_open = False
            self._index.close()

    def _check_synced(self, *reservations: Reservation) -> None:
        """Refuse blocks whose first write came before a failed sync.

        Raises:
            SuspectBlockError: naming the first of them.
        """
        for reservation in reservations:
            if self._written[reservation].failed_syncs < self._failed_syncs:
                raise SuspectBlockError(
                    f"{self.name} could not sync after block {reservation.key.hex()} had begun to be written;"
                    " free it and write it anew"
                )

    def _sync(self) -> None:
        try:
            self._slab.sync()
        except BaseException:
            self._failed_syncs += 1
            raise


def _footprint(block: Reservation) -> int:
    return extent_bytes(block.key, block.layer_bytes)


def _slab_capacity(path: Path, capacity_bytes: int | None) -> int:
    """The size a slab is to have: what is asked for, in whole pages, or what it has."""
    if capacity_bytes is not None:
        return capacity_bytes - capacity_bytes % ALIGNMENT_BYTES
    if not path.exists() or path.stat().st_size == 0:
        raise ValueError(f"{path} is not there yet, so a capacity is needed")
    return path.stat().st_size
