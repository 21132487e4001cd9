"""What an SSD folder holds: from its index where that is whole, otherwise from the slab itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_lab.store.media.index import read_index
from mooncake_lab.store.media.medium import MAX_KEY_BYTES, MAX_LAYERS, DamagedBlockError
from mooncake_lab.store.media.record import (
    ALIGNMENT_BYTES,
    MAGIC,
    Record,
    checksum,
    header_bytes,
    layer_offset,
    unseal_record,
)
from mooncake_lab.store.media.slab import Slab

_CHUNK_BYTES = 8 * 1024**2


@dataclass(frozen=True, slots=True)
class Found:
    """The records of a folder, and how they were found."""

    records: tuple[Record, ...]
    index_was_whole: bool
    """False when some came, or had to be looked for, in the slab."""


def find_records(index_path: Path, seed: int, slab: Slab) -> Found:
    """The records of a folder, the newest first; where two claim one key or one byte, the newer is right.

    A whole index is trusted as it is: its payloads are checked when they are read. Where the index is damaged or
    gone, the slab is read once from front to back, and a block found there counts only when every layer has its
    checksum. A block that was freed shortly before may reappear: it is what its key names, so it may be served.
    """
    if slab.is_new:
        return Found((), index_was_whole=True)
    indexed, whole = read_index(index_path, seed)
    scanned: list[Record] = []
    if not whole:
        scanned = [record for record in scan_slab(slab, seed) if _is_intact(record, slab, seed)]
    newest_first = sorted([*indexed, *scanned], key=lambda record: -record.sequence)
    return Found(tuple(newest_first), whole)


def scan_slab(slab: Slab, seed: int) -> Iterator[Record]:
    """Every record whose sealed header stands in the slab where the record says it does, and can be read."""
    for start in range(0, slab.size_bytes, _CHUNK_BYTES):
        chunk = np.empty(min(_CHUNK_BYTES, slab.size_bytes - start), np.uint8)
        try:
            slab.read(start, [chunk])
        except (OSError, DamagedBlockError):
            continue  # a chunk that cannot be read is forgotten whole
        pages = chunk[: chunk.nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES].reshape(-1, ALIGNMENT_BYTES)
        begins = np.all(pages[:, : len(MAGIC)] == np.frombuffer(MAGIC, np.uint8), axis=1)
        for page in np.flatnonzero(begins).tolist():
            try:
                record = header_at(slab, seed, start + page * ALIGNMENT_BYTES)
            except (OSError, DamagedBlockError):  # it goes on in a chunk that cannot be read
                continue
            if record is not None:
                yield record


def damaged_layers(record: Record, slab: Slab, seed: int) -> list[int]:
    """The layers that cannot be read or have not their checksum.

    Raises:
        OSError: when the device refuses to read.
    """
    reservation = record.reservation()
    damaged: list[int] = []
    for layer, size in enumerate(record.layer_bytes):
        buffer = np.empty(size, np.uint8)
        try:
            slab.read(layer_offset(reservation, layer), [buffer])
        except DamagedBlockError:
            damaged.append(layer)
            continue
        if checksum(buffer, seed) != record.checksums[layer]:
            damaged.append(layer)
    return damaged


def _is_intact(record: Record, slab: Slab, seed: int) -> bool:
    try:
        return not damaged_layers(record, slab, seed)
    except OSError:
        return False


def header_at(slab: Slab, seed: int, offset_bytes: int) -> Record | None:
    """The record whose sealed header stands there; `None` where none does that says so."""
    longest = header_bytes(b"\0" * MAX_KEY_BYTES, MAX_LAYERS)
    header = np.empty(min(longest, slab.size_bytes - offset_bytes), np.uint8)
    slab.read(offset_bytes, [header])
    record = unseal_record(header.tobytes(), seed)
    return record if record is not None and record.offset_bytes == offset_bytes else None
