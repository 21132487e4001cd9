"""A slab: one preallocated file, written around the page cache where memory is aligned, read through it."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.medium import DamagedBlockError
from mooncake_lab.store.media.record import ALIGNMENT_BYTES, padded

Operation: TypeAlias = Literal["write", "read", "sync", "index"]
BeforeOperation: TypeAlias = Callable[[Operation], None]
"""Called before each device operation; it may raise `OSError`, which is how faults are injected."""

_MOST_VECTORS = 512  # a call takes at most 1024, and every layer may need its padding

_RUN_BYTES = 512 * 1024
"""Read at once before the checksums of what was read."""


def slab_capacity(path: Path, capacity_bytes: int | None) -> int:
    """The size a slab is to have: what is asked for in whole pages, or what it has.

    Raises:
        ValueError: when it has none and none is asked for.
    """
    if capacity_bytes is not None:
        return capacity_bytes - capacity_bytes % ALIGNMENT_BYTES
    if not path.exists() or path.stat().st_size == 0:
        raise ValueError(f"{path} is not there yet, so a capacity is needed")
    return path.stat().st_size


def no_faults(_operation: Operation) -> None:
    """Let every operation happen."""


@final
class Slab:
    """A file of fixed size with aligned places for layers.

    Aligned layers are written with O_DIRECT: they are seldom read back soon, and the page cache would only copy
    them. Reads go through the page cache, which costs nothing cold and is much faster warm.

    Raises:
        OSError: when the file cannot be made (no room, no permission).
        ValueError: when an existing slab is larger than `capacity_bytes`.
    """

    __slots__ = ("_before", "_direct", "_file", "_padding", "_zeros", "is_new", "path", "size_bytes")

    def __init__(self, path: Path, capacity_bytes: int, before: BeforeOperation = no_faults) -> None:
        self.path = path
        self._before = before
        self._padding = np.empty(ALIGNMENT_BYTES, np.uint8)
        self._zeros = np.zeros(ALIGNMENT_BYTES, np.uint8)
        self._direct: int | None = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self.is_new = os.fstat(self._file).st_size == 0
            self.size_bytes = capacity_bytes
            _allocate(self._file, path, capacity_bytes)
            self._direct = _open_direct(path)
        except BaseException:
            self.close()
            raise

    @property
    def writes_directly(self) -> bool:
        """Whether aligned memory is written around the page cache."""
        return self._direct is not None

    def write(self, offset_bytes: int, layers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Write layers one behind the other, each padded to the alignment.

        Raises:
            OSError: when the device refuses.
        """
        self._before("write")
        if self._direct is not None and all(_is_aligned(layer) for layer in layers):
            _transfer(os.pwritev, self._direct, layers, offset_bytes)
            return
        _transfer(os.pwritev, self._file, self._with_padding(layers, self._zeros), offset_bytes)

    def read(self, offset_bytes: int, layers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Fill layers from where `write` put them.

        Raises:
            OSError: when the device refuses.
            DamagedBlockError: when the file ends too early.
        """
        self._before("read")
        _transfer(os.preadv, self._file, self._with_padding(layers, self._padding), offset_bytes)

    def read_in_runs(
        self, offset_bytes: int, layers: Sequence[npt.NDArray[np.uint8]], first_layer: int
    ) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Each layer and its number soon after it was read, while it is in the processor's cache; see `read`."""
        start = 0
        while start < len(layers):
            stop, size = start + 1, layers[start].nbytes
            while stop < len(layers) and size + layers[stop].nbytes <= _RUN_BYTES:
                size += layers[stop].nbytes
                stop += 1
            self.read(offset_bytes, layers[start:stop])
            offset_bytes += sum(padded(layer.nbytes) for layer in layers[start:stop])
            yield from enumerate(layers[start:stop], first_layer + start)
            start = stop

    def sync(self) -> None:
        """Return when everything written is on the device."""
        self._before("sync")
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file."""
        for descriptor in (self._direct, self._file):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._direct, self._file = None, -1

    def _with_padding(
        self, layers: Sequence[npt.NDArray[np.uint8]], filler: npt.NDArray[np.uint8]
    ) -> list[npt.NDArray[np.uint8]]:
        vectors: list[npt.NDArray[np.uint8]] = []
        for layer in layers:
            vectors.append(layer)
            if layer.nbytes % ALIGNMENT_BYTES:
                vectors.append(filler[: padded(layer.nbytes) - layer.nbytes])
        return vectors


def _transfer(
    call: Callable[[int, Any, int], int], file: int, vectors: Sequence[npt.NDArray[np.uint8]], offset_bytes: int
) -> None:
    """Repeat a vectored call until every byte of every vector was moved."""
    left = [vector for vector in vectors if vector.nbytes]
    while left:
        moved = call(file, left[:_MOST_VECTORS], offset_bytes)
        if moved == 0:
            raise DamagedBlockError(f"the slab ends at byte {offset_bytes}, before the block does")
        offset_bytes += moved
        while left and moved >= left[0].nbytes:
            moved -= left.pop(0).nbytes
        if moved:
            left[0] = left[0][moved:]


def _is_aligned(layer: npt.NDArray[np.uint8]) -> bool:
    return layer.nbytes % ALIGNMENT_BYTES == 0 and layer.ctypes.data % ALIGNMENT_BYTES == 0


def _allocate(file: int, path: Path, size_bytes: int) -> None:
    """Ask for all bytes now, so that a full disk is met here and not in the middle of a write."""
    size = os.fstat(file).st_size
    if size > size_bytes:
        raise ValueError(f"{path} has {size} bytes, more than {size_bytes}; a slab can only grow")
    if size == size_bytes:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size_bytes)
    else:
        os.ftruncate(file, size_bytes)
    os.fsync(file)


def _open_direct(path: Path) -> int | None:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        return os.open(path, os.O_RDWR | flag)
    except OSError:  # a file system without O_DIRECT; everything then goes through the page cache
        return None
