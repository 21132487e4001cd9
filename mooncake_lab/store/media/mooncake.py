"""Mooncake Store: blocks in the memory of Mooncake's own distributed store, behind the face of every medium."""

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.beside import beside
from mooncake_lab.store.media.extents import ExtentAllocator
from mooncake_lab.store.media.ledger import Ledger
from mooncake_lab.store.media.loans import wire_seed
from mooncake_lab.store.media.medium import (
    Bandwidth,
    Buffer,
    DamagedBlockError,
    MediumError,
    Reservation,
    check_run,
)
from mooncake_lab.store.media.meter import Meter
from mooncake_lab.store.media.mooncake_master import MooncakeClient
from mooncake_lab.store.media.mooncake_objects import MooncakeObjects
from mooncake_lab.store.media.record import checksums

_HELPERS: Final = 4
_LOG: Final = logging.getLogger(__name__)


@final
class MooncakeMedium:
    """Blocks of one model as objects of a Mooncake Store (FAST'25 §3).

    A block that is written whole is put in one call, while its checksums are taken; layers that come one by one go
    into a put session, which the commit ends. Whole blocks are read in one call, single layers in a get session.
    Objects are pinned in the store, so its master evicts none of them, whatever their lease; what a dead provider
    held cannot be read, and that is said. Mooncake has no checksums: each layer's is kept here, and verified on
    every read, unless it is told not to. Mutable: it holds the books of its blocks.

    That the store is full may only be found when a block is written, since others use it too.

    Args:
        client: this process in the store; it stays its maker's to close.
        capacity_bytes: how much of the store this medium may hold.
        fingerprint: names the model; it begins every object's name.
        name: what statistics and messages call it.
        checksums: whether to verify what is read; without, it is served as Mooncake gives it, right or wrong.

    Raises:
        ValueError: when the capacity is not positive, or the fingerprint empty or too long.
    """

    __slots__ = ("_books", "_checks", "_closed", "_helpers", "_ledger", "_meter", "_name", "_objects", "_sums")

    def __init__(
        self,
        client: MooncakeClient,
        capacity_bytes: int,
        *,
        fingerprint: bytes,
        name: str = "mooncake",
        checksums: bool = True,
    ) -> None:
        if not 0 < len(fingerprint) <= 64:
            raise ValueError(f"a model fingerprint of {len(fingerprint)} bytes; allowed are 1 to 64")
        self._objects = MooncakeObjects(client, fingerprint, name)
        self._checks = checksums
        self._name = name
        self._ledger = Ledger(name, ExtentAllocator(capacity_bytes, 1))
        self._sums: dict[Reservation, dict[int, int]] = {}
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="mooncake")  # they take checksums
        self._books = threading.Lock()
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
            is_whole = len(arrays) == len(reservation.layer_bytes) and not self._objects.has(reservation)
        with self._meter.writing(sum([array.nbytes for array in arrays])):
            if is_whole:
                put = partial(self._objects.put, reservation, arrays)
            else:
                put = partial(self._objects.put_layers, reservation, arrays, first_layer)
            if self._checks:
                sums, _ = beside(self._helpers, lambda: self._checksums(reservation, arrays), put)
            else:
                put()
                sums = []
        with self._books:
            self._ledger.wrote(reservation, first_layer, len(arrays))
            self._sums.setdefault(reservation, {}).update(enumerate(sums, first_layer))

    def commit(self, *reservations: Reservation) -> None:
        """End put sessions and let the blocks be read; for its errors see `Medium.commit`."""
        with self._books:
            self._ledger.complete(reservations)
        failed = self._objects.end(reservations)
        with self._books:
            self._ledger.commit([r for r in reservations if r not in failed])
        for error in failed.values():
            raise error

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Read layers and verify their checksums; for its errors see `Medium.read_into`."""
        arrays = check_run(reservation, buffers, first_layer, writable=True)
        with self._books:
            self._ledger.readable(reservation)
            sums = self._sums[reservation]
        with self._meter.reading(sum([array.nbytes for array in arrays])):
            if len(arrays) == len(reservation.layer_bytes):
                self._objects.get(reservation, arrays)
            else:
                self._objects.get_layers(reservation, arrays, first_layer)
            found = self._checksums(reservation, arrays) if self._checks else []
            for layer, checksum in enumerate(found, first_layer):
                if checksum != sums[layer]:
                    raise DamagedBlockError(
                        f"layer {layer} of block {reservation.key.hex()} of {self._name} is not what was written"
                    )

    def free(self, *reservations: Reservation) -> None:
        """Remove objects, and give up open sessions; for its errors see `Medium.free`."""
        for reservation in reservations:
            with self._books:
                if not self._ledger.is_committed(reservation):
                    self._ledger.writable(reservation)
            self._objects.remove(reservation)  # before its name may be reserved again
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
        self._helpers.shutdown()
        for number, reservation in enumerate(held):
            try:
                self._objects.remove(reservation)
            except MediumError as error:
                _LOG.warning("%s leaves %d blocks behind: %s", self._name, len(held) - number, error)
                return

    def _checksums(self, reservation: Reservation, arrays: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
        return checksums(arrays, wire_seed(reservation.key))
