"""Verify an SSD folder: every block of every model read and compared with its checksums."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

from mooncake_lab.store.media.extents import ExtentAllocator
from mooncake_lab.store.media.folder import FolderLock, rooms_in
from mooncake_lab.store.media.index import read_index, write_index
from mooncake_lab.store.media.medium import DamagedBlockError
from mooncake_lab.store.media.record import ALIGNMENT_BYTES, Record, extent_bytes, seed_of
from mooncake_lab.store.media.recovery import damaged_layers, find_records, header_at
from mooncake_lab.store.media.slab import Slab


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomReport:
    """What was found in the room of one model."""

    fingerprint: str
    """Hexadecimal, as its folder is called."""
    blocks: int
    """Blocks in the index, good or bad."""
    payload_bytes: int
    damaged: tuple[str, ...]
    """Keys (hexadecimal) of blocks whose header, or a layer, cannot be read or is not what was written."""
    index_is_whole: bool
    """Whether every record of the index is there and has its seal."""
    repaired: bool = False
    """Whether damaged blocks were dropped and the index was rebuilt."""
    trouble: str | None = None
    """What kept it from being read, or repaired."""

    @property
    def is_sound(self) -> bool:
        """Whether everything in the index can be served, and nothing is missing from it."""
        return self.index_is_whole and not self.damaged and self.trouble is None


def verify_folder(folder: Path, *, repair: bool = False) -> list[RoomReport]:
    """Read every block of a folder that nobody has open; changes nothing unless asked to repair.

    The folder is kept from first look to last repair: nobody opens it in between.

    Raises:
        FolderInUseError: when a process has it open.
        ValueError: when the folder holds no store.
        OSError: when it cannot be listed.
    """
    if not folder.is_dir() or not rooms_in(folder):
        raise ValueError(f"{folder} holds no block store")
    lock = FolderLock(folder)
    try:
        return [_report(fingerprint, room, repair=repair) for fingerprint, room in rooms_in(folder)]
    finally:
        lock.release()


def _report(fingerprint: bytes, room: Path, *, repair: bool) -> RoomReport:
    """What was found in a room; trouble with one room leaves the others to be looked at."""
    found = RoomReport(fingerprint=fingerprint.hex(), blocks=0, payload_bytes=0, damaged=(), index_is_whole=False)
    try:
        found = _survey(found, room, seed_of(fingerprint))
        if repair and not found.is_sound:
            _repair(found, room, seed_of(fingerprint))
            found = replace(found, repaired=True)
    except OSError as error:
        return replace(found, trouble=str(error))
    return found


def _survey(found: RoomReport, room: Path, seed: int) -> RoomReport:
    index = room / "index.mdb"
    records, whole = read_index(index, seed)
    with _slab_of(room) as slab:
        damaged = tuple(record.key.hex() for record in records if _is_damaged(record, slab, seed))
        is_unborn = slab.size_bytes == 0 and not index.exists()  # its maker was killed before it had a size
    return replace(
        found,
        blocks=len(records),
        payload_bytes=sum(sum(record.layer_bytes) for record in records),
        damaged=damaged,
        index_is_whole=whole or is_unborn,
    )


def _is_damaged(record: Record, slab: Slab, seed: int) -> bool:
    if record.offset_bytes + extent_bytes(record.key, record.layer_bytes) > slab.size_bytes:
        return True
    try:
        return header_at(slab, seed, record.offset_bytes) != record or bool(damaged_layers(record, slab, seed))
    except (OSError, DamagedBlockError):
        return True


def _repair(found: RoomReport, room: Path, seed: int) -> None:
    """Write an index of the blocks that are whole, those included that only the slab knows of."""
    kept: dict[bytes, Record] = {}
    with _slab_of(room) as slab:
        if slab.size_bytes >= ALIGNMENT_BYTES:
            extents = ExtentAllocator(slab.size_bytes, ALIGNMENT_BYTES)
            for record in find_records(room / "index.mdb", seed, slab).records:
                if record.key.hex() in found.damaged and _is_damaged(record, slab, seed):
                    continue
                size = extent_bytes(record.key, record.layer_bytes)
                if record.key not in kept and extents.take_at(record.offset_bytes, size):
                    kept[record.key] = record
    write_index(room / "index.mdb", seed, list(kept.values())).close()


@contextlib.contextmanager
def _slab_of(room: Path) -> Generator[Slab]:
    """The slab as it is."""
    slab = Slab(room / "slab", (room / "slab").stat().st_size)
    try:
        yield slab
    finally:
        slab.close()
