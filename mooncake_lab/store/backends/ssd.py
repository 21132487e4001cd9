"""SSD: durable blocks in a preallocated slab."""

import contextlib
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Final, final

import xxhash

from mooncake_lab.core.checksums import checksums, layer_runs
from mooncake_lab.store.backends.allocation import AllocatedBackend
from mooncake_lab.store.backends.base import (
    Buffer,
    Bytes,
    CopyingBackend,
    DamagedBlockError,
    FolderInUseError,
    Reservation,
    StorageFullError,
    SuspectBlockError,
    check_block,
    check_buffers,
    check_fingerprint,
)
from mooncake_lab.store.backends.ssd_slab import (
    ALIGNMENT_BYTES,
    BeforeOperation,
    Record,
    Slab,
    clear_header,
    extent_bytes,
    find_blocks,
    layer_offset,
    no_faults,
    padded,
    write_header,
)

_HELPERS: Final = 4
_ALONE_BYTES: Final = 512 * 1024
"""Up to here a helper thread takes longer to wake up than it saves."""
_RUN_BYTES: Final = 512 * 1024
"""Layers that are read at once, before their checksums are taken."""
_ALONE_RUNS: Final = 4
"""The caller reads up to this many runs alone, for the same reason."""


def _keep_folder(folder: Path) -> int:
    """Keep a folder for this process until the descriptor is closed, as the system does when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        undo.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise FolderInUseError(
                f"{folder} is open in process {owner}; one process at a time may use an SSD folder"
            ) from error
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        undo.pop_all()
    return descriptor


def missing_bytes(folder: Path, capacity_bytes: int) -> int:
    """How many bytes an SSD folder would still have to allocate for a model, at least.

    The folder is created where it is missing. Its slab may be there already, or be that of another model.

    Raises:
        FolderInUseError: when another process has the folder open.
        OSError: when the folder cannot be made.
    """
    os.close(_keep_folder(folder))
    sizes = [path.stat().st_size for path in folder.glob("*/slab")]
    return max(0, capacity_bytes - max(sizes, default=0))


def model_folder(folder: Path, fingerprint: bytes) -> Path:
    """Where the blocks of one model are, so that those of another are never found there."""
    check_fingerprint(fingerprint)
    return folder / fingerprint.hex()


def run_all(helpers: Executor, tasks: Iterable[Callable[[], None]]) -> None:
    """Run each task once, here or on a helper thread; after one that raised, no other begins.

    No task runs any more when this returns or raises, so that no thread touches buffers that were given back. If
    no helper has begun when the caller finds nothing left to do, it does not wait for one.
    """
    left = deque(tasks)
    helped = Future[None]()

    def work() -> None:
        while True:
            try:
                task = left.popleft()
            except IndexError:
                return
            try:
                task()
            except BaseException:
                left.clear()
                raise

    def help_out() -> None:
        if helped.set_running_or_notify_cancel():
            try:
                helped.set_result(work())
            except BaseException as error:  # noqa: BLE001  # the caller raises it
                helped.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the helpers were shut down
        helpers.submit(help_out)
    try:
        work()
        if not helped.cancel():
            helped.result()
    finally:
        while not (helped.cancel() or helped.done()):  # an interrupt must not leave a helper at the buffers
            with contextlib.suppress(KeyboardInterrupt):
                wait([helped])


@dataclass(slots=True)
class _Written:
    """What was written of a block. Mutable."""

    checksums: list[int]
    """By layer."""
    failed_syncs: int = 0
    """Failed syncs of the device before the first write."""
    has_header: bool = False
    """Whether its header may be in the slab."""


@final
class SsdBackend(CopyingBackend, AllocatedBackend):
    """Durable blocks of one model in a folder (FAST'25 §3: the SSD part of Mooncake Store).

    A commit writes the headers of blocks whose layers were written, and syncs both. The header of a freed block is
    overwritten before its bytes are used again. So a process killed at any moment leaves no torn block and loses
    no committed one. After a failed sync it is unknown which bytes reached the device, and a later sync would not
    report it: blocks that were being written have to be freed and written again. Every read verifies the checksum
    of every layer. Helper threads take checksums while the device works. Mutable: it owns a folder and threads.

    Args:
        folder: created where it is missing; one process at a time may have it open.
        capacity_bytes: size of the slab, rounded down to whole pages; an existing slab may grow.
        fingerprint: names the model (weights, data type, block size, rope); other models' blocks are not seen.
        name: its name in statistics and messages.
        before: called before each device operation, to inject faults.

    Raises:
        FolderInUseError: when another process has the folder open.
        OSError: when the folder or the slab cannot be made (no space, no permission).
        ValueError: when the slab would shrink, or has less than a page.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        fingerprint: bytes,
        name: str = "ssd",
        before: BeforeOperation = no_faults,
    ) -> None:
        model = model_folder(folder, fingerprint)
        self._committing = threading.Lock()  # one commit at a time, while readers go on
        self._failed_syncs = 0
        self._written: dict[bytes, _Written] = {}
        self._freed: dict[Reservation, bool] = {}
        """Blocks whose space the next commit lets be used again, and whether their header was overwritten."""
        self._is_open = True
        self._seed = xxhash.xxh3_64_intdigest(fingerprint)
        with contextlib.ExitStack() as undo:
            self._folder_lock = _keep_folder(folder)
            undo.callback(os.close, self._folder_lock)
            model.mkdir(exist_ok=True)
            super().__init__(name, capacity_bytes, ALIGNMENT_BYTES)
            self._slab = Slab(model / "slab", self.capacity_bytes, before)
            undo.callback(self._slab.close)
            newest_first = sorted(find_blocks(self._slab, self._seed), key=lambda found: -found.block.sequence)
            for record in newest_first:
                if self._recover(record.block, _footprint(record.block)):
                    self._written[record.block.key] = _Written(list(record.checksums), has_header=True)
                else:  # an older block of the same key
                    clear_header(self._slab, record.block)
            self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="ssd")
            undo.pop_all()

    @property
    def used_bytes(self) -> int:
        """The bytes that are reserved or held, headers and padding included."""
        with self._lock:
            return self._extents.used_bytes - sum(map(_footprint, self._freed))

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes of a header and of the layers, each rounded up to 4 KiB."""
        return extent_bytes(key, layer_bytes)

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Reserve space for a block; for its errors see `StorageBackend.reserve`."""
        check_block(key, layer_bytes)
        size = extent_bytes(key, layer_bytes)
        try:
            return self._reserve(key, layer_bytes, position, size)
        except StorageFullError:
            if not self._freed:
                raise
        self._clear_freed()
        return self._reserve(key, layer_bytes, position, size)

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Write layers into the slab; for its errors see `StorageBackend.write`.

        Where there are many bytes, one thread takes all checksums and then writes the first quarter of the layers,
        while another one writes the others.
        """
        arrays = check_buffers(reservation, layers, first_layer)
        with self._lock:
            self._check_open(reservation)
            unknown = _Written([0] * len(reservation.layer_bytes), self._failed_syncs)
            written = self._written.setdefault(reservation.key, unknown)
            self._check_synced(reservation)
        is_long = sum([array.nbytes for array in arrays]) > _ALONE_BYTES
        cut = len(arrays) // 4 if is_long else 0

        def write_others() -> None:
            self._slab.write(layer_offset(reservation, first_layer + cut), arrays[cut:])

        def take_checksums_and_write_first() -> None:
            written.checksums[first_layer : first_layer + len(arrays)] = checksums(arrays, self._seed)
            if cut:
                self._slab.write(layer_offset(reservation, first_layer), arrays[:cut])

        self._run([write_others, take_checksums_and_write_first], is_long=is_long)
        self._mark_written(reservation, first_layer, len(arrays))

    def commit(self, *reservations: Reservation) -> None:
        """Write the headers and sync the blocks; for its errors see `StorageBackend.commit`."""
        with self._committing:
            with self._lock:
                self._check_complete(reservations)
                self._check_synced(*reservations)
                written = [self._written[block.key] for block in reservations]
            self._clear_freed()
            for block, found in zip(reservations, written, strict=True):
                found.has_header = True
                write_header(self._slab, Record(block, tuple(found.checksums)), self._seed)
            try:
                self._slab.sync()
            except BaseException:
                self._failed_syncs += 1
                raise
            self._hold(reservations)

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Read layers and verify their checksums; for its errors see `StorageBackend.read_into`.

        Many layers are read together with helpers.
        """
        arrays = check_buffers(reservation, buffers, first_layer, writable=True)
        with self._lock:
            self._check_committed(reservation)
            sums = self._written[reservation.key].checksums[first_layer : first_layer + len(arrays)]
        start = layer_offset(reservation, first_layer)
        runs = _runs(reservation.layer_bytes[first_layer : first_layer + len(arrays)])
        reads = [
            partial(self._read_run, reservation, start + offset, arrays[run], sums[run]) for run, offset in runs
        ]
        self._run(reads, is_long=len(reads) > _ALONE_RUNS)

    def free(self, *reservations: Reservation) -> None:
        """Release the space of blocks; for its errors see `StorageBackend.free`.

        It is used again after the next commit, so that a block in a bad sector is written elsewhere.
        """
        with self._lock:
            for reservation in reservations:
                self._remove(reservation)
                written = self._written.pop(reservation.key, None)
                if written is None or not written.has_header:
                    self._extents.give(reservation.offset_bytes, _footprint(reservation))
                    continue
                self._freed[reservation] = False  # first: an interrupt may end the next line
                self._freed[reservation] = self._clear(reservation)

    def close(self) -> None:
        """Let other processes have the folder, when no thread uses it any more."""
        with self._committing, contextlib.ExitStack() as last:  # an interrupt ends one step, and skips no other
            if not self._is_open:
                return
            self._is_open = False
            last.callback(os.close, self._folder_lock)
            last.callback(self._slab.close)
            last.callback(self._helpers.shutdown)
            self._clear_freed()  # freed blocks that the next process finds are still right

    def _clear_freed(self) -> None:
        """Let the space of freed blocks be used again, but not where the header cannot be overwritten even now."""
        with self._lock:
            for block, is_cleared in list(self._freed.items()):
                if is_cleared or self._clear(block):
                    del self._freed[block]
                    self._extents.give(block.offset_bytes, _footprint(block))

    def _clear(self, block: Reservation) -> bool:
        """Overwrite the header of a freed block; false where the device fails, so that it is to be tried again."""
        try:
            clear_header(self._slab, block)
        except OSError:
            return False
        return True

    def _check_synced(self, *reservations: Reservation) -> None:
        """Refuse blocks whose first write came before a failed sync.

        Raises:
            SuspectBlockError: naming the first of them.
        """
        for reservation in reservations:
            if self._written[reservation.key].failed_syncs < self._failed_syncs:
                raise SuspectBlockError(
                    f"{self.name} could not sync after block {reservation.key.hex()} had begun to be written;"
                    " free it and write it anew"
                )

    def _run(self, tasks: Sequence[Callable[[], None]], *, is_long: bool) -> None:
        """Carry out transfers, with a helper where they take longer than it takes to wake up."""
        if is_long:
            run_all(self._helpers, tasks)
            return
        for task in tasks:
            task()

    def _read_run(
        self, block: Reservation, offset_bytes: int, layers: Sequence[Bytes], sums: Sequence[int]
    ) -> None:
        """Read layers, and verify them while they are in the processor's cache."""
        self._slab.read(offset_bytes, layers)
        if checksums(layers, self._seed) != sums:
            raise DamagedBlockError(f"a layer of block {block.key.hex()} on SSD is not what was written")


def _footprint(block: Reservation) -> int:
    return extent_bytes(block.key, block.layer_bytes)


@lru_cache
def _runs(sizes: tuple[int, ...]) -> tuple[tuple[slice, int], ...]:
    """Layers of these sizes in runs that are read at once, and the offset of each run from the first."""
    begins = list(accumulate(map(padded, sizes), initial=0))
    return tuple((run, begins[run.start]) for run in layer_runs(sizes, _RUN_BYTES))
