"""The contract of storage backends: space is reserved, layers are written, a commit makes the block readable.

A backend only holds bytes, and never returns others than those written. It drops no committed block by itself,
because a `BlockStore` chooses what to evict; only a store that several clients share chooses for itself.
"""

import ctypes
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.net.wire import MAX_FINGERPRINT_BYTES, Bytes

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Contiguous memory; it must be writable where bytes are read into it."""

MAX_KEY_BYTES: Final = 128
MAX_LAYERS: Final = 512
_BYTE: Final = np.dtype(np.uint8)


class StorageError(Exception):
    """A backend could not do what it was asked; the message names the backend and the reason."""


class StorageFullError(StorageError):
    """No free run of bytes is long enough; nothing was reserved."""


class BlockNotFoundError(StorageError, LookupError):
    """The block was never committed here, or was freed."""


class BlockExistsError(StorageError, ValueError):
    """The key is reserved or held already; one key names one content, so there is nothing to write."""


class DamagedBlockError(StorageError):
    """The stored bytes are not those that were written; the block counts as a miss and must be freed."""


class SuspectBlockError(StorageError):
    """The device may have lost what was written of a block before its commit: free it and write it again."""


class FolderInUseError(StorageError):
    """Another process has the folder open."""


class Reservation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Space for one block: its key, the bytes of each layer, and its place in the backend."""

    key: bytes
    layer_bytes: tuple[int, ...]
    position: int = 0
    """Index of the block in its request, from 0."""
    offset_bytes: int = 0
    """Start of the block, in the backend's own address space."""
    sequence: int = 0
    """Grows with every reservation of a backend, so that a freed reservation never equals a new one."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all layers."""
        return sum(self.layer_bytes)


class StorageBackend(Protocol):
    """Storage for the bytes of KVCache blocks (DRAM, SSD, a remote node): FAST'25 §3, Fig. 3.

    Methods may be called from several threads. A failing device raises `OSError` or a `StorageError`. Runs of
    layers are given by `first_layer` and a number of layers.
    """

    @property
    def name(self) -> str:
        """Its name in statistics and messages."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether other clients store blocks in it, too, and it evicts by itself; `find` tells what it has."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """The bytes it may hold, padding included."""
        ...

    @property
    def used_bytes(self) -> int:
        """The bytes that are reserved or held, padding included."""
        ...

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes such a block occupies, padding included."""
        ...

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Reserve space for a block.

        Raises:
            StorageFullError: when no free run of bytes is long enough.
            BlockExistsError: when the key is reserved or held.
            ValueError: when the key or the layers are out of bounds.
        """
        ...

    def write_buffers(self, reservation: Reservation, first_layer: int, layers: int) -> list[Bytes]:
        """Buffers to fill with layers and then to pass to `write`, which copies as little as it can.

        Raises:
            BlockNotFoundError: when the reservation was freed or committed.
        """
        ...

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Write consecutive layers before the commit; the calls may come in any order.

        Raises:
            BlockNotFoundError: when the reservation was freed or committed.
            SuspectBlockError: when the device may have lost earlier writes of the block.
            ValueError: when a buffer does not have the bytes reserved for its layer.
        """
        ...

    def commit(self, *reservations: Reservation) -> None:
        """Make blocks readable, and durable where the backend is; a batch costs about as much as one block.

        Raises:
            SuspectBlockError: when the device may have lost writes of one of them; none is readable then.
            ValueError: when a layer of one of them is missing, or one comes twice; none is readable then.
        """
        ...

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Fill one buffer per layer.

        Raises:
            BlockNotFoundError: when the block is not committed.
            DamagedBlockError: when the bytes are not those that were written; the buffers are invalid then.
            ValueError: when a buffer does not have the bytes of its layer.
        """
        ...

    def read(self, reservation: Reservation, first_layer: int, layers: int) -> list[Bytes]:
        """Layers of a committed block, without a copy where the backend is memory; valid until it is freed.

        For its errors see `read_into`.
        """
        ...

    def free(self, *reservations: Reservation) -> None:
        """Release the space of blocks, committed or not.

        Raises:
            BlockNotFoundError: when one was freed before.
        """
        ...

    def blocks(self) -> Iterator[Reservation]:
        """The committed blocks, oldest first."""
        ...

    def find(self, keys: Iterable[bytes]) -> list[Reservation]:
        """The committed blocks that have one of these keys, in the order of the keys."""
        ...

    def close(self) -> None:
        """Release the device; durable blocks stay. Closing twice is allowed."""
        ...


class CopyingBackend:
    """`write_buffers` and `read` of a backend that is not memory itself: both need new buffers."""

    def write_buffers(self, reservation: Reservation, first_layer: int, layers: int) -> list[Bytes]:
        """New buffers for layers that are then passed to `write`."""
        sizes = reservation.layer_bytes[first_layer : first_layer + layers]
        return [np.empty(size, np.uint8) for size in sizes]

    def read(self: StorageBackend, reservation: Reservation, first_layer: int, layers: int) -> list[Bytes]:
        """Layers of a block in new buffers; for its errors see `StorageBackend.read_into`."""
        buffers = self.write_buffers(reservation, first_layer, layers)
        self.read_into(reservation, buffers, first_layer=first_layer)
        return buffers


def flat(buffer: Buffer, *, writable: bool = False) -> Bytes:
    """The memory of a buffer as bytes, shape (bytes,), without a copy."""
    if isinstance(buffer, np.ndarray) and buffer.dtype is _BYTE and buffer.ndim == 1:
        flags = buffer.flags  # the usual case, sixty times per block: no view is made
        if flags.c_contiguous and (not writable or flags.writeable):
            return buffer
    view = memoryview(buffer)  # pyright: ignore[reportArgumentType]  # arrays are buffers; 3.11 has no name for it
    if not view.c_contiguous or (writable and view.readonly):
        need = "contiguous and writable" if writable else "contiguous"
        raise ValueError(f"a buffer of {view.nbytes} bytes is not {need}; backends copy only such memory")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def layer_views(memory: Bytes, sizes: Iterable[int]) -> list[Bytes]:
    """Consecutive layers in memory, without a copy."""
    views: list[Bytes] = []
    start = 0
    for size in sizes:
        views.append(memory[start : start + size])
        start += size
    return views


def address(array: Bytes) -> int:
    """The address of its first byte; `array.ctypes` takes four times as long, and blocks have many layers."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # pyright: ignore[reportArgumentType]  # a buffer
    except TypeError:  # it is read-only
        return array.ctypes.data


def check_block(key: bytes, layer_bytes: Sequence[int]) -> None:
    """Refuse keys and layers that no backend holds."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes; allowed are 1 to {MAX_KEY_BYTES}")
    if not 0 < len(layer_bytes) <= MAX_LAYERS or min(layer_bytes) < 1:
        raise ValueError(
            f"block {key.hex()} has layers of {list(layer_bytes)[:4]} bytes; allowed are 1 to {MAX_LAYERS} layers"
            " of at least 1 byte"
        )


def checksum_seed(key: bytes) -> int:
    """The seed of a block's checksums, so that the bytes of another block never have them."""
    return int.from_bytes(key[-8:], "little")


def check_commit(commit: Iterable[tuple[Reservation, Collection[int]]]) -> None:
    """Refuse to commit a block twice at once, or without a layer.

    Args:
        commit: each block, and the layers that it lacks.
    """
    seen = set[Reservation]()
    for block, missing in commit:
        if block in seen:
            raise ValueError(f"block {block.key.hex()} comes twice in one commit; once is allowed")
        seen.add(block)
        if missing:
            raise ValueError(f"block {block.key.hex()} lacks layers {sorted(missing)[:8]}; all are needed")


def check_fingerprint(fingerprint: bytes) -> None:
    """Refuse names of models that no backend takes."""
    if not 0 < len(fingerprint) <= MAX_FINGERPRINT_BYTES:
        raise ValueError(
            f"a model fingerprint of {len(fingerprint)} bytes; allowed are 1 to {MAX_FINGERPRINT_BYTES}"
        )


def check_buffers(
    reservation: Reservation, buffers: Sequence[Buffer], first_layer: int, *, writable: bool = False
) -> list[Bytes]:
    """The buffers as flat bytes, if they are exactly the layers from `first_layer` on."""
    arrays = [flat(buffer, writable=writable) for buffer in buffers]
    given = tuple([array.nbytes for array in arrays])
    wanted = reservation.layer_bytes[first_layer : first_layer + len(given)]
    if not given or first_layer < 0 or given != wanted:
        raise ValueError(
            f"block {reservation.key.hex()}: buffers of {list(given[:4])} bytes from layer {first_layer} on;"
            f" it has {len(reservation.layer_bytes)} layers, there of {list(wanted[:4])} bytes"
        )
    return arrays
