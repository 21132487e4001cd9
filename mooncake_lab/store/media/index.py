"""The index of committed blocks: an LMDB file of sealed records, rewritten where its health is not certain."""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, final

import lmdb
import msgspec
import xxhash

from mooncake_lab.store.media import index_walk
from mooncake_lab.store.media.record import Record, seal, seal_record, unseal, unseal_record
from mooncake_lab.store.media.slab import BeforeOperation, no_faults

_BLOCK: Final = b"b"  # before a block's key; the count has a key of its own
_COUNT: Final = b"count"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_FIRST_MAP_BYTES: Final = 16 * 1024**2
_MOST_MAP_BYTES: Final = 64 * 1024**3
_WALK_TIMEOUT_S: Final = 120


@final
class Index:
    """Records by block key; what one call changes is changed wholly or not at all, whenever the process is killed.

    It is synced only when it is closed: what a commit promises is on the device already, each block with its
    own record. So an index that was open when the machine itself went down is not believed, see `read_index`.
    Only written to while it is open: its user keeps the records in memory. Mutable: it owns an open file.
    """

    __slots__ = ("_before", "_blocks", "_environment", "_path", "_seed")

    def __init__(self, path: Path, seed: int, blocks: int, before: BeforeOperation = no_faults) -> None:
        self._path = path
        self._seed = seed
        self._blocks = blocks
        self._before = before
        _seal_path(path).unlink(missing_ok=True)  # from now on it is only known to be whole when closed again
        _boot_path(path).write_text(_boot_id(), encoding="ascii")
        sync_folder(path.parent)  # or the seal might be back after a power cut, beside what it no longer seals
        self._environment = _open(path)

    def change(self, put: Sequence[Record], drop: Sequence[bytes]) -> None:
        """Drop keys, then hold records, in one durable transaction.

        Raises:
            OSError: when the device refuses; nothing changed.
        """
        self._before("index")
        while True:
            try:
                self._blocks = self._apply(put, drop)
            except lmdb.MapFullError:
                self._grow()
            except lmdb.Error as error:
                raise OSError(f"the index {self._path} cannot be written: {error}") from error
            else:
                return

    def close(self) -> None:
        """Close the file, and put its checksum beside it: an index with a good one needs no examination."""
        beside = _seal_path(self._path)
        try:
            self._environment.sync(True)  # noqa: FBT003  # its only parameter
            self._environment.close()
            beside.write_text(_digest(self._path), encoding="ascii")
        except (OSError, lmdb.Error):  # without it, the next one to open the file examines it
            self._environment.close()
            beside.unlink(missing_ok=True)

    def _apply(self, put: Sequence[Record], drop: Sequence[bytes]) -> int:
        with self._environment.begin(write=True) as change:
            blocks = self._blocks - sum(change.delete(_BLOCK + key) for key in drop)
            for record in put:
                blocks += change.get(_BLOCK + record.key) is None
                change.put(_BLOCK + record.key, seal_record(record, self._seed))
            change.put(_COUNT, seal(msgspec.msgpack.encode(blocks), self._seed))
        return blocks

    def _grow(self) -> None:
        size = int(self._environment.info()["map_size"])
        if size >= _MOST_MAP_BYTES:
            raise OSError(f"the index {self._path} has {size} bytes; that is as far as it may grow")
        self._environment.set_mapsize(2 * size)


def write_index(path: Path, seed: int, records: Sequence[Record], before: BeforeOperation = no_faults) -> Index:
    """A new index of these records in the place of the old one, at once; returned open."""
    fresh = path.with_name("index-new.mdb")
    fresh.unlink(missing_ok=True)
    index = Index(fresh, seed, 0)
    index.change(records, [])
    index.close()
    _seal_path(fresh).unlink(missing_ok=True)
    _boot_path(fresh).unlink(missing_ok=True)
    _seal_path(path).unlink(missing_ok=True)
    fresh.replace(path)
    sync_folder(path.parent)
    return Index(path, seed, len(records), before)


def read_index(path: Path, seed: int) -> tuple[list[Record], bool]:
    """The readable records, and whether they are certainly all; a file of unknown health is walked elsewhere.

    The count of blocks in the file, and the seal of each record, tell whether something is missing; where the
    machine went down while the file was open, nothing does.
    """
    if not path.exists():
        return [], False
    entries = list(_walk_here(path) if is_sealed(path) else _walk_elsewhere(path))
    found = [unseal_record(value, seed) for key, value in entries if key[:1] == _BLOCK]
    records = [record for record in found if record is not None]
    body = unseal(dict(entries).get(_COUNT, b""), seed)
    counted = msgspec.msgpack.decode(body, type=int) if body else None
    survived = is_sealed(path) or _was_open_in_this_boot(path)
    return records, survived and counted == len(records) == len(found)


def is_sealed(path: Path) -> bool:
    """Whether the file is exactly as it was when it was closed."""
    beside = _seal_path(path)
    return path.exists() and beside.exists() and beside.read_bytes() == _digest(path).encode()


def sync_folder(folder: Path) -> None:
    """Make renamed and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> lmdb.Environment:
    """Open for writing; our own lock keeps other processes out, so LMDB needs none."""
    size = max(_FIRST_MAP_BYTES, 2 * path.stat().st_size if path.exists() else 0)
    try:
        return lmdb.open(str(path), map_size=size, subdir=False, lock=False, sync=False, mode=0o600)
    except lmdb.Error as error:
        raise OSError(f"the index {path} cannot be opened: {error}") from error


def _seal_path(path: Path) -> Path:
    return path.with_suffix(".seal")


def _boot_path(path: Path) -> Path:
    return path.with_suffix(".boot")


def _boot_id() -> str:
    """What changes when the machine starts anew; always the same where the system does not tell."""
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else "unknown"


def _was_open_in_this_boot(path: Path) -> bool:
    beside = _boot_path(path)
    return beside.exists() and beside.read_text("ascii", "replace") == _boot_id() != "unknown"


def _digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _walk_here(path: Path) -> Iterator[tuple[bytes, bytes]]:
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as index, index.begin() as walk:
        for key, value in walk.cursor():
            yield bytes(key), bytes(value)


def _walk_elsewhere(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """What the walking process printed before it ended, however it ended."""
    command = [sys.executable, "-I", str(index_walk.__file__), str(path)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_WALK_TIMEOUT_S)  # noqa: S603  # our own
        printed = done.stdout
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
    parts: list[bytes] = []
    at = 0
    while at + 4 <= len(printed):
        (length,) = struct.unpack_from("<I", printed, at)
        parts.append(printed[at + 4 : at + 4 + length])
        at += 4 + length
    return zip(parts[0::2], parts[1::2], strict=False)
