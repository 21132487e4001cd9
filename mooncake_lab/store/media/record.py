"""The record of a committed block: what the index holds, and what stands before the payload in the slab.

One sealed form serves both, so that a lost index can be rebuilt from the slab. A seal is a checksum seeded by the
model's fingerprint: a block of another model never has a valid seal, whatever happened to its folder's name.
"""

import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from mooncake_lab.store.media.medium import Buffer, Reservation, flat

ALIGNMENT_BYTES: Final = 4096
"""Of extents, and of every layer in them: what O_DIRECT asks for, and a page."""
MAGIC: Final = b"MCLABKV1"
_SEAL: Final = struct.Struct("<8sIQ")  # magic, bytes of the body, checksum of the body
_FIXED_BYTES: Final = 96
_BYTES_A_LAYER: Final = 24


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A block's place and the checksum of each of its layers."""

    key: bytes
    layer_bytes: tuple[int, ...]
    checksums: tuple[int, ...]
    position: int
    offset_bytes: int
    sequence: int

    def reservation(self) -> Reservation:
        """The handle that media give out for it."""
        return Reservation(
            key=self.key,
            layer_bytes=self.layer_bytes,
            position=self.position,
            offset_bytes=self.offset_bytes,
            sequence=self.sequence,
        )


def record_of(reservation: Reservation, sums: Sequence[int]) -> Record:
    """The record of a reservation whose layers have these checksums."""
    return Record(
        key=reservation.key,
        layer_bytes=reservation.layer_bytes,
        checksums=tuple(sums),
        position=reservation.position,
        offset_bytes=reservation.offset_bytes,
        sequence=reservation.sequence,
    )


_DECODER: Final = msgspec.msgpack.Decoder(Record)


def seed_of(fingerprint: bytes) -> int:
    """The seed of every checksum of a model's blocks."""
    return xxhash.xxh3_64_intdigest(fingerprint)


def checksum(data: Buffer, seed: int) -> int:
    """The xxh3_64 of a layer."""
    return xxhash.xxh3_64_intdigest(flat(data), seed)  # pyright: ignore[reportArgumentType]  # any buffer does


def checksums(arrays: Sequence[npt.NDArray[np.uint8]], seed: int) -> list[int]:
    """The `checksum` of each layer, of flat bytes."""
    digest = cast("Callable[[npt.NDArray[np.uint8], int], int]", xxhash.xxh3_64_intdigest)  # any buffer does
    return [digest(array, seed) for array in arrays]


def runs(sizes: Sequence[int], most_bytes: int) -> Iterator[slice]:
    """Cut layers of these sizes into runs of at most so many bytes, or of one layer where it alone has more."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most_bytes:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def seal(body: bytes, seed: int) -> bytes:
    """A body with its magic, length and checksum in front."""
    return _SEAL.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body, seed)) + body


def unseal(sealed: bytes, seed: int) -> bytes | None:
    """The body, or `None` where one byte of it or of its seal is not what was written."""
    if len(sealed) < _SEAL.size:
        return None
    magic, length, digest = _SEAL.unpack_from(sealed)
    body = sealed[_SEAL.size : _SEAL.size + length]
    if magic != MAGIC or len(body) != length or xxhash.xxh3_64_intdigest(body, seed) != digest:
        return None
    return body


def seal_record(record: Record, seed: int) -> bytes:
    """A record, sealed."""
    return seal(msgspec.msgpack.encode(record), seed)


def unseal_record(sealed: bytes, seed: int) -> Record | None:
    """The record, or `None` where it is damaged."""
    body = unseal(sealed, seed)
    if body is None:
        return None
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError:
        return None


def padded(size_bytes: int) -> int:
    """The size rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def header_bytes(key: bytes, layers: int) -> int:
    """Bytes before the first layer of an extent."""
    return padded(_FIXED_BYTES + len(key) + _BYTES_A_LAYER * layers)


def header_pages(record: Record, seed: int) -> npt.NDArray[np.uint8]:
    """The sealed record in aligned pages of its own, to be written in front of the layers."""
    sealed = np.frombuffer(seal_record(record, seed), np.uint8)
    pages = np.frombuffer(mmap.mmap(-1, header_bytes(record.key, len(record.layer_bytes))), np.uint8)
    pages[: sealed.nbytes] = sealed
    return pages


def extent_bytes(key: bytes, layer_bytes: Sequence[int]) -> int:
    """Bytes of a block's extent: its header and its padded layers."""
    return header_bytes(key, len(layer_bytes)) + sum(padded(size) for size in layer_bytes)


def layer_offset(reservation: Reservation, layer: int) -> int:
    """Where a layer begins in the slab."""
    before = sum(padded(size) for size in reservation.layer_bytes[:layer])
    return reservation.offset_bytes + header_bytes(reservation.key, len(reservation.layer_bytes)) + before
