"""Verify an SSD folder: every block of every model read and compared with its checksums."""

from dataclasses import dataclass
from pathlib import Path

from mooncake_lab.store.media.folder import FolderLock, rooms_in
from mooncake_lab.store.media.index import read_index
from mooncake_lab.store.media.record import Record, extent_bytes, seed_of
from mooncake_lab.store.media.recovery import damaged_layers, header_at
from mooncake_lab.store.media.slab import Slab
from mooncake_lab.store.media.ssd import SsdMedium


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

    @property
    def is_sound(self) -> bool:
        """Whether everything in the index can be served, and nothing is missing from it."""
        return self.index_is_whole and not self.damaged


def verify_folder(folder: Path, *, repair: bool = False) -> list[RoomReport]:
    """Read every block of a folder that nobody has open; changes nothing unless asked to repair.

    Raises:
        FolderInUseError: when a process has it open.
        ValueError: when the folder holds no store.
        OSError: when it cannot be read at all.
    """
    if not folder.is_dir() or not rooms_in(folder):
        raise ValueError(f"{folder} holds no block store")
    lock = FolderLock(folder)
    try:
        reports = [_survey(fingerprint, room) for fingerprint, room in rooms_in(folder)]
    finally:
        lock.release()
    return [_repair(folder, report) if repair and not report.is_sound else report for report in reports]


def _survey(fingerprint: bytes, room: Path) -> RoomReport:
    seed = seed_of(fingerprint)
    records, whole = read_index(room / "index.mdb", seed)
    slab = Slab(room / "slab", (room / "slab").stat().st_size)
    try:
        damaged = tuple(record.key.hex() for record in records if _is_damaged(record, slab, seed))
    finally:
        slab.close()
    return RoomReport(
        fingerprint=fingerprint.hex(),
        blocks=len(records),
        payload_bytes=sum(sum(record.layer_bytes) for record in records),
        damaged=damaged,
        index_is_whole=whole,
    )


def _is_damaged(record: Record, slab: Slab, seed: int) -> bool:
    if record.offset_bytes + extent_bytes(record.key, record.layer_bytes) > slab.size_bytes:
        return True
    try:
        return header_at(slab, seed, record.offset_bytes) != record or bool(damaged_layers(record, slab, seed))
    except OSError:
        return True


def _repair(folder: Path, report: RoomReport) -> RoomReport:
    """Open the room, which rebuilds a damaged index, and free what is damaged."""
    medium = SsdMedium(folder, None, fingerprint=bytes.fromhex(report.fingerprint))
    try:
        bad = [block for block in medium.blocks() if block.key.hex() in report.damaged]
        medium.free(*bad)
    finally:
        medium.close()
    return RoomReport(
        fingerprint=report.fingerprint,
        blocks=report.blocks,
        payload_bytes=report.payload_bytes,
        damaged=report.damaged,
        index_is_whole=report.index_is_whole,
        repaired=True,
    )
