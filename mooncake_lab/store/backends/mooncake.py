"""Mooncake Store: blocks in the memory of Mooncake's own distributed store."""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, final

from mooncake_lab.store.backends.allocation import AllocatedBackend
from mooncake_lab.store.backends.base import (
    Buffer,
    Bytes,
    CopyingBackend,
    DamagedBlockError,
    Reservation,
    StorageError,
    address,
    check_buffers,
    check_fingerprint,
)
from mooncake_lab.store.backends.checksums import checksum_seed, checksums, run_concurrently
from mooncake_lab.store.backends.mooncake_client import EXISTS, NOT_FOUND, MooncakeClient, error_of

_LOG: Final = logging.getLogger(__name__)
_HELPERS: Final = 4
_TRIES: Final = 3
_RETRY_S: Final = 0.05


@final
class MooncakeBackend(CopyingBackend, AllocatedBackend):
    """Blocks of one model as objects of a Mooncake Store (FAST'25 §3).

    A block that is written whole is put in one call, while its checksums are taken; layers that come one by one
    go into a put session, which the commit ends. Whole blocks are read in one call, single layers in a get
    session. Objects are pinned, so the master never evicts them; what a failed provider held cannot be read.
    Mooncake has no checksums: they are kept here and verified on every read. Mutable.

    The store may turn out to be full when a block is written, since other clients use it, too.

    Args:
        client: this process in the store; it stays open.
        capacity_bytes: how much of the store this backend may hold.
        fingerprint: names the model; it begins every object's name.
        name: its name in statistics and messages.
        checksums: whether to verify reads; without, bytes are served as Mooncake returns them.

    Raises:
        ValueError: when the capacity is not positive, or the fingerprint empty or too long.
    """

    is_shared = True

    def __init__(
        self,
        client: MooncakeClient,
        capacity_bytes: int,
        *,
        fingerprint: bytes,
        name: str = "mooncake",
        checksums: bool = True,
    ) -> None:
        check_fingerprint(fingerprint)
        super().__init__(name, capacity_bytes, 1)
        self._client = client
        self._api = client.api
        self._prefix = fingerprint.hex()
        self._checks = checksums
        self._sums: dict[Reservation, dict[int, int]] = {}
        self._ours: set[Reservation] = set()  # what was put: another client may hold the same name
        self._sessions: set[Reservation] = set()  # of these, the open put sessions
        self._getting = threading.Lock()  # a get session belongs to a name, not to a thread
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="mooncake")  # they take checksums
        self._closed = False

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes of the layers; what Mooncake's allocator adds is not known here."""
        del key
        return sum(layer_bytes)

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Reserve part of the capacity for a block; for its errors see `StorageBackend.reserve`."""
        if self._closed:
            raise StorageError(f"{self.name} is closed")
        return self._table.reserve(key, layer_bytes, position, sum(layer_bytes))

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Put a whole block, or layers into its put session; for its errors see `StorageBackend.write`.

        Raises:
            StorageFullError: when the store has no space.
            BlockExistsError: when another client holds a block of this name.
        """
        arrays = check_buffers(reservation, layers, first_layer)
        self._table.check_open(reservation)
        if len(arrays) == len(reservation.layer_bytes) and reservation not in self._ours:
            put = partial(self._put, reservation, arrays)
        else:
            put = partial(self._put_layers, reservation, arrays, first_layer)
        sums: list[int] = []
        if self._checks:
            seed = checksum_seed(reservation.key)
            sums, _ = run_concurrently(self._helpers, lambda: checksums(arrays, seed), put)
        else:
            put()
        with self._table.lock:
            self._table.written(reservation, first_layer, len(arrays))
            self._sums.setdefault(reservation, {}).update(enumerate(sums, first_layer))

    def commit(self, *reservations: Reservation) -> None:
        """End put sessions and let the blocks be read; for its errors see `StorageBackend.commit`."""
        self._table.check_complete(reservations)
        open_ = [reservation for reservation in reservations if reservation in self._sessions]
        codes = self._api.batch_put_session_end([self._object(block) for block in open_]) if open_ else []
        failed = {
            block: error_of(code, self.name, block) for block, code in zip(open_, codes, strict=True) if code
        }
        self._sessions.difference_update(block for block in open_ if block not in failed)
        self._table.commit([block for block in reservations if block not in failed])
        for error in failed.values():
            raise error

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Read layers and verify their checksums; for its errors see `StorageBackend.read_into`."""
        arrays = check_buffers(reservation, buffers, first_layer, writable=True)
        with self._table.lock:
            self._table.check_committed(reservation)
            sums = self._sums[reservation]
        if len(arrays) == len(reservation.layer_bytes):
            self._get(reservation, arrays)
        else:
            self._get_layers(reservation, arrays, first_layer)
        found = checksums(arrays, checksum_seed(reservation.key)) if self._checks else []
        for layer, checksum in enumerate(found, first_layer):
            if checksum != sums[layer]:
                raise DamagedBlockError(
                    f"layer {layer} of block {reservation.key.hex()} of {self.name} is not what was written"
                )

    def free(self, *reservations: Reservation) -> None:
        """Remove objects and revoke open sessions; for its errors see `StorageBackend.free`."""
        for reservation in reservations:
            if not self._table.is_committed(reservation):
                self._table.check_open(reservation)
            self._remove(reservation)  # before its name may be reserved again
            with self._table.lock:
                self._table.free([reservation])
                self._sums.pop(reservation, None)

    def close(self) -> None:
        """Remove its objects from the store: they are memory, and no other client knows what they are."""
        if self._closed:
            return
        self._closed = True
        held = [*self._table.committed(), *self._table.open_blocks()]
        self._helpers.shutdown()
        for number, reservation in enumerate(held):
            try:
                self._remove(reservation)
            except StorageError as error:
                _LOG.warning("%s leaves %d blocks behind: %s", self.name, len(held) - number, error)
                return

    def _put(self, block: Reservation, arrays: Sequence[Bytes]) -> None:
        name = self._object(block)
        if self._api.is_exist(name):  # Mooncake would report success and keep the other client's bytes
            raise error_of(EXISTS, self.name, block)
        pointers, sizes = _spans(arrays)
        if len(sizes) == 1:
            code = self._api.put_from(name, pointers[0], sizes[0], self._client.pinned)
        else:
            code = self._api.batch_put_from_multi_buffers([name], [pointers], [sizes], self._client.pinned)[0]
        if code:
            raise error_of(code, self.name, block)
        self._ours.add(block)

    def _put_layers(self, block: Reservation, arrays: Sequence[Bytes], first_layer: int) -> None:
        """Put layers into the put session of a block, which the first call opens."""
        names = [self._object(block)]
        if block not in self._sessions:
            code = self._api.batch_put_session_start(names, [block.size_bytes], self._client.pinned)[0]
            if code:
                raise error_of(code, self.name, block)
            self._ours.add(block)
            self._sessions.add(block)
        places = _ranges(block, arrays, first_layer)
        moved = self._api.batch_put_from_multi_buffer_ranges(names, *places)[0]
        if moved < 0:
            raise error_of(moved, self.name, block)

    def _get(self, block: Reservation, arrays: Sequence[Bytes]) -> None:
        name = self._object(block)
        pointers, sizes = _spans(arrays)
        if len(sizes) == 1:
            found = self._api.get_into(name, pointers[0], sizes[0])
        else:
            found = self._api.batch_get_into_multi_buffers([name], [pointers], [sizes])[0]
        if found < 0:
            raise error_of(found, self.name, block)

    def _get_layers(self, block: Reservation, arrays: Sequence[Bytes], first_layer: int) -> None:
        names = [self._object(block)]
        places = _ranges(block, arrays, first_layer)
        with self._getting:
            code = self._api.batch_get_session_start(names)[0]
            if code < 0:
                raise error_of(code, self.name, block)
            found = self._api.batch_get_into_multi_buffer_ranges(names, *places)[0]
            self._api.batch_get_session_end(names)
        if found < 0:
            raise error_of(found, self.name, block)

    def _remove(self, block: Reservation) -> None:
        """Remove what was put, or revoke its put session; an object that is gone already is no error.

        Raises:
            StorageError: when the store refuses; pinned as it is, the object would keep its name.
        """
        if block not in self._ours:
            return
        name, code = self._object(block), 0
        for attempt in range(_TRIES):
            time.sleep(_RETRY_S * attempt)
            if block in self._sessions and not self._api.batch_put_session_revoke([name])[0]:
                break
            code = self._api.remove(name, True)  # by force, although it is pinned
            if code in (0, NOT_FOUND):
                break
        else:
            raise StorageError(f"{self.name} cannot remove block {block.key.hex()}: Mooncake's code {code}")
        self._sessions.discard(block)
        self._ours.discard(block)

    def _object(self, block: Reservation) -> str:
        return f"{self._prefix}/{block.key.hex()}"


def _spans(arrays: Sequence[Bytes]) -> tuple[list[int], list[int]]:
    """The addresses and bytes of layers; layers that are adjacent in memory are one transfer."""
    pointers: list[int] = []
    sizes: list[int] = []
    for array in arrays:
        pointer = address(array)
        if pointers and pointers[-1] + sizes[-1] == pointer:
            sizes[-1] += array.nbytes
        else:
            pointers.append(pointer)
            sizes.append(array.nbytes)
    return pointers, sizes


def _ranges(
    block: Reservation, arrays: Sequence[Bytes], first_layer: int
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The spans of consecutive layers, and the offset of each in the object; for one object."""
    pointers, sizes = _spans(arrays)
    start = sum(block.layer_bytes[:first_layer])
    return [pointers], [sizes], [[start + sum(sizes[:span]) for span in range(len(sizes))]]
