"""KVCache by Mooncake's own Transfer Engine, which writes into the receiver's memory (FAST'25 §4.3).

The connection between two workers still carries every message; only the bytes of keys and values take the channel.
A receiver lends each connection a buffer. The sender writes a chunk there and sends its checksum; the receiver
copies the chunk, compares, and replies that the buffer is free again. The checksum detects bytes that a late write
destroyed. It does not authenticate: the engine's TCP transport listens on all interfaces without authentication
(its `MC_TCP_BIND_ADDRESS` was tried and changes nothing), so that each process that reaches its port can read and
write all memory of the channel, with the KVCache that lay there last. Use it only inside a network that you trust.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from mooncake_lab.core.checksums import checksums
from mooncake_lab.engine.kv_layout import Bytes
from mooncake_lab.net.mooncake_wheel import open_engine
from mooncake_lab.net.wire import ProtocolError
from mooncake_lab.serving.messages import RemoteAddress, RemoteWrite
from mooncake_lab.store.backends import StorageError, StorageFullError
from mooncake_lab.store.backends.allocation import ExtentAllocator

BUFFER_BYTES: Final = 4 * 2**20
"""What a sender asks each receiver for; pieces that are longer are cut."""
_LOG: Final = logging.getLogger(__name__)
_ALIGNMENT_BYTES: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory that the engine may read and write."""

    start: int
    memory: Bytes
    where: RemoteAddress
    """How others name it."""

    def copy_to(self, parts: Sequence[Bytes], pushed: RemoteWrite, *, first: int = 0) -> None:
        """Copy what was written here into memory of the receiver, and compare it with the sender's checksum.

        Args:
            parts: of that memory.
            pushed: what was written.
            first: where, in bytes from the beginning.

        Raises:
            ProtocolError: when it is not what was sent, or more than fits.
        """
        size = sum(part.nbytes for part in parts)
        if first + size > self.memory.nbytes:
            raise ProtocolError(f"{size} bytes were pushed into a buffer of {self.memory.nbytes} at {first}")
        done = first
        for part in parts:
            part[:] = self.memory[done : done + part.nbytes]
            done += part.nbytes
        if _checksum(parts) != pushed.checksum:
            raise ProtocolError(
                f"{size} bytes that were pushed are not as they were sent:"
                " the Transfer Engine's memory was written late, or by another process"
            )


@final
class TransferEngineChannel:
    """A Transfer Engine of this process, and the memory that it may touch. Mutable: it lends it.

    Args:
        room_bytes: of that memory, to receive into and to send from.

    Raises:
        MooncakeError: when the wheel is missing, or the engine does not start.
    """

    def __init__(self, room_bytes: int) -> None:
        self._arena = np.zeros(room_bytes, np.uint8)
        self._engine = open_engine(self._arena)
        self._segment = f"127.0.0.1:{self._engine.get_rpc_port()}"
        self._extents = ExtentAllocator(room_bytes, _ALIGNMENT_BYTES)
        self._lock = threading.Lock()
        self.written_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that are lent, or sent from now."""
        return self._extents.used_bytes

    def take(self, size_bytes: int) -> Buffer:
        """Memory for a while; `give` it back.

        Raises:
            StorageFullError: when no free piece is as large.
        """
        with self._lock:
            start = self._extents.take(size_bytes) if size_bytes > 0 else None
        if start is None:
            raise StorageFullError(
                f"no {size_bytes} bytes for the Transfer Engine; {self.used_bytes} of"
                f" {self._extents.capacity_bytes} are in use (LiveOptions.transfer_bytes)"
            )
        memory = self._arena[start : start + size_bytes]
        return Buffer(start, memory, RemoteAddress(self._segment, memory.ctypes.data))

    def give(self, region: Buffer) -> None:
        """Take it back."""
        with self._lock:
            self._extents.give(region.start, region.memory.nbytes)

    def lend(self, size_bytes: int, until: contextlib.ExitStack) -> Buffer | None:
        """Memory until a stack ends; None where all is lent: then the connection carries the bytes."""
        try:
            region = self.take(size_bytes)
        except StorageFullError as error:
            _LOG.info("a connection carries KVCache: %s", error)
            return None
        until.callback(self.give, region)
        return region

    def write(self, into: RemoteAddress, parts: Sequence[Bytes]) -> RemoteWrite | None:
        """Write parts into another process, one behind the other; None where there is no memory to send from.

        Raises:
            StorageError: when they cannot be written.
        """
        start_s = time.monotonic()
        size = sum(part.nbytes for part in parts)
        with contextlib.ExitStack() as stack:
            staged = self.lend(size, stack)
            if staged is None:
                return None
            np.concatenate(parts, out=staged.memory)
            try:
                code = self._engine.transfer_sync_write(into.segment, staged.where.address, into.address, size)
            except (TypeError, RuntimeError) as error:  # whatever C++ throws
                raise StorageError(f"Mooncake's Transfer Engine cannot write {size} bytes: {error}") from error
            if code:
                raise StorageError(f"Mooncake's Transfer Engine cannot write {size} bytes: code {code}")
        self.written_bytes += size
        return RemoteWrite(_checksum(parts), start_s)


def _checksum(parts: Sequence[Bytes]) -> int:
    total = 0
    for part in parts:
        [total] = checksums([part], total)
    return total
