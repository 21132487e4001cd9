"""The slab of an SSD folder: one preallocated file, in which each block is a sealed header and aligned layers.

The header is the only record of a block. It is written when the block is committed and overwritten when it is
freed, so what a process finds when it opens the slab is what the last one held, however that ended. A seal is a
checksum whose seed is the model's fingerprint: no block of another model ever has a valid one.
"""

import errno
import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

import msgspec
import numpy as np
import xxhash

from mooncake_lab.store.backends.base import (
    MAX_KEY_BYTES,
    MAX_LAYERS,
    Bytes,
    DamagedBlockError,
    Reservation,
    address,
)

Operation: TypeAlias = Literal["write", "read", "sync"]
BeforeOperation: TypeAlias = Callable[[Operation], None]
"""Called before each device operation; it injects a fault by raising `OSError`."""

ALIGNMENT_BYTES: Final = 4096
"""Alignment of blocks and of every layer in them: what O_DIRECT requires, and a page."""
_LOG: Final = logging.getLogger(__name__)
_HEAD: Final = struct.Struct("<8sIQ")  # magic, bytes of the body, checksum of the body
_MAGIC: Final = b"MCLABKV3"
_HEADER_FIXED_BYTES: Final = 96
_HEADER_LAYER_BYTES: Final = 24
_MAX_VECTORS: Final = 512  # a call takes at most 1024, and every layer may need its padding
_MOST_BODY_BYTES: Final = _HEADER_FIXED_BYTES + MAX_KEY_BYTES + _HEADER_LAYER_BYTES * MAX_LAYERS
_TRIES: Final = 3
"""A sector that cannot be read so often is bad."""
_CHUNK_BYTES: Final = 8 * 1024**2
"""Bytes of a slab that are searched for headers at once."""


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A committed block and the checksum of each of its layers."""

    block: Reservation
    checksums: tuple[int, ...]


_RECORDS: Final = msgspec.msgpack.Decoder(Record)


def no_faults(_operation: Operation) -> None:
    """Let every operation happen."""


def padded(size_bytes: int) -> int:
    """The size rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def header_bytes(key: bytes, layers: int) -> int:
    """Bytes before the first layer of a block."""
    return padded(_HEADER_FIXED_BYTES + len(key) + _HEADER_LAYER_BYTES * layers)


def extent_bytes(key: bytes, layer_bytes: Sequence[int]) -> int:
    """Bytes of a block in the slab: its header and its padded layers."""
    return header_bytes(key, len(layer_bytes)) + sum(padded(size) for size in layer_bytes)


def layer_offset(block: Reservation, layer: int) -> int:
    """Where a layer of a block begins in the slab."""
    before = sum(padded(size) for size in block.layer_bytes[:layer])
    return block.offset_bytes + header_bytes(block.key, len(block.layer_bytes)) + before


@final
class Slab:
    """A file of fixed size that holds aligned layers.

    Aligned memory is written with O_DIRECT: layers are seldom read back soon, and the page cache would only copy
    them. Reads go through the page cache, which costs nothing cold and is much faster warm. Mutable.
    """

    def __init__(self, path: Path, capacity_bytes: int, before: BeforeOperation = no_faults) -> None:
        self._path = path
        self._before = before
        self._padding = np.empty(ALIGNMENT_BYTES, np.uint8)
        self._zeros = np.zeros(ALIGNMENT_BYTES, np.uint8)
        self._using = threading.Condition()
        self._users: set[object] = set()
        self._direct: int | None = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self.size_bytes: int = capacity_bytes
            _allocate(self._file, path, capacity_bytes)
            self._direct = _open_direct(path)
        except BaseException:
            self.close()
            raise
        self.writes_directly: bool = self._direct is not None
        """Whether aligned memory is written around the page cache."""

    def write(self, offset_bytes: int, layers: Sequence[Bytes]) -> None:
        """Write consecutive layers, each padded to the alignment."""
        with self._in_use("write") as file:
            if not self._write_directly(offset_bytes, layers):
                _transfer(os.pwritev, file, _with_padding(layers, self._zeros), offset_bytes)

    def read(self, offset_bytes: int, layers: Sequence[Bytes]) -> None:
        """Fill layers from where `write` put them."""
        with self._in_use("read") as file:
            _transfer(os.preadv, file, _with_padding(layers, self._padding), offset_bytes)

    def next_data(self, offset_bytes: int) -> int:
        """Where the next bytes may lie that were ever written, at or after an aligned offset; or the end."""
        if offset_bytes >= self.size_bytes or not hasattr(os, "SEEK_DATA"):
            return offset_bytes
        try:
            with self._in_use("read") as file:
                return os.lseek(file, offset_bytes, os.SEEK_DATA) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        except OSError as error:  # ENXIO: there are none; else the file system does not know
            return self.size_bytes if error.errno == errno.ENXIO else offset_bytes

    def sync(self) -> None:
        """Return when everything written is on the device; for its errors see `write`."""
        with self._in_use("sync") as file:
            os.fdatasync(file)

    def close(self) -> None:
        """Close the file when no thread reads or writes it: its descriptor may soon belong to another file."""
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
                    raise OSError(errno.EBADF, f"{self._path} is closed")
                self._users.add(user)
                file = self._file
            self._before(operation)
            yield file
        finally:
            with self._using:
                self._users.discard(user)
                self._using.notify_all()

    def _write_directly(self, offset_bytes: int, layers: Sequence[Bytes]) -> bool:
        """Write around the page cache; false where memory or file system do not allow it."""
        direct = self._direct
        if direct is None or not self.writes_directly or not all(map(_is_aligned, layers)):
            return False
        try:
            _transfer(os.pwritev, direct, layers, offset_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.writes_directly = False
            _LOG.warning("%s opens with O_DIRECT but refuses such writes; the page cache is used", self._path)
            return False
        return True


def write_header(slab: Slab, record: Record, seed: int) -> None:
    """Record a block whose layers were written."""
    body = msgspec.msgpack.encode(record)
    sealed = _HEAD.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body, seed)) + body
    _write_pages(slab, record.block.offset_bytes, sealed)


def clear_header(slab: Slab, block: Reservation) -> None:
    """Forget a block; its bytes may be used again."""
    _write_pages(slab, block.offset_bytes, bytes(_HEAD.size))


def _write_pages(slab: Slab, offset_bytes: int, content: bytes) -> None:
    """Write aligned pages: a header in the page cache would make the system read ahead of each block."""
    pages = mmap.mmap(-1, padded(len(content)))
    pages.write(content)
    slab.write(offset_bytes, [np.frombuffer(pages, np.uint8)])


def find_blocks(slab: Slab, seed: int) -> Iterator[Record]:
    """The blocks of one model, by offset; their layers are verified when they are read.

    Where a header is damaged or its sector is bad, its block is lost, and the search goes on page by page.

    Raises:
        OSError: when the device fails otherwise: then nothing is known of the blocks.
    """
    at = 0
    while at < slab.size_bytes:
        record = _read_header(slab, seed, at)
        if record is None:
            at = _next_header(slab, at + ALIGNMENT_BYTES)
        else:
            yield record
            at += extent_bytes(record.block.key, record.block.layer_bytes)


def _read_header(slab: Slab, seed: int, offset_bytes: int) -> Record | None:
    """The record of the block that begins there; `None` where no block does, or its header is damaged."""
    page = np.empty(ALIGNMENT_BYTES, np.uint8)
    if not _can_read(slab, offset_bytes, page):
        return None
    magic, length, told = _HEAD.unpack_from(page.data)
    ends = offset_bytes + padded(_HEAD.size + length)
    if magic != _MAGIC or length > _MOST_BODY_BYTES or ends > slab.size_bytes:
        return None
    pages = np.empty(ends - offset_bytes, np.uint8)
    if not _can_read(slab, offset_bytes, pages):
        return None
    body = pages[_HEAD.size : _HEAD.size + length].tobytes()
    if xxhash.xxh3_64_intdigest(body, seed) != told:
        return None
    record = _RECORDS.decode(body)
    ends = offset_bytes + extent_bytes(record.block.key, record.block.layer_bytes)
    return record if record.block.offset_bytes == offset_bytes and ends <= slab.size_bytes else None


def _next_header(slab: Slab, at: int) -> int:
    """Where the next page is that begins as a header does, or the end of the slab."""
    most_bytes = _CHUNK_BYTES
    while (at := slab.next_data(at)) < slab.size_bytes:
        chunk = np.empty(min(most_bytes, slab.size_bytes - at), np.uint8)
        if _can_read(slab, at, chunk):
            pages = chunk.reshape(-1, ALIGNMENT_BYTES)
            begins = np.all(pages[:, : len(_MAGIC)] == np.frombuffer(_MAGIC, np.uint8), axis=1)
            if begins.any():
                return at + int(begins.argmax()) * ALIGNMENT_BYTES
        elif chunk.nbytes > ALIGNMENT_BYTES:
            most_bytes = ALIGNMENT_BYTES  # go on page by page up to the one that cannot be read
            continue
        else:
            most_bytes = _CHUNK_BYTES
        at += chunk.nbytes
    return at


def _can_read(slab: Slab, offset_bytes: int, into: Bytes) -> bool:
    """Fill a buffer; false where a sector is bad or the file ends. An error of the whole device is raised."""
    for _ in range(_TRIES):
        try:
            slab.read(offset_bytes, [into])
        except DamagedBlockError:
            return False
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        else:
            return True
    return False


def _with_padding(layers: Sequence[Bytes], filler: Bytes) -> list[Bytes]:
    vectors: list[Bytes] = []
    for layer in layers:
        vectors.append(layer)
        if layer.nbytes % ALIGNMENT_BYTES:
            vectors.append(filler[: padded(layer.nbytes) - layer.nbytes])
    return vectors


def _transfer(
    call: Callable[[int, Any, int], int], file: int, vectors: Sequence[Bytes], offset_bytes: int
) -> None:
    """Repeat a vectored call until every byte of every vector was moved."""
    left = list(vectors)
    missing = sum([vector.nbytes for vector in vectors])
    while missing:
        moved = call(file, left[:_MAX_VECTORS], offset_bytes)
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


def _is_aligned(layer: Bytes) -> bool:
    return layer.nbytes % ALIGNMENT_BYTES == 0 and address(layer) % ALIGNMENT_BYTES == 0


def _allocate(file: int, path: Path, size_bytes: int) -> None:
    """Allocate all bytes now, so that a full disk is noticed here and not in the middle of a write."""
    size = os.fstat(file).st_size
    if size > size_bytes:
        raise ValueError(f"{path} has {size} bytes, more than {size_bytes}; a slab can only grow")
    if size == size_bytes:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size_bytes)
        except OSError as error:  # some file systems have grown it halfway by then
            os.ftruncate(file, size)
            free = os.fstatvfs(file)
            says = f"{path} needs {size_bytes - size} more bytes, and {free.f_bavail * free.f_frsize} are free"
            raise OSError(error.errno, f"{os.strerror(error.errno or 0)}: {says}") from error
    else:
        os.ftruncate(file, size_bytes)
    os.fsync(file)


def _open_direct(path: Path) -> int | None:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        return os.open(path, os.O_RDWR | flag)
    except OSError:  # a file system without O_DIRECT; everything goes through the page cache
        return None
