"""Mooncake Store as a pool: whole blocks that every client finds, each with its checksums behind it."""

import contextlib
import errno
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, final

import numpy as np

from mooncake_lab.store.backends.base import (
    BlockExistsError,
    BlockNotFoundError,
    Buffer,
    Bytes,
    CopyingBackend,
    DamagedBlockError,
    Reservation,
    check_block,
    check_buffers,
    check_fingerprint,
)
from mooncake_lab.store.backends.checksums import checksum_seed, checksums
from mooncake_lab.store.backends.mooncake_client import MooncakeClient, error_of, load_wheel

_SUM_BYTES: Final = 8


@final
class MooncakePool(CopyingBackend):
    """Blocks of one model and one size in a Mooncake Store that several processes use (FAST'25 §3).

    A block is one object: its layers, then the checksum of each. Any client finds it by its key, and the master
    evicts the least recently used objects when the store is full. Layers are gathered in memory of this process
    until the commit, and a read of some layers reads the whole object. Mutable.

    Args:
        client: this process in the store; it is closed with the pool.
        capacity_bytes: how much of the store this client may count as in use.
        layer_bytes: of every block.
        fingerprint: names the model; it begins every object's name.
        name: its name in statistics and messages.

    Raises:
        ValueError: when the fingerprint is empty or too long.
    """

    def __init__(
        self,
        client: MooncakeClient,
        capacity_bytes: int,
        layer_bytes: Sequence[int],
        *,
        fingerprint: bytes,
        name: str = "mooncake",
    ) -> None:
        check_fingerprint(fingerprint)
        self.name: str = name
        self.is_shared: bool = True
        self.evicts: bool = True
        self.capacity_bytes: int = capacity_bytes
        self._client = client
        self._evictable = load_wheel().ReplicateConfig()
        self._layer_bytes = tuple(layer_bytes)
        self._prefix = fingerprint.hex()
        self._open: dict[Reservation, tuple[Bytes, set[int]]] = {}
        """The bytes of blocks before their commit, and the layers that they lack."""
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """The bytes of blocks that are being written; Mooncake counts the rest."""
        with self._lock:
            return sum(block.size_bytes for block in self._open)

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes of the object."""
        del key
        return sum(layer_bytes) + _SUM_BYTES * len(layer_bytes)

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Memory for a block that is written; for its errors see `StorageBackend.reserve`.

        All clients have the same reservation of a key, without a position: Mooncake keeps none.
        """
        del position
        check_block(key, layer_bytes)
        if tuple(layer_bytes) != self._layer_bytes:
            raise ValueError(
                f"block {key.hex()} has layers of {list(layer_bytes)[:4]} bytes; those of {self.name} have"
                f" {list(self._layer_bytes)[:4]}"
            )
        if self.find([key]):
            raise BlockExistsError(f"{self.name} has block {key.hex()} already")
        with self._lock:
            if any(block.key == key for block in self._open):
                raise BlockExistsError(f"{self.name} is writing block {key.hex()} already")
            block = Reservation(key, self._layer_bytes)
            self._open[block] = (
                np.empty(self.footprint_bytes(key, layer_bytes), np.uint8),
                set(range(len(layer_bytes))),
            )
        return block

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Gather layers; for its errors see `StorageBackend.write`."""
        sources = check_buffers(reservation, layers, first_layer)
        places = self._views(self._opened(reservation)[0])[first_layer : first_layer + len(sources)]
        for place, source in zip(places, sources, strict=True):
            place[...] = source
        self._opened(reservation)[1].difference_update(range(first_layer, first_layer + len(sources)))

    def commit(self, *reservations: Reservation) -> None:
        """Put blocks into the store; for its errors see `StorageBackend.commit`."""
        if len(set(reservations)) < len(reservations):
            raise ValueError("a block comes twice in one commit; once is allowed")
        for block in reservations:
            missing = self._opened(block)[1]
            if missing:
                raise ValueError(f"block {block.key.hex()} lacks layers {sorted(missing)[:8]}; all are needed")
        for block in reservations:
            content = self._opened(block)[0]
            sums = checksums(self._views(content), checksum_seed(block.key))
            content[block.size_bytes :] = np.array(sums, np.uint64).view(np.uint8)
            api = self._client.api
            code = api.put_from(self._object(block.key), content.ctypes.data, content.nbytes, self._evictable)
            if code:
                raise error_of(code, self.name, block)
            with self._lock:
                del self._open[block]

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Read an object and verify the layers that are asked for; see `StorageBackend.read_into`."""
        arrays = check_buffers(reservation, buffers, first_layer, writable=True)
        content = np.empty(self.footprint_bytes(reservation.key, reservation.layer_bytes), np.uint8)
        found = self._client.api.get_into(self._object(reservation.key), content.ctypes.data, content.nbytes)
        if found < 0:
            raise error_of(found, self.name, reservation)
        views = self._views(content)[first_layer : first_layer + len(arrays)]
        kept = content[reservation.size_bytes :].view(np.uint64).tolist()[first_layer : first_layer + len(arrays)]
        if found != content.nbytes or checksums(views, checksum_seed(reservation.key)) != kept:
            raise DamagedBlockError(f"block {reservation.key.hex()} of {self.name} is not what was written")
        for array, view in zip(arrays, views, strict=True):
            array[...] = view

    def free(self, *reservations: Reservation) -> None:
        """Remove objects, whoever put them; for its errors see `StorageBackend.free`."""
        for block in reservations:
            with self._lock:
                was_open = self._open.pop(block, None)
            if was_open is None:
                code = self._client.api.remove(
                    self._object(block.key), True
                )  # by force, although it was just read
                if code:
                    raise error_of(code, self.name, block)

    def blocks(self) -> Iterator[Reservation]:
        """None: Mooncake lists no objects, and `find` tells which it has."""
        return iter(())

    def find(self, keys: Iterable[bytes]) -> list[Reservation]:
        """The blocks of any client that have one of these keys.

        Raises:
            OSError: when the master does not answer.
        """
        asked = list(keys)
        if not asked:
            return []
        codes = self._client.api.batch_is_exist([self._object(key) for key in asked])
        if min(codes) < 0:
            raise OSError(errno.EIO, f"{self.name} cannot be asked: Mooncake's code {min(codes)}")
        return [Reservation(key, self._layer_bytes) for key, code in zip(asked, codes, strict=True) if code]

    def close(self) -> None:
        """Leave the store, which keeps the blocks; on a thread, because without its master that takes 10 s."""
        threading.Thread(target=self._client.close, name="mooncake-close", daemon=True).start()

    def _opened(self, block: Reservation) -> tuple[Bytes, set[int]]:
        with contextlib.suppress(KeyError):
            return self._open[block]
        raise BlockNotFoundError(f"{self.name} has no open reservation for block {block.key.hex()}")

    def _views(self, content: Bytes) -> list[Bytes]:
        """The layers of an object."""
        ends = np.cumsum(self._layer_bytes).tolist()
        return [content[end - size : end] for size, end in zip(self._layer_bytes, ends, strict=True)]

    def _object(self, key: bytes) -> str:
        return f"{self._prefix}/{key.hex()}"
