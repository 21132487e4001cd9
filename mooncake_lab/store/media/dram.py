"""DRAM: one arena of memory, cut into extents; pinned where CUDA is, shared between processes where asked."""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Self, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.extents import ExtentAllocator
from mooncake_lab.store.media.ledger import Ledger
from mooncake_lab.store.media.medium import Bandwidth, Buffer, MediumError, Reservation, check_run
from mooncake_lab.store.media.meter import Meter
from mooncake_lab.store.media.pinned import Pinned, pin

_PAGE_BYTES = mmap.PAGESIZE


@final
class DramMedium:
    """Blocks in one arena of memory, each layer behind the other, page aligned.

    The arena is touched at once, so that no request pays for its first use. Mutable: it holds the bytes.

    Args:
        capacity_bytes: size of the arena, rounded down to whole pages.
        name: what statistics and messages call it.
        shared: whether other processes of this machine and user may attach (Linux), see `SharedArena`.
        pinned: whether to pin the arena for copies to and from CUDA devices; `None` pins it where CUDA is.

    Raises:
        ValueError: when the capacity is less than a page.
        MediumError: when memory should be pinned or shared and this machine cannot.
    """

    __slots__ = ("_arena", "_descriptor", "_ledger", "_lock", "_meter", "_name", "_pinned")

    def __init__(
        self, capacity_bytes: int, *, name: str = "dram", shared: bool = False, pinned: bool | None = None
    ) -> None:
        self._name = name
        self._ledger = Ledger(name, ExtentAllocator(capacity_bytes, _PAGE_BYTES))
        size = self._ledger.extents.capacity_bytes
        self._descriptor = _memory_file(name, size) if shared else None
        self._arena = np.frombuffer(_map(size, self._descriptor), np.uint8)
        self._pinned: Pinned | None = None
        try:
            self._pinned = pin(self._arena, required=pinned)
        except BaseException:
            self.close()
            raise
        self._lock = threading.Lock()
        self._meter = Meter()

    @property
    def name(self) -> str:
        """What statistics and messages call it."""
        return self._name

    @property
    def capacity_bytes(self) -> int:
        """The bytes it may hold, padding included."""
        return self._ledger.extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes reserved or held now, padding included."""
        return self._ledger.extents.used_bytes

    @property
    def is_pinned(self) -> bool:
        """Whether CUDA copies to and from it without a detour."""
        return self._pinned is not None

    @property
    def shared_path(self) -> str:
        """Where another process attaches, see `SharedArena`.

        Raises:
            MediumError: when the arena is private.
        """
        if self._descriptor is None:
            raise MediumError(f"{self._name} is private; only an arena made with shared=True can be attached")
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes such a block takes here: its layers, rounded up to a page."""
        del key
        return self._ledger.extents.aligned(sum(layer_bytes))

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Set room aside for a block; for its errors see `Medium.reserve`."""
        with self._lock:
            return self._ledger.reserve(key, layer_bytes, position, sum(layer_bytes))

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Copy layers into the arena; for its errors see `Medium.write`."""
        sources = check_run(reservation, layers, first_layer)
        with self._lock:
            self._ledger.writable(reservation)
        start = reservation.offset_bytes + sum(reservation.layer_bytes[:first_layer])
        with self._meter.writing(sum(reservation.layer_bytes[first_layer : first_layer + len(sources)])):
            arena = self._arena
            for source in sources:  # straight into the arena: a view of each place would cost a tenth of a block
                stop = start + source.nbytes
                arena[start:stop] = source
                start = stop
        with self._lock:
            self._ledger.wrote(reservation, first_layer, len(sources))

    def open_layers(
        self, reservation: Reservation, first_layer: int = 0, layers: int | None = None
    ) -> list[npt.NDArray[np.uint8]]:
        """The memory of layers of an open reservation, all unless told: to be filled in place, then `filled`."""
        with self._lock:
            self._ledger.writable(reservation)
        return layer_places(self._arena, reservation, first_layer, layers)

    def filled(self, reservation: Reservation, *, first_layer: int, layers: int) -> None:
        """Note that layers got from `open_layers` hold their bytes now."""
        with self._lock:
            self._ledger.wrote(reservation, first_layer, layers)

    def commit(self, *reservations: Reservation) -> None:
        """Make blocks readable; for its errors see `Medium.commit`."""
        with self._lock:
            self._ledger.complete(reservations)
            self._ledger.commit(reservations)

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Copy layers out of the arena; for its errors see `Medium.read_into`."""
        targets = check_run(reservation, buffers, first_layer, writable=True)
        places = self.layers(reservation, first_layer, len(targets))
        with self._meter.reading(sum(reservation.layer_bytes[first_layer : first_layer + len(targets)])):
            for target, place in zip(targets, places, strict=True):
                target[...] = place

    def layers(
        self, reservation: Reservation, first_layer: int = 0, layers: int | None = None
    ) -> list[npt.NDArray[np.uint8]]:
        """The memory of layers of a committed block, all unless told; read-only by agreement, until it is freed.

        Raises:
            NotHeldError: when the block is not committed.
        """
        with self._lock:
            self._ledger.readable(reservation)
        return layer_places(self._arena, reservation, first_layer, layers)

    def free(self, *reservations: Reservation) -> None:
        """Give room back; for its errors see `Medium.free`."""
        with self._lock:
            for reservation in reservations:
                self._ledger.forget(reservation)
                self._ledger.extents.give(reservation.offset_bytes, reservation.size_bytes)

    def blocks(self) -> Iterator[Reservation]:
        """The committed blocks, oldest first."""
        with self._lock:
            return self._ledger.committed()

    def bandwidth(self) -> Bandwidth:
        """Its own estimate of how fast it is."""
        return self._meter.bandwidth()

    def close(self) -> None:
        """Give the memory back; views of it that are still in use keep it alive."""
        if self._pinned:
            self._pinned.release()
            self._pinned = None
        self._arena = np.empty(0, np.uint8)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@final
class SharedArena:
    """Another process's arena, for reading blocks whose reservation that process sent.

    The owner keeps a block (pins it in its store) while others read; nothing here protects against its leaving.

    Args:
        path: the owner's `DramMedium.shared_path`.
    """

    __slots__ = ("_arena",)

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:  # noqa: PTH123  # a descriptor under /proc, not a path to work with
            self._arena = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)

    def layers(self, reservation: Reservation) -> list[npt.NDArray[np.uint8]]:
        """The memory of each layer, read-only."""
        return layer_places(self._arena, reservation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._arena = np.empty(0, np.uint8)


def layer_places(
    arena: npt.NDArray[np.uint8], reservation: Reservation, first_layer: int = 0, layers: int | None = None
) -> list[npt.NDArray[np.uint8]]:
    """Where layers of a block lie in an arena, from the first one on; all that follow unless told how many."""
    sizes = reservation.layer_bytes
    start = reservation.offset_bytes + sum(sizes[:first_layer])
    places: list[npt.NDArray[np.uint8]] = []
    for size in sizes[first_layer : None if layers is None else first_layer + layers]:
        places.append(arena[start : start + size])
        start += size
    return places


def _memory_file(name: str, size_bytes: int) -> int:
    """A file that lives in memory and dies with its last user, even after a kill."""
    if not hasattr(os, "memfd_create"):
        raise MediumError(f"{name} cannot be shared: this system has no memfd_create (Linux has)")
    descriptor = os.memfd_create(f"mooncake-lab-{name}")
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _map(size_bytes: int, descriptor: int | None) -> mmap.mmap:
    populate = getattr(mmap, "MAP_POPULATE", 0)
    if descriptor is None:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate)
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | populate)
