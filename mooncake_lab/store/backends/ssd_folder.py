"""An SSD folder: its owner, what it holds after a crash, and whether every block in it is intact."""

import contextlib
import fcntl
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

import numpy as np

from mooncake_lab.store.backends.allocation import ExtentAllocator
from mooncake_lab.store.backends.base import (
    MAX_KEY_BYTES,
    MAX_LAYERS,
    DamagedBlockError,
    FolderInUseError,
    check_fingerprint,
)
from mooncake_lab.store.backends.checksums import checksum
from mooncake_lab.store.backends.ssd_index import MAGIC, Index, Record, read_index, seed_of, unseal_record
from mooncake_lab.store.backends.ssd_slab import ALIGNMENT_BYTES, Slab, extent_bytes, header_bytes, layer_offset

_CHUNK_BYTES: Final = 8 * 1024**2


@final
class FolderLock:
    """Keeps a folder for this process until `release`; the system releases it when the process ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            owner = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise FolderInUseError(
                f"{folder} is open in process {owner}; one process at a time may use an SSD folder"
            ) from error
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Let other processes have the folder."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def model_folder(folder: Path, fingerprint: bytes) -> Path:
    """Where the blocks of one model are, so that those of another are never found there."""
    check_fingerprint(fingerprint)
    return folder / fingerprint.hex()


def index_path(model: Path) -> Path:
    """The index of a model's folder."""
    return model / "index"


def find_records(model: Path, seed: int, slab: Slab) -> tuple[list[Record], bool]:
    """The records of a model's folder, newest first, and whether the index had all of them.

    Where two records claim one key or one byte, the newer one is right. A complete index is trusted: layers are
    verified when they are read. Otherwise the slab is read once, and a block found there counts only when every
    layer has its checksum. A block freed shortly before may reappear: its key names its content, so it may be
    served.
    """
    if slab.is_new:
        return [], True
    indexed, is_complete = read_index(index_path(model), seed)
    found = list(indexed.values())
    if not is_complete:
        found += [record for record in _scan(slab, seed) if _is_intact(record, slab, seed)]
    return sorted(found, key=lambda record: -record.block.sequence), is_complete


def _scan(slab: Slab, seed: int) -> Iterator[Record]:
    """Every readable record whose header is in the slab at the offset in the record."""
    for start in range(0, slab.size_bytes, _CHUNK_BYTES):
        chunk = np.empty(min(_CHUNK_BYTES, slab.size_bytes - start), np.uint8)
        try:
            slab.read(start, [chunk])
        except (OSError, DamagedBlockError):
            continue  # its blocks are lost
        pages = chunk[: chunk.nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES].reshape(-1, ALIGNMENT_BYTES)
        begins = np.all(pages[:, : len(MAGIC)] == np.frombuffer(MAGIC, np.uint8), axis=1)
        for page in np.flatnonzero(begins).tolist():
            with contextlib.suppress(OSError, DamagedBlockError):  # it continues in a chunk that cannot be read
                record = _header_at(slab, seed, start + page * ALIGNMENT_BYTES)
                if record is not None:
                    yield record


def _header_at(slab: Slab, seed: int, offset_bytes: int) -> Record | None:
    """The record of the block that begins there; `None` where no block does."""
    longest = header_bytes(bytes(MAX_KEY_BYTES), MAX_LAYERS)
    header = np.empty(min(longest, slab.size_bytes - offset_bytes), np.uint8)
    slab.read(offset_bytes, [header])
    record = unseal_record(header.tobytes(), seed)
    return record if record is not None and record.block.offset_bytes == offset_bytes else None


def _is_intact(record: Record, slab: Slab, seed: int) -> bool:
    """Whether every layer of a block can be read and has its checksum."""
    block = record.block
    if block.offset_bytes + extent_bytes(block.key, block.layer_bytes) > slab.size_bytes:
        return False
    for layer, size in enumerate(block.layer_bytes):
        buffer = np.empty(size, np.uint8)
        try:
            slab.read(layer_offset(block, layer), [buffer])
        except (OSError, DamagedBlockError):
            return False
        if checksum(buffer, seed) != record.checksums[layer]:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReport:
    """The state of one model's folder."""

    fingerprint: str
    """Hexadecimal, the name of its folder."""
    blocks: int = 0
    """Blocks in the index, intact or damaged."""
    payload_bytes: int = 0
    damaged: tuple[str, ...] = ()
    """Keys (hexadecimal) of blocks whose header or a layer cannot be read or is not what was written."""
    index_is_whole: bool = False
    """Whether the index is undamaged and has every committed block."""
    repaired: bool = False
    """Whether damaged blocks were dropped and the index was rebuilt."""
    trouble: str | None = None
    """Why it could not be read or repaired."""

    @property
    def is_sound(self) -> bool:
        """Whether everything in the index can be served, and nothing is missing from it."""
        return self.index_is_whole and not self.damaged and self.trouble is None


def verify_folder(folder: Path, *, repair: bool = False) -> list[FolderReport]:
    """Read every block of a folder that no process has open; changes nothing unless asked to repair.

    The folder stays locked from the first read to the last repair.

    Raises:
        FolderInUseError: when a process has it open.
        ValueError: when the folder holds no store.
        OSError: when it cannot be listed.
    """
    models = [path for path in sorted(folder.iterdir()) if _is_model(path)] if folder.is_dir() else []
    if not models:
        raise ValueError(f"{folder} holds no block store")
    lock = FolderLock(folder)
    try:
        return [_verify(model, repair=repair) for model in models]
    finally:
        lock.release()


def _is_model(path: Path) -> bool:
    try:
        bytes.fromhex(path.name)
    except ValueError:
        return False  # the lock, or a file of another program
    return (path / "slab").exists()


def _verify(model: Path, *, repair: bool) -> FolderReport:
    """The report on one model; an error ends this report and leaves the other models to be verified."""
    found = FolderReport(fingerprint=model.name)
    seed = seed_of(bytes.fromhex(model.name))
    try:
        found = _survey(found, model, seed)
        if repair and not found.is_sound:
            _repair(found, model, seed)
            found = replace(found, repaired=True)
    except OSError as error:
        return replace(found, trouble=str(error))
    return found


def _survey(found: FolderReport, model: Path, seed: int) -> FolderReport:
    records, is_complete = read_index(index_path(model), seed)
    with _slab_of(model) as slab:
        damaged = tuple(key.hex() for key, record in records.items() if _is_damaged(record, slab, seed))
        is_empty = slab.size_bytes == 0 and not index_path(model).exists()  # killed before the slab had a size
    return replace(
        found,
        blocks=len(records),
        payload_bytes=sum(record.block.size_bytes for record in records.values()),
        damaged=damaged,
        index_is_whole=is_complete or is_empty,
    )


def _is_damaged(record: Record, slab: Slab, seed: int) -> bool:
    if not _is_intact(record, slab, seed):
        return True
    try:
        return _header_at(slab, seed, record.block.offset_bytes) != record
    except (OSError, DamagedBlockError):
        return True


def _repair(found: FolderReport, model: Path, seed: int) -> None:
    """Write an index of the intact blocks, including those that only the slab knows."""
    kept: dict[bytes, Record] = {}
    with _slab_of(model) as slab:
        if slab.size_bytes >= ALIGNMENT_BYTES:
            extents = ExtentAllocator(slab.size_bytes, ALIGNMENT_BYTES)
            for record in find_records(model, seed, slab)[0]:
                block = record.block
                if block.key.hex() in found.damaged and _is_damaged(record, slab, seed):
                    continue
                size = extent_bytes(block.key, block.layer_bytes)
                if block.key not in kept and extents.take_at(block.offset_bytes, size):
                    kept[block.key] = record
    Index(index_path(model), seed, kept.values()).close()


@contextlib.contextmanager
def _slab_of(model: Path) -> Generator[Slab]:
    slab = Slab(model / "slab", (model / "slab").stat().st_size)
    try:
        yield slab
    finally:
        slab.close()
