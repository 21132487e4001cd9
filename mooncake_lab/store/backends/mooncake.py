"""Mooncake Store as a shared tier: whole blocks that every client finds, each with its checksums behind it."""

import errno
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Self, final

import numpy as np

from mooncake_lab.core import MIB
from mooncake_lab.core.checksums import checksums
from mooncake_lab.net.mooncake_wheel import load_wheel
from mooncake_lab.store.backends.base import (
    BlockExistsError,
    BlockNotFoundError,
    Buffer,
    Bytes,
    CopyingBackend,
    DamagedBlockError,
    Reservation,
    StorageError,
    StorageFullError,
    check_block,
    check_buffers,
    check_commit,
    check_fingerprint,
    checksum_seed,
    layer_views,
)

_SUM_BYTES: Final = 8
_NO_SPACE: Final = -200
_NOT_READY: Final = -703
_NOT_FOUND: Final = -704
_EXISTS: Final = -705


@final
class MooncakeClient:
    """This process in a Mooncake Store: it lends a segment of its memory, and reads and writes all segments.

    A process should have one; several stores may use it. Close it before its master ends. Mutable: a connection.

    Args:
        master: address of the master.
        segment_bytes: memory that it lends; 0 lends nothing, otherwise at least 16 MiB.

    Raises:
        StorageError: when the master cannot be reached.
        MooncakeError: when the wheel is missing.
    """

    def __init__(self, master: str, segment_bytes: int) -> None:
        wheel = load_wheel()
        self.api: Any = wheel.MooncakeDistributedStore()
        """Mooncake's own interface."""
        self._is_open = True
        code = self.api.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 * MIB, "tcp", "", master)
        if code:
            self.close()
            raise StorageError(f"the Mooncake master at {master} cannot be joined: code {code}")

    def close(self) -> None:
        """Leave the store and take the segment back. Closing twice is allowed."""
        if self._is_open:
            self._is_open = False
            self.api.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@final
class MooncakeStore(CopyingBackend):
    """Blocks of one model and one size in a Mooncake Store that several processes use (FAST'25 §3).

    A block is one object: its layers, then the checksum of each, since Mooncake has none. Any client finds it by
    its key, and the master evicts the least recently used objects when the store is full. Layers are gathered in
    memory of this process until the commit, and a read of some layers reads the whole object. Mutable.

    Args:
        client: this process in the store; it is closed with the store.
        capacity_bytes: how much of the store this client may count as in use.
        layer_bytes: of every block.
        fingerprint: names the model; it begins every object's name.
        name: its name in statistics and messages.

    Raises:
        ValueError: when the fingerprint is empty or too long.
    """

    is_shared: bool = True

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
        self.capacity_bytes: int = capacity_bytes
        self._client = client
        self._api = client.api
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
        block = Reservation(key, self._layer_bytes)
        is_held = bool(self.find([key]))
        with self._lock:
            if is_held or block in self._open:
                raise BlockExistsError(f"{self.name} has block {key.hex()} already, or writes it")
            content = np.empty(self.footprint_bytes(key, layer_bytes), np.uint8)
            self._open[block] = (content, set(range(len(layer_bytes))))
        return block

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Gather layers; for its errors see `StorageBackend.write`."""
        sources = check_buffers(reservation, layers, first_layer)
        content, missing = self._opened(reservation)
        for place, source in zip(layer_views(content, self._layer_bytes)[first_layer:], sources, strict=False):
            place[...] = source
        missing.difference_update(range(first_layer, first_layer + len(sources)))

    def commit(self, *reservations: Reservation) -> None:
        """Put blocks into the store; for its errors see `StorageBackend.commit`."""
        check_commit((block, self._opened(block)[1]) for block in reservations)
        for block in reservations:
            content = self._opened(block)[0]
            sums = checksums(layer_views(content, self._layer_bytes), checksum_seed(block.key))
            content[block.size_bytes :] = np.array(sums, np.uint64).view(np.uint8)
            code = self._api.put_from(self._object(block), content.ctypes.data, content.nbytes)
            if code:
                raise _error_of(code, self.name, block)
            with self._lock:
                del self._open[block]

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Read an object and verify the layers that are asked for; see `StorageBackend.read_into`."""
        arrays = check_buffers(reservation, buffers, first_layer, writable=True)
        content = np.empty(self.footprint_bytes(reservation.key, reservation.layer_bytes), np.uint8)
        found = self._api.get_into(self._object(reservation), content.ctypes.data, content.nbytes)
        if found < 0:
            raise _error_of(found, self.name, reservation)
        wanted = slice(first_layer, first_layer + len(arrays))
        views = layer_views(content, self._layer_bytes)[wanted]
        sums = content[reservation.size_bytes :].view(np.uint64).tolist()[wanted]
        if found != content.nbytes or checksums(views, checksum_seed(reservation.key)) != sums:
            raise DamagedBlockError(f"block {reservation.key.hex()} of {self.name} is not what was written")
        for array, view in zip(arrays, views, strict=True):
            array[...] = view

    def free(self, *reservations: Reservation) -> None:
        """Remove objects, whoever put them and although they may just be read; see `StorageBackend.free`."""
        for block in reservations:
            with self._lock:
                was_open = self._open.pop(block, None)
            if was_open is None and (code := self._api.remove(self._object(block), True)):
                raise _error_of(code, self.name, block)

    def blocks(self) -> Iterator[Reservation]:
        """None: Mooncake lists no objects, and `find` tells which it has."""
        return iter(())

    def find(self, keys: Iterable[bytes]) -> list[Reservation]:
        """The blocks of any client that have one of these keys.

        Raises:
            OSError: when the master does not answer.
        """
        asked = [Reservation(key, self._layer_bytes) for key in keys]
        if not asked:
            return []
        codes = self._api.batch_is_exist([self._object(block) for block in asked])
        if min(codes) < 0:
            raise OSError(errno.EIO, f"{self.name} cannot be asked: Mooncake's code {min(codes)}")
        return [block for block, code in zip(asked, codes, strict=True) if code]

    def close(self) -> None:
        """Leave the store, which keeps the blocks; on a thread, because without its master that takes 10 s."""
        threading.Thread(target=self._client.close, name="mooncake-close", daemon=True).start()

    def _opened(self, block: Reservation) -> tuple[Bytes, set[int]]:
        found = self._open.get(block)
        if found is None:
            raise BlockNotFoundError(f"{self.name} has no open reservation for block {block.key.hex()}")
        return found

    def _object(self, block: Reservation) -> str:
        return f"{self._prefix}/{block.key.hex()}"


def _error_of(code: int, store: str, block: Reservation) -> StorageError | OSError:
    """Mooncake's code as the error of a backend of that name."""
    name = f"block {block.key.hex()}"
    if code == _NO_SPACE:
        return StorageFullError(f"{store} has no space for {name} of {block.size_bytes} bytes")
    if code == _EXISTS:
        return BlockExistsError(f"another client holds {name} in {store} already")
    if code in (_NOT_FOUND, _NOT_READY):
        return BlockNotFoundError(f"{store} has {name} no more: its provider is gone, or it was removed")
    return OSError(errno.EIO, f"{store} cannot move {name}: Mooncake's code {code}")
