"""Mooncake Store: blocks in the memory of Mooncake's own distributed store, behind the face of every medium."""

import errno
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.extents import ExtentAllocator
from mooncake_lab.store.media.ledger import Ledger
from mooncake_lab.store.media.loans import wire_seed
from mooncake_lab.store.media.medium import (
    AlreadyHeldError,
    Bandwidth,
    Buffer,
    DamagedBlockError,
    MediumError,
    MediumFullError,
    NotHeldError,
    Reservation,
    check_run,
)
from mooncake_lab.store.media.meter import Meter
from mooncake_lab.store.media.mooncake_master import MooncakeClient
from mooncake_lab.store.media.record import checksum

_NO_ROOM: Final = -200
_NOT_READY: Final = -703
_NOT_FOUND: Final = -704
_EXISTS: Final = -705


@final
class MooncakeMedium:
    """Blocks of one model as objects of a Mooncake Store (FAST'25 §3).

    A block that is written whole is put in one call, while its checksums are taken; layers that come one by one go
    into a put session, which the commit ends. Whole blocks are read in one call, single layers in a get session.
    Objects are pinned in the store, so its master evicts none of them, whatever their lease; what a dead provider
    held cannot be read, and that is said. Mooncake has no checksums: each layer's is kept here, and verified on
    every read. Mutable: it holds the books of its blocks.

    That the store is full may only be found when a block is written, since others use it too.

    Args:
        client: this process in the store; it stays its maker's to close.
        capacity_bytes: how much of the store this medium may hold.
        fingerprint: names the model; it begins every object's name.
        name: what statistics and messages call it.

    Raises:
        ValueError: when the capacity is not positive, or the fingerprint empty or too long.
    """

    __slots__ = (
        "_books", "_client", "_closed", "_getting", "_ledger", "_meter", "_name", "_prefix", "_putter",
        "_sessions", "_sums",
    )  # fmt: skip

    def __init__(
        self, client: MooncakeClient, capacity_bytes: int, *, fingerprint: bytes, name: str = "mooncake"
    ) -> None:
        if not 0 < len(fingerprint) <= 64:
            raise ValueError(f"a model fingerprint of {len(fingerprint)} bytes; allowed are 1 to 64")
        self._client = client
        self._name = name
        self._prefix = fingerprint.hex()
        self._ledger = Ledger(name, ExtentAllocator(capacity_bytes, 1))
        self._sums: dict[Reservation, dict[int, int]] = {}
        self._sessions: set[Reservation] = set()  # open ones
        self._putter = ThreadPoolExecutor(1, thread_name_prefix="mooncake-put")  # checksums are taken meanwhile
        self._books = threading.Lock()
        self._getting = threading.Lock()  # a get session belongs to a name, not to a thread
        self._meter = Meter()
        self._closed = False

    @property
    def name(self) -> str:
        """What statistics and messages call it."""
        return self._name

    @property
    def capacity_bytes(self) -> int:
        """The bytes it may hold."""
        return self._ledger.extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes reserved or held now."""
        return self._ledger.extents.used_bytes

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes of the layers; what Mooncake's allocator adds is not known here."""
        del key
        return sum(layer_bytes)

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Set room aside for a block in the books; for its errors see `Medium.reserve`."""
        if self._closed:
            raise MediumError(f"{self._name} is closed")
        with self._books:
            return self._ledger.reserve(key, layer_bytes, position, sum(layer_bytes))

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Put a whole block, or layers into its put session; for its errors see `Medium.write`.

        Raises:
            MediumFullError: when the store has no room.
            AlreadyHeldError: when another client holds a block of this name.
        """
        arrays = check_run(reservation, layers, first_layer)
        with self._books:
            self._ledger.writable(reservation)
            is_whole = len(arrays) == len(reservation.layer_bytes) and reservation not in self._sums
        with self._meter.writing(sum(array.nbytes for array in arrays)):
            if is_whole:
                putting = self._putter.submit(self._put_whole, reservation, arrays)
            else:
                putting = self._putter.submit(self._put_layers, reservation, arrays, first_layer)
            sums = self._checksums(reservation, arrays, first_layer)
            putting.result()
        with self._books:
            self._ledger.wrote(reservation, first_layer, len(arrays))
            self._sums.setdefault(reservation, {}).update(sums)

    def commit(self, *reservations: Reservation) -> None:
        """End put sessions and let the blocks be read; for its errors see `Medium.commit`."""
        with self._books:
            self._ledger.complete(reservations)
            open_ = [reservation for reservation in reservations if reservation in self._sessions]
        codes = self._client.api.batch_put_session_end([self._object(r) for r in open_]) if open_ else []
        failed = [(r, code) for r, code in zip(open_, codes, strict=True) if code]
        with self._books:
            self._sessions.difference_update(open_)
            self._ledger.commit([r for r in reservations if r not in dict(failed)])
        for reservation, code in failed:
            raise self._error(code, reservation)

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Read layers and verify their checksums; for its errors see `Medium.read_into`."""
        arrays = check_run(reservation, buffers, first_layer, writable=True)
        with self._books:
            self._ledger.readable(reservation)
            sums = self._sums[reservation]
        with self._meter.reading(sum(array.nbytes for array in arrays)):
            if len(arrays) == len(reservation.layer_bytes):
                self._read_whole(reservation, arrays)
            else:
                self._read_layers(reservation, arrays, first_layer)
            for layer, found in self._checksums(reservation, arrays, first_layer).items():
                if found != sums[layer]:
                    raise DamagedBlockError(
                        f"layer {layer} of block {reservation.key.hex()} of {self._name} is not what was written"
                    )

    def free(self, *reservations: Reservation) -> None:
        """Remove objects, and give up open sessions; for its errors see `Medium.free`."""
        for reservation in reservations:
            with self._books:
                if not self._ledger.is_committed(reservation):
                    self._ledger.writable(reservation)
            self._remove(reservation)  # before its name may be reserved again
            with self._books:
                self._ledger.forget(reservation)
                self._ledger.extents.give(reservation.offset_bytes, reservation.size_bytes)
                self._sums.pop(reservation, None)

    def blocks(self) -> Iterator[Reservation]:
        """The committed blocks, oldest first."""
        with self._books:
            return self._ledger.committed()

    def bandwidth(self) -> Bandwidth:
        """Its own estimate of how fast it is."""
        return self._meter.bandwidth()

    def close(self) -> None:
        """Take its objects out of the store: they are memory, and nobody else knows what they are."""
        if self._closed:
            return
        self._closed = True
        with self._books:
            held = [*self._ledger.committed(), *self._ledger.open()]
        self._putter.shutdown()
        for reservation in held:
            self._remove(reservation)

    def _read_whole(self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]]) -> None:
        found = self._client.api.batch_get_into_multi_buffers(
            [self._object(reservation)], *([part] for part in _runs(arrays))
        )[0]
        if found < 0:
            raise self._error(found, reservation)

    def _read_layers(
        self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]], first_layer: int
    ) -> None:
        names = [self._object(reservation)]
        places = _ranges(reservation, arrays, first_layer)
        with self._getting:
            code = self._client.api.batch_get_session_start(names)[0]
            if code < 0:
                raise self._error(code, reservation)
            found = self._client.api.batch_get_into_multi_buffer_ranges(names, *places)[0]
            self._client.api.batch_get_session_end(names)
        if found < 0:
            raise self._error(found, reservation)

    def _put_whole(self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]]) -> None:
        name = self._object(reservation)
        if self._client.api.is_exist(name):  # Mooncake would say that it was put, and keep the other one's bytes
            raise self._error(_EXISTS, reservation)
        code = self._client.api.batch_put_from_multi_buffers(
            [name], *([part] for part in _runs(arrays)), self._client.pinned
        )[0]
        if code:
            raise self._error(code, reservation)

    def _put_layers(
        self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]], first_layer: int
    ) -> None:
        names = [self._object(reservation)]
        places = _ranges(reservation, arrays, first_layer)
        if reservation not in self._sessions:
            code = self._client.api.batch_put_session_start(names, [reservation.size_bytes], self._client.pinned)[
                0
            ]
            if code:
                raise self._error(code, reservation)
            self._sessions.add(reservation)
        moved = self._client.api.batch_put_from_multi_buffer_ranges(names, *places)[0]
        if moved < 0:
            raise self._error(moved, reservation)

    def _remove(self, reservation: Reservation) -> None:
        """What the store does not have any more needs no removing; without a master it goes with its provider."""
        if reservation in self._sessions:
            self._client.api.batch_put_session_revoke([self._object(reservation)])
            self._sessions.discard(reservation)
        elif reservation in self._sums:
            self._client.api.remove(self._object(reservation), True)  # by force, although it is pinned

    def _checksums(
        self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]], first_layer: int
    ) -> dict[int, int]:
        seed = wire_seed(reservation.key)
        return {layer: checksum(array, seed) for layer, array in enumerate(arrays, first_layer)}

    def _object(self, reservation: Reservation) -> str:
        return f"{self._prefix}/{reservation.key.hex()}"

    def _error(self, code: int, reservation: Reservation) -> MediumError | OSError:
        """Mooncake's code as what a medium raises."""
        block = f"block {reservation.key.hex()}"
        if code == _NO_ROOM:
            return MediumFullError(f"{self._name} has no room for {block} of {reservation.size_bytes} bytes")
        if code == _EXISTS:
            return AlreadyHeldError(f"another client holds {block} in {self._name} already")
        if code in (_NOT_FOUND, _NOT_READY):
            return NotHeldError(f"{self._name} has {block} no more: its provider is gone, or it was removed")
        return OSError(errno.EIO, f"{self._name} cannot move {block}: Mooncake's code {code}")


def _runs(arrays: Sequence[npt.NDArray[np.uint8]]) -> tuple[list[int], list[int]]:
    """Where layers lie in memory and their bytes; those that lie behind each other are one run, one transfer."""
    pointers: list[int] = []
    sizes: list[int] = []
    for array in arrays:
        pointer: int = array.__array_interface__["data"][0]
        if pointers and pointers[-1] + sizes[-1] == pointer:
            sizes[-1] += array.nbytes
        else:
            pointers.append(pointer)
            sizes.append(array.nbytes)
    return pointers, sizes


def _ranges(
    reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]], first_layer: int
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The runs of consecutive layers, and where in the object each begins; for one object."""
    pointers, sizes = _runs(arrays)
    start = sum(reservation.layer_bytes[:first_layer])
    return [pointers], [sizes], [[start + sum(sizes[:run]) for run in range(len(sizes))]]
