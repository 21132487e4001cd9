"""The records of committed blocks: sealed, in a log beside the slab and as a header before each block.

A seal is a checksum whose seed is the model's fingerprint: no block of another model ever has a valid one. The
same records are in both places, so that a lost index is rebuilt from the slab.
"""

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias, final

import msgspec
import xxhash

from mooncake_lab.store.backends.base import Reservation

Operation: TypeAlias = Literal["write", "read", "sync", "index"]
BeforeOperation: TypeAlias = Callable[[Operation], None]
"""Called before each device operation; it injects a fault by raising `OSError`."""

MAGIC: Final = b"MCLABKV2"
_HEAD: Final = struct.Struct("<8sI")  # magic, bytes of the body
_SUMS: Final = struct.Struct("<IQ")  # checksums of the head and of the body
SEAL_BYTES: Final = _HEAD.size + _SUMS.size
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_COMPACT_BYTES: Final = 16 * 1024**2


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A committed block and the checksum of each of its layers."""

    block: Reservation
    checksums: tuple[int, ...]


class _Change(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One commit: these keys left, then these blocks came."""

    drop: tuple[bytes, ...]
    put: tuple[Record, ...]


class _Opened(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The index was opened in this boot of the machine; the first entry."""

    boot_id: str


class _Closed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The index was synced and closed; the last entry."""


_Entry: TypeAlias = _Change | _Opened | _Closed
_ENTRIES: Final[msgspec.msgpack.Decoder[_Entry]] = msgspec.msgpack.Decoder(_Entry)
_RECORDS: Final = msgspec.msgpack.Decoder(Record)


def no_faults(_operation: Operation) -> None:
    """Let every operation happen."""


def seed_of(fingerprint: bytes) -> int:
    """The seed of every checksum of a model's blocks."""
    return xxhash.xxh3_64_intdigest(fingerprint)


def seal(body: bytes, seed: int) -> bytes:
    """A body after its magic, its length and the checksums of both."""
    head = _HEAD.pack(MAGIC, len(body))
    return head + _SUMS.pack(_head_sum(head, seed), xxhash.xxh3_64_intdigest(body, seed)) + body


def seal_record(record: Record, seed: int) -> bytes:
    """A sealed record, as it stands before its block."""
    return seal(msgspec.msgpack.encode(record), seed)


def unseal_record(sealed: bytes, seed: int) -> Record | None:
    """The record, or `None` where it is damaged."""
    body = _unseal(sealed, 0, seed)
    with contextlib.suppress(msgspec.DecodeError):
        return None if body is None else _RECORDS.decode(body)
    return None


@final
class Index:
    """The log of commits; an entry is appended whole or not at all, whenever the process is killed.

    It is synced when it is closed and when it is rewritten. A commit relies on the slab, which is synced and has
    every record, so an index that was open when the machine itself went down is not believed (see `read_index`).
    Mutable: it owns an open file.

    Args:
        path: of the log; a file that is there is replaced.
        seed: of the seals.
        records: the committed blocks.
        before: called before each change.
    """

    def __init__(
        self, path: Path, seed: int, records: Iterable[Record], before: BeforeOperation = no_faults
    ) -> None:
        self._path = path
        self._seed = seed
        self._before = before
        self._file = -1
        self.records: dict[bytes, Record] = {record.block.key: record for record in records}
        """The committed blocks by key."""
        self._rewrite()

    def change(self, drop: Sequence[bytes], put: Sequence[Record]) -> None:
        """Drop keys, then hold records."""
        self._before("index")
        self._append(_Change(tuple(drop), tuple(put)))
        _apply(self.records, drop, put)
        if self._end > self._compact_at:
            with contextlib.suppress(OSError):  # the long log is as good as a short one
                self._rewrite()

    def close(self) -> None:
        """Sync and close the log; where that fails, the next process to open it searches the slab as well."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            os.fsync(self._file)
            self._append(_Closed())
            os.fsync(self._file)
        os.close(self._file)
        self._file = -1

    def _append(self, entry: _Entry) -> None:
        data = memoryview(seal(msgspec.msgpack.encode(entry), self._seed))
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end += written

    def _rewrite(self) -> None:
        """Replace the log by one that only has the live records."""
        fresh = self._path.with_name("index.new")
        body = bytearray(seal(msgspec.msgpack.encode(_Opened(_boot_id())), self._seed))
        for record in self.records.values():  # one entry each: a damaged byte costs one record
            body += seal(msgspec.msgpack.encode(_Change((), (record,))), self._seed)
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with open(file, "wb", closefd=False) as log:  # a descriptor, not a path
                log.write(body)
            os.fsync(file)
            fresh.replace(self._path)
            _sync_folder(self._path.parent)
        except BaseException:
            os.close(file)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._end = file, len(body)
        self._compact_at = 2 * len(body) + _COMPACT_BYTES


def read_index(path: Path, seed: int) -> tuple[dict[bytes, Record], bool]:
    """The readable records by key, and whether they are certainly all that were committed.

    They are when no entry is damaged, and the log was closed or has only been written in this boot of the machine.
    An unfinished last entry belongs to a commit that never returned.
    """
    records: dict[bytes, Record] = {}
    if not path.exists():
        return records, False
    opened_in, last = "", None
    is_intact = True
    for entry in _entries(path.read_bytes(), seed):
        last = entry
        match entry:
            case _Change():
                _apply(records, entry.drop, entry.put)
            case _Opened():
                opened_in = entry.boot_id
            case None:
                is_intact = False
            case _Closed():
                pass
    is_of_this_boot = opened_in == _boot_id() != "unknown"
    return records, is_intact and bool(opened_in) and (isinstance(last, _Closed) or is_of_this_boot)


def _entries(log: bytes, seed: int) -> Iterator[_Entry | None]:
    """The entries of a log, `None` for damaged ones; after a damaged length the next entry is searched."""
    at = 0
    while 0 <= at <= len(log) - SEAL_BYTES:
        length = _length(log, at, seed)
        if length is None:
            yield None
            at = log.find(MAGIC, at + 1)
            continue
        if at + SEAL_BYTES + length > len(log):
            return  # unfinished
        body = _unseal(log, at, seed)
        yield None if body is None else _ENTRIES.decode(body)
        at += SEAL_BYTES + length


def _length(sealed: bytes, at: int, seed: int) -> int | None:
    """The length of a sealed body, `None` where the head is damaged."""
    head = sealed[at : at + _HEAD.size]
    magic, length = _HEAD.unpack(head)
    told, _ = _SUMS.unpack_from(sealed, at + _HEAD.size)
    return int(length) if magic == MAGIC and told == _head_sum(head, seed) else None


def _unseal(sealed: bytes, at: int, seed: int) -> bytes | None:
    """The body, `None` where a byte of it or of its seal is not what was written."""
    length = _length(sealed, at, seed) if at + SEAL_BYTES <= len(sealed) else None
    if length is None:
        return None
    body = sealed[at + SEAL_BYTES : at + SEAL_BYTES + length]
    _, told = _SUMS.unpack_from(sealed, at + _HEAD.size)
    return body if len(body) == length and xxhash.xxh3_64_intdigest(body, seed) == told else None


def _head_sum(head: bytes, seed: int) -> int:
    return xxhash.xxh32_intdigest(head, seed & 0xFFFF_FFFF)


def _apply(records: dict[bytes, Record], drop: Iterable[bytes], put: Iterable[Record]) -> None:
    for key in drop:
        records.pop(key, None)
    for record in put:
        records[record.block.key] = record


def _boot_id() -> str:
    """Changes when the machine boots; always the same where the system does not tell."""
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else "unknown"


def _sync_folder(folder: Path) -> None:
    """Make renamed files in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
