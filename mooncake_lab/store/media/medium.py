"""What every medium promises: room is reserved, layers are written, a commit makes the block readable.

A medium is where bytes live, and nothing else: it does not choose who leaves (a `BlockStore` does), it never
drops a committed block on its own, and it never returns bytes other than those written.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Contiguous memory; what is read into must be writable."""

MAX_KEY_BYTES: Final = 128
MAX_LAYERS: Final = 512
_BYTE: Final = np.dtype(np.uint8)


class MediumError(Exception):
    """A medium could not do what it was asked; the message says which one and why."""


class MediumFullError(MediumError):
    """No run of free bytes is long enough; nothing was reserved."""


class NotHeldError(MediumError, LookupError):
    """The block was never committed here, or was freed."""


class AlreadyHeldError(MediumError, ValueError):
    """The key is reserved or held already; one key names one content, so there is nothing to write."""


class DamagedBlockError(MediumError):
    """What is stored is not what was written; the block must be treated as a miss, and freed."""


class DoubtfulBlockError(MediumError):
    """The device may have lost what was written of a block before its commit: free it, and write it anew."""


class FolderInUseError(MediumError):
    """Another process has the folder open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Room for one block: its name, the bytes of each of its layers, and where the medium put it."""

    key: bytes
    layer_bytes: tuple[int, ...]
    position: int = 0
    """Which block of its request it is, from 0."""
    offset_bytes: int = 0
    """Where it begins, in the medium's own terms."""
    sequence: int = 0
    """Grows with every reservation of a medium, so that a freed reservation is never mistaken for a new one."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all layers."""
        return sum(self.layer_bytes)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What a medium measured of itself, smoothed over its latest transfers; `None` before the first one."""

    read_bytes_per_s: float | None
    write_bytes_per_s: float | None


class Medium(Protocol):
    """Where the bytes of KVCache blocks live (DRAM, SSD, a remote node): FAST'25 §3, Fig. 3.

    Methods may be called from several threads. A failing device raises `OSError` or a `MediumError`.
    """

    @property
    def name(self) -> str:
        """What statistics and messages call it."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """The bytes it may hold, padding included."""
        ...

    @property
    def used_bytes(self) -> int:
        """The bytes reserved or held now, padding included."""
        ...

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes such a block takes here, padding included."""
        ...

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Set room aside for a block.

        Raises:
            MediumFullError: when no free run of bytes is long enough.
            AlreadyHeldError: when the key is reserved or held.
            ValueError: when the key or the layers are out of bounds.
        """
        ...

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Write consecutive layers, starting with `first_layer`, in any order of calls, before the commit.

        Raises:
            NotHeldError: when the reservation was freed or committed.
            DoubtfulBlockError: when what was written of the block before may be lost.
            ValueError: when a buffer has not the bytes that were reserved for its layer.
        """
        ...

    def commit(self, *reservations: Reservation) -> None:
        """Make blocks readable, and durable where the medium is; together they cost about as much as one.

        Raises:
            DoubtfulBlockError: when what was written of one of them may be lost; none is readable then.
            ValueError: when a layer of one of them was not written, or one comes twice; none is readable then.
        """
        ...

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Fill one buffer a layer, starting with `first_layer`; a single layer is a list of one.

        Raises:
            NotHeldError: when the block is not committed.
            DamagedBlockError: when the bytes are not those that were written; the buffers hold nothing of use.
            ValueError: when a buffer has not the bytes of its layer.
        """
        ...

    def free(self, *reservations: Reservation) -> None:
        """Give the room of blocks back, committed or not.

        Raises:
            NotHeldError: when one was freed before.
        """
        ...

    def blocks(self) -> Iterator[Reservation]:
        """The committed blocks, oldest first."""
        ...

    def bandwidth(self) -> Bandwidth:
        """Its own estimate of how fast it is."""
        ...

    def close(self) -> None:
        """Let go of the device; what is durable stays. Closing twice is fine."""
        ...


def flat(buffer: Buffer, *, writable: bool = False) -> npt.NDArray[np.uint8]:
    """The memory of a buffer as bytes, shape (bytes,), without a copy.

    Raises:
        ValueError: when it is not contiguous, or read-only where bytes must be written.
    """
    if isinstance(buffer, np.ndarray) and buffer.dtype is _BYTE and buffer.ndim == 1:
        flags = buffer.flags  # the usual case, sixty times a block: no view is made, no types are compared
        if flags.c_contiguous and (not writable or flags.writeable):
            return buffer
    view = memoryview(buffer)  # pyright: ignore[reportArgumentType]  # arrays are buffers; 3.11 has no name for it
    if not view.c_contiguous or (writable and view.readonly):
        need = "contiguous and writable" if writable else "contiguous"
        raise ValueError(f"a buffer of {view.nbytes} bytes is not {need}; media copy only such memory")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def address(array: npt.NDArray[np.uint8]) -> int:
    """Where its first byte lies; NumPy tells the same in four times as long, and layers are many."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # pyright: ignore[reportArgumentType]  # a buffer
    except TypeError:  # it is read-only
        return array.ctypes.data


def check_block(key: bytes, layer_bytes: Sequence[int]) -> None:
    """Refuse keys and layers that no medium holds.

    Raises:
        ValueError: when the key is empty or too long, or there are no layers, too many, or an empty one.
    """
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes; allowed are 1 to {MAX_KEY_BYTES}")
    if not 0 < len(layer_bytes) <= MAX_LAYERS or min(layer_bytes) < 1:
        raise ValueError(
            f"block {key.hex()} has layers of {list(layer_bytes)[:4]} bytes; allowed are 1 to {MAX_LAYERS} layers"
            " of at least 1 byte"
        )


def check_run(
    reservation: Reservation, buffers: Sequence[Buffer], first_layer: int, *, writable: bool = False
) -> list[npt.NDArray[np.uint8]]:
    """The buffers as flat bytes, when they are exactly the layers from `first_layer` on.

    Raises:
        ValueError: when they are not.
    """
    arrays = [flat(buffer, writable=writable) for buffer in buffers]
    given = tuple([array.nbytes for array in arrays])
    wanted = reservation.layer_bytes[first_layer : first_layer + len(given)]
    if not given or first_layer < 0 or given != wanted:
        raise ValueError(
            f"block {reservation.key.hex()}: buffers of {list(given[:4])} bytes from layer {first_layer} on;"
            f" it has {len(reservation.layer_bytes)} layers, there of {list(wanted[:4])} bytes"
        )
    return arrays
