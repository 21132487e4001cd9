"""Blocks as objects of a Mooncake Store: its calls and codes behind a few verbs."""

import errno
import threading
import time
from collections.abc import Sequence
from typing import Final, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.medium import (
    AlreadyHeldError,
    MediumError,
    MediumFullError,
    NotHeldError,
    Reservation,
    address,
)
from mooncake_lab.store.media.mooncake_master import MooncakeClient

_NO_ROOM: Final = -200
_NOT_READY: Final = -703
_NOT_FOUND: Final = -704
_EXISTS: Final = -705
_TRIES: Final = 3
_RETRY_S: Final = 0.05
_Arrays = Sequence[npt.NDArray[np.uint8]]


@final
class MooncakeObjects:
    """The objects of one model in a Mooncake Store. Mutable: it knows which are its own, and their put sessions.

    Its errors are those of a medium: `MediumFullError`, `AlreadyHeldError` when another client holds the name,
    `NotHeldError` when the store has the object no more, and `OSError` for everything else.
    """

    __slots__ = ("_client", "_getting", "_name", "_ours", "_prefix", "_sessions")

    def __init__(self, client: MooncakeClient, fingerprint: bytes, name: str) -> None:
        self._client = client
        self._name = name
        self._prefix = fingerprint.hex()
        self._ours: set[Reservation] = set()  # another client may hold the same name
        self._sessions: set[Reservation] = set()
        self._getting = threading.Lock()  # a get session belongs to a name, not to a thread

    def has(self, reservation: Reservation) -> bool:
        """Whether anything of it was put here."""
        return reservation in self._ours

    def put(self, reservation: Reservation, arrays: _Arrays) -> None:
        """Put a whole block."""
        name = self._object(reservation)
        if self._client.api.is_exist(name):  # Mooncake would say that it was put, and keep the other one's bytes
            raise self._error(_EXISTS, reservation)
        pointers, sizes = _runs(arrays)
        if len(sizes) == 1:
            code = self._client.api.put_from(name, pointers[0], sizes[0], self._client.pinned)
        else:
            places = [name], [pointers], [sizes]
            code = self._client.api.batch_put_from_multi_buffers(*places, self._client.pinned)[0]
        if code:
            raise self._error(code, reservation)
        self._ours.add(reservation)

    def put_layers(self, reservation: Reservation, arrays: _Arrays, first_layer: int) -> None:
        """Put layers into the session of a block, which the first ones open and `end` ends."""
        names = [self._object(reservation)]
        if reservation not in self._sessions:
            sizes = [reservation.size_bytes]
            code = self._client.api.batch_put_session_start(names, sizes, self._client.pinned)[0]
            if code:
                raise self._error(code, reservation)
            self._ours.add(reservation)
            self._sessions.add(reservation)
        places = _ranges(reservation, arrays, first_layer)
        moved = self._client.api.batch_put_from_multi_buffer_ranges(names, *places)[0]
        if moved < 0:
            raise self._error(moved, reservation)

    def end(self, reservations: Sequence[Reservation]) -> dict[Reservation, MediumError | OSError]:
        """End the sessions of blocks that have one; what went wrong with which. Those stay open, to be removed."""
        open_ = [reservation for reservation in reservations if reservation in self._sessions]
        codes = self._client.api.batch_put_session_end([self._object(r) for r in open_]) if open_ else []
        failed = {r: self._error(code, r) for r, code in zip(open_, codes, strict=True) if code}
        self._sessions.difference_update(r for r in open_ if r not in failed)
        return failed

    def get(self, reservation: Reservation, arrays: _Arrays) -> None:
        """Read a whole block."""
        name = self._object(reservation)
        pointers, sizes = _runs(arrays)
        if len(sizes) == 1:
            found = self._client.api.get_into(name, pointers[0], sizes[0])
        else:
            found = self._client.api.batch_get_into_multi_buffers([name], [pointers], [sizes])[0]
        if found < 0:
            raise self._error(found, reservation)

    def get_layers(self, reservation: Reservation, arrays: _Arrays, first_layer: int) -> None:
        """Read some layers of a block."""
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

    def remove(self, reservation: Reservation) -> None:
        """Take what was put here, or its open session, out of the store; what is gone already is fine.

        Raises:
            MediumError: when the store refuses; pinned as it is, the object would keep its name for ever.
        """
        if reservation not in self._ours:
            return
        name, code = self._object(reservation), 0
        for turn in range(_TRIES):
            time.sleep(_RETRY_S * turn)
            if reservation in self._sessions and not self._client.api.batch_put_session_revoke([name])[0]:
                break
            code = self._client.api.remove(name, True)  # by force, although it is pinned
            if code in (0, _NOT_FOUND):
                break
        else:
            raise MediumError(f"{self._name} cannot remove block {reservation.key.hex()}: Mooncake's code {code}")
        self._sessions.discard(reservation)
        self._ours.discard(reservation)

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
        pointer = address(array)
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
