"""DRAM: one arena of memory that is divided into extents; pinned for CUDA where there is a GPU."""

import mmap
import sys
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mooncake_lab.store.backends.allocation import AllocatedBackend
from mooncake_lab.store.backends.base import (
    Buffer,
    Bytes,
    Reservation,
    StorageError,
    address,
    check_buffers,
    layer_views,
)


@final
class DramBackend(AllocatedBackend):
    """Blocks in one arena of memory, page aligned, with the layers of a block in order.

    All pages are touched at construction, so that no request pays for its first use. Mutable: it holds the bytes.

    Args:
        capacity_bytes: size of the arena, rounded down to whole pages.
        name: its name in statistics and messages.
        pinned: whether to pin the arena for copies to and from CUDA devices; `None` pins it where the program
            already uses torch and there is a GPU.

    Raises:
        ValueError: when the capacity is less than a page.
        StorageError: when memory must be pinned and cannot be.
    """

    def __init__(self, capacity_bytes: int, *, name: str = "dram", pinned: bool | None = None) -> None:
        super().__init__(name, capacity_bytes, mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        self._arena = np.frombuffer(mmap.mmap(-1, self.capacity_bytes, flags=flags), np.uint8)
        self._address = address(self._arena)
        self._cuda = _pin(self._arena, required=pinned)

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes of the layers, rounded up to a page."""
        del key
        return self._extents.aligned(sum(layer_bytes))

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Reserve space for a block; for its errors see `StorageBackend.reserve`."""
        return self._reserve(key, layer_bytes, position, sum(layer_bytes))

    def write_buffers(self, reservation: Reservation, first_layer: int, layers: int) -> list[Bytes]:
        """The memory of layers of an open reservation; `write` only records layers that were filled in place."""
        self._check_open(reservation)
        return self._views(reservation, first_layer, layers)

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Copy layers into the arena; for its errors see `StorageBackend.write`."""
        sources = check_buffers(reservation, layers, first_layer)
        self._check_open(reservation)
        arena, origin = self._arena, self._address
        start = reservation.offset_bytes + sum(reservation.layer_bytes[:first_layer])
        for source in sources:  # no view of each place: it would cost a tenth of a block
            stop = start + source.nbytes
            if source.base is not arena or address(source) != origin + start:  # else it was filled in place
                arena[start:stop] = source
            start = stop
        self._mark_written(reservation, first_layer, len(sources))

    def commit(self, *reservations: Reservation) -> None:
        """Make blocks readable; for its errors see `StorageBackend.commit`."""
        with self._lock:
            self._check_complete(reservations)
            self._hold(reservations)

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Copy layers out of the arena; for its errors see `StorageBackend.read_into`."""
        targets = check_buffers(reservation, buffers, first_layer, writable=True)
        for target, place in zip(targets, self.read(reservation, first_layer, len(targets)), strict=True):
            target[...] = place

    def read(self, reservation: Reservation, first_layer: int, layers: int) -> list[Bytes]:
        """The memory of layers of a committed block, which the caller must not change."""
        self._check_committed(reservation)
        return self._views(reservation, first_layer, layers)

    def free(self, *reservations: Reservation) -> None:
        """Release the space of blocks; for its errors see `StorageBackend.free`."""
        with self._lock:
            for reservation in reservations:
                self._remove(reservation)
                self._extents.give(reservation.offset_bytes, reservation.size_bytes)

    def close(self) -> None:
        """Release the memory; views of it that are still in use keep it allocated."""
        if self._cuda is not None:
            self._cuda.cudaHostUnregister(self._address)
            self._cuda = None
        self._arena = np.empty(0, np.uint8)

    def _views(self, reservation: Reservation, first_layer: int, layers: int) -> list[Bytes]:
        sizes = reservation.layer_bytes
        start = reservation.offset_bytes + sum(sizes[:first_layer])
        return layer_views(self._arena[start:], sizes[first_layer : first_layer + layers])


def _pin(arena: Bytes, *, required: bool | None) -> Any:
    """Register an arena with CUDA; torch's CUDA runtime, or `None` where it is not pinned."""
    if required is False or (required is None and "torch" not in sys.modules):
        return None  # a program that uses the store alone never has to import torch
    import torch

    if not torch.cuda.is_available():
        if required:
            raise StorageError("pinned memory was asked for, and torch finds no CUDA device here")
        return None
    runtime: Any = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(arena.ctypes.data, arena.nbytes, 0))
    if status and required:
        raise StorageError(f"CUDA refused to pin {arena.nbytes} bytes: error {status}")
    return None if status else runtime
