"""A slab: one preallocated file, written around the page cache where memory is aligned, read through it."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.medium import DamagedBlockError, address
from mooncake_lab.store.media.record import ALIGNMENT_BYTES, padded

_LOG: Final = logging.getLogger(__name__)

Operation: TypeAlias = Literal["write", "read", "sync", "index"]
BeforeOperation: TypeAlias = Callable[[Operation], None]
"""Called before each device operation; it may raise `OSError`, which is how faults are injected."""

_MOST_VECTORS = 512  # a call takes at most 1024, and every layer may need its padding


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
    them. Reads go through the page cache, which costs nothing cold and is much faster warm. Mutable: files that it
    owns.

    Raises:
        OSError: when the file cannot be made (no room, no permission).
        ValueError: when an existing slab is larger than `capacity_bytes`.
    """

    __slots__ = (
        "_before",
        "_direct",
        "_file",
        "_padding",
        "_users",
        "_using",
        "_zeros",
        "is_new",
        "path",
        "size_bytes",
        "writes_directly",
    )

    def __init__(self, path: Path, capacity_bytes: int, before: BeforeOperation = no_faults) -> None:
        self.path = path
        self._before = before
        self._padding = np.empty(ALIGNMENT_BYTES, np.uint8)
        self._zeros = np.zeros(ALIGNMENT_BYTES, np.uint8)
        self._using = threading.Condition()
        self._users: set[object] = set()
        self._direct: int | None = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self.is_new = os.fstat(self._file).st_size == 0
            self.size_bytes = capacity_bytes
            _allocate(self._file, path, capacity_bytes)
            self._direct = _open_direct(path)
            self.writes_directly = self._direct is not None
            """Whether aligned memory is written around the page cache."""
        except BaseException:
            self.close()
            raise

    def write(self, offset_bytes: int, layers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Write layers one behind the other, each padded to the alignment.

        Raises:
            OSError: when the device refuses, or the slab is closed.
        """
        with self._in_use("write") as file:
            if not self._wrote_directly(offset_bytes, layers):
                _transfer(os.pwritev, file, self._with_padding(layers, self._zeros), offset_bytes)

    def read(self, offset_bytes: int, layers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Fill layers from where `write` put them.

        Raises:
            OSError: when the device refuses, or the slab is closed.
            DamagedBlockError: when the file ends too early.
        """
        with self.reading() as fill:
            fill(offset_bytes, layers)

    @contextmanager
    def reading(self) -> Generator[Callable[[int, Sequence[npt.NDArray[np.uint8]]], None]]:
        """What fills layers as `read` does, for several reads of one block; for its errors see `read`."""
        with self._in_use("read") as file:
            yield lambda offset_bytes, layers: _transfer(
                os.preadv, file, self._with_padding(layers, self._padding), offset_bytes
            )

    def sync(self) -> None:
        """Return when everything written is on the device; for its errors see `write`."""
        with self._in_use("sync") as file:
            os.fdatasync(file)

    def close(self) -> None:
        """Close the file, once nobody reads or writes it: its number may soon be another file's."""
        with self._using:
            descriptors = self._direct, self._file
            self._direct, self._file = None, -1
            self._using.wait_for(lambda: not self._users)
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)

    @contextmanager
    def _in_use(self, operation: Operation) -> Generator[int]:
        """The file, which stays open meanwhile."""
        user = object()
        try:
            with self._using:
                if self._file < 0:
                    raise OSError(errno.EBADF, f"{self.path} is closed")
                self._users.add(user)
                file = self._file
            self._before(operation)
            yield file
        finally:
            with self._using:
                self._users.discard(user)
                self._using.notify_all()

    def _wrote_directly(self, offset_bytes: int, layers: Sequence[npt.NDArray[np.uint8]]) -> bool:
        """Write around the page cache; false where memory or file system forbid it."""
        direct = self._direct
        if direct is None or not self.writes_directly or not all(map(_is_aligned, layers)):
            return False
        try:
            _transfer(os.pwritev, direct, layers, offset_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.writes_directly = False
            _LOG.warning("%s opens with O_DIRECT but cannot be written so; the page cache is used", self.path)
            return False
        return True

    def _with_padding(
        self, layers: Sequence[npt.NDArray[np.uint8]], filler: npt.NDArray[np.uint8]
    ) -> list[npt.NDArray[np.uint8]]:
        unaligned = [layer.nbytes % ALIGNMENT_BYTES for layer in layers]
        if not any(unaligned):
            return list(layers)
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
    left = list(vectors)
    missing = sum([vector.nbytes for vector in vectors])
    while missing:
        moved = call(file, left[:_MOST_VECTORS], offset_bytes)
        missing -= moved
        if moved == 0:
            raise DamagedBlockError(f"the slab ends at byte {offset_bytes}, before the block does")
        if not missing:
            return
        offset_bytes += moved
        while left and moved >= left[0].nbytes:
            moved -= left.pop(0).nbytes
        if moved:
            left[0] = left[0][moved:]


def _is_aligned(layer: npt.NDArray[np.uint8]) -> bool:
    return layer.nbytes % ALIGNMENT_BYTES == 0 and address(layer) % ALIGNMENT_BYTES == 0


def _allocate(file: int, path: Path, size_bytes: int) -> None:
    """Ask for all bytes now, so that a full disk is met here and not in the middle of a write."""
    size = os.fstat(file).st_size
    if size > size_bytes:
        raise ValueError(f"{path} has {size} bytes, more than {size_bytes}; a slab can only grow")
    if size == size_bytes:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size_bytes)
        except OSError:  # some file systems have grown it halfway by then
            os.ftruncate(file, size)
            raise
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
