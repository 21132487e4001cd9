"""The slab: one preallocated file with a header and aligned layers per block, each layer under a checksum."""

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from mooncake_lab.store.backends.base import Bytes, DamagedBlockError, Reservation, address
from mooncake_lab.store.backends.checksums import checksums, layer_runs, run_all, run_concurrently
from mooncake_lab.store.backends.ssd_index import BeforeOperation, Operation, Record, no_faults, seal_record

_LOG: Final = logging.getLogger(__name__)
ALIGNMENT_BYTES: Final = 4096
"""Alignment of blocks and of every layer in them: what O_DIRECT requires, and a page."""
_HEADER_FIXED_BYTES: Final = 96
_HEADER_LAYER_BYTES: Final = 24
_MAX_VECTORS: Final = 512  # a call takes at most 1024, and every layer may need its padding
_HELPERS: Final = 4
_ALONE_BYTES: Final = 512 * 1024
"""Up to here a helper thread takes longer to wake up than it saves."""
_RUN_BYTES: Final = 512 * 1024
"""Layers that are read at once, before their checksums are taken."""
_ALONE_RUNS: Final = 4
"""The caller reads up to this many runs alone, for the same reason."""


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
            self.is_new: bool = os.fstat(self._file).st_size == 0
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


@final
class BlockFile:
    """Blocks of one model in a slab: writes take checksums, reads verify them.

    A helper thread takes checksums while the device works. Mutable: it owns threads.

    Args:
        slab: holds the bytes.
        seed: of the checksums.
    """

    def __init__(self, slab: Slab, seed: int) -> None:
        self._slab = slab
        self._seed = seed
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="ssd")

    def write_block(self, block: Reservation, layers: Sequence[Bytes]) -> list[int]:
        """Write a whole block with its header; the checksum of each layer.

        A helper takes all checksums and then writes the header with the first quarter of the layers; the caller
        writes the others. A header whose layers are incomplete does no harm: recovery verifies every layer.
        """
        if block.size_bytes <= _ALONE_BYTES:
            return self._write_with_header(block, layers, len(layers))
        cut = len(layers) // 4
        sums, _ = run_concurrently(
            self._helpers,
            lambda: self._write_with_header(block, layers, cut),
            lambda: self._slab.write(layer_offset(block, cut), layers[cut:]),
        )
        return sums

    def write_layers(self, block: Reservation, layers: Sequence[Bytes], first_layer: int) -> list[int]:
        """Write layers without a header; the checksum of each."""
        start = layer_offset(block, first_layer)
        if sum([layer.nbytes for layer in layers]) <= _ALONE_BYTES:
            self._slab.write(start, layers)
            return checksums(layers, self._seed)
        sums, _ = run_concurrently(
            self._helpers, lambda: checksums(layers, self._seed), lambda: self._slab.write(start, layers)
        )
        return sums

    def write_header(self, record: Record) -> None:
        """Write the header of a block whose layers came one by one."""
        sealed = np.frombuffer(seal_record(record, self._seed), np.uint8)
        self._slab.write(record.block.offset_bytes, [self._header(record.block, sealed)])

    def read(self, record: Record, layers: Sequence[Bytes], first_layer: int) -> None:
        """Fill layers and verify their checksums; many layers are read together with a helper."""
        start = layer_offset(record.block, first_layer)
        runs = _runs(record.block.layer_bytes[first_layer : first_layer + len(layers)])
        reads = [
            partial(self._read_run, record, layers[run], first_layer + run.start, start + offset)
            for run, offset in runs
        ]
        if len(reads) > _ALONE_RUNS:
            run_all(self._helpers, reads)
            return
        for read in reads:
            read()

    def close(self) -> None:
        """End the threads."""
        self._helpers.shutdown()

    def _write_with_header(self, block: Reservation, layers: Sequence[Bytes], count: int) -> list[int]:
        sums = checksums(layers, self._seed)
        sealed = np.frombuffer(seal_record(Record(block, tuple(sums)), self._seed), np.uint8)
        self._slab.write(block.offset_bytes, [self._header(block, sealed), *layers[:count]])
        return sums

    def _header(self, block: Reservation, sealed: Bytes) -> Bytes:
        """The sealed record in aligned pages of its own."""
        pages = np.frombuffer(mmap.mmap(-1, header_bytes(block.key, len(block.layer_bytes))), np.uint8)
        pages[: sealed.nbytes] = sealed
        return pages

    def _read_run(self, record: Record, layers: Sequence[Bytes], first_layer: int, start: int) -> None:
        """Read layers, and verify them while they are in the processor's cache."""
        self._slab.read(start, layers)
        for layer, found in enumerate(checksums(layers, self._seed), first_layer):
            if found != record.checksums[layer]:
                raise DamagedBlockError(
                    f"layer {layer} of block {record.block.key.hex()} on SSD is not what was written"
                )


@lru_cache
def _runs(sizes: tuple[int, ...]) -> tuple[tuple[slice, int], ...]:
    """Layers of these sizes in runs that are read at once, and the offset of each run from the first."""
    begins = list(accumulate(map(padded, sizes), initial=0))
    return tuple((run, begins[run.start]) for run in layer_runs(sizes, _RUN_BYTES))


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
    except OSError:  # a file system without O_DIRECT; everything goes through the page cache
        return None
