"""Mooncake Store: blocks in the memory of Mooncake's own distributed store, behind the face of every medium."""

import errno
import threading
from collections.abc import Iterator, Sequence
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

    A reservation opens a put session, layers are written into it, a commit ends it. Objects are pinned in the
    store, so its master evicts none of them, whatever their lease; what a dead provider held cannot be read, and
    that is said. Mooncake has no checksums: each layer's is kept here, and verified on every read. Whole blocks
    are read in one call, single layers in a get session. Mutable: it holds the books of its blocks.

    Args:
        client: this process in the store; it stays its maker's to close.
        capacity_bytes: how much of the store this medium may hold.
        fingerprint: names the model; it begins every object's name.
        name: what statistics and messages call it.

    Raises:
        ValueError: when the capacity is not positive, or the fingerprint empty or too long.
    """

    __slots__ = ("_books", "_client", "_closed", "_getting", "_ledger", "_meter", "_name", "_prefix", "_sums")

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
        """Set room aside for a block, in the books and in the store; for its errors see `Medium.reserve`."""
        self._check_open()
        with self._books:
            reservation = self._ledger.reserve(key, layer_bytes, position, sum(layer_bytes))
        api = self._client.api
        code = api.batch_put_session_start(
            [self._object(reservation)], [reservation.size_bytes], self._client.pinned
        )[0]
        if code:
            self._forget(reservation)
            raise self._error(code, reservation)
        return reservation

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Write layers into the put session; for its errors see `Medium.write`."""
        arrays = check_run(reservation, layers, first_layer)
        with self._books:
            self._ledger.writable(reservation)
        places = [_pointers(arrays)], [_sizes(arrays)], [_offsets(reservation, first_layer, len(arrays))]
        with self._meter.writing(sum(places[1][0])):
            moved = self._client.api.batch_put_from_multi_buffer_ranges([self._object(reservation)], *places)[0]
        if moved < 0:
            raise self._error(moved, reservation)
        sums = self._checksums(reservation, arrays, first_layer)
        with self._books:
            self._ledger.wrote(reservation, first_layer, len(arrays))
            self._sums.setdefault(reservation, {}).update(sums)

    def commit(self, *reservations: Reservation) -> None:
        """End put sessions, so that the objects can be read; for its errors see `Medium.commit`."""
        with self._books:
            self._ledger.complete(reservations)
        codes = self._client.api.batch_put_session_end([self._object(r) for r in reservations])
        good = [r for r, code in zip(reservations, codes, strict=True) if code == 0]
        with self._books:
            self._ledger.commit(good)
        for reservation, code in zip(reservations, codes, strict=True):
            if code:
                raise self._error(code, reservation)

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Read layers and verify their checksums; for its errors see `Medium.read_into`."""
        arrays = check_run(reservation, buffers, first_layer, writable=True)
        with self._books:
            self._ledger.readable(reservation)
            sums = self._sums[reservation]
        with self._meter.reading(sum(_sizes(arrays))):
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
                was_committed = self._ledger.is_committed(reservation)
                if not was_committed:
                    self._ledger.writable(reservation)
            self._remove(reservation, was_committed=was_committed)  # before its name may be reserved again
            self._forget(reservation)

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
            held = [(r, True) for r in self._ledger.committed()] + [(r, False) for r in self._ledger.open()]
        for reservation, was_committed in held:
            self._remove(reservation, was_committed=was_committed)

    def _read_whole(self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]]) -> None:
        found = self._client.api.batch_get_into_multi_buffers(
            [self._object(reservation)], [_pointers(arrays)], [_sizes(arrays)]
        )[0]
        if found < 0:
            raise self._error(found, reservation)

    def _read_layers(
        self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]], first_layer: int
    ) -> None:
        names = [self._object(reservation)]
        places = [_pointers(arrays)], [_sizes(arrays)], [_offsets(reservation, first_layer, len(arrays))]
        with self._getting:
            code = self._client.api.batch_get_session_start(names)[0]
            if code < 0:
                raise self._error(code, reservation)
            found = self._client.api.batch_get_into_multi_buffer_ranges(names, *places)[0]
            self._client.api.batch_get_session_end(names)
        if found < 0:
            raise self._error(found, reservation)

    def _remove(self, reservation: Reservation, *, was_committed: bool) -> None:
        """What the store does not have any more needs no removing; without a master it goes with its provider."""
        if was_committed:
            self._client.api.remove(self._object(reservation), True)  # by force, although it is pinned
        else:
            self._client.api.batch_put_session_revoke([self._object(reservation)])

    def _forget(self, reservation: Reservation) -> None:
        with self._books:
            self._ledger.forget(reservation)
            self._ledger.extents.give(reservation.offset_bytes, reservation.size_bytes)
            self._sums.pop(reservation, None)

    def _checksums(
        self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]], first_layer: int
    ) -> dict[int, int]:
        seed = wire_seed(reservation.key)
        return {layer: checksum(array, seed) for layer, array in enumerate(arrays, first_layer)}

    def _object(self, reservation: Reservation) -> str:
        return f"{self._prefix}/{reservation.key.hex()}"

    def _check_open(self) -> None:
        if self._closed:
            raise MediumError(f"{self._name} is closed")

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


def _pointers(arrays: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
    return [array.__array_interface__["data"][0] for array in arrays]


def _sizes(arrays: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
    return [array.nbytes for array in arrays]


def _offsets(reservation: Reservation, first_layer: int, layers: int) -> list[int]:
    """Where layers begin in the object."""
    sizes = reservation.layer_bytes
    return [sum(sizes[:layer]) for layer in range(first_layer, first_layer + layers)]
