"""Bytes over a connection with bounded waiting: what frames are sent and received through."""

import socket
import struct
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.medium import MediumError

Bytes: TypeAlias = npt.NDArray[np.uint8]

SLOWEST_BYTES_PER_S: Final = 1_000_000
"""A link that is slower counts as stalled."""
_MOST_VECTORS: Final = 512


class ProtocolError(MediumError, ConnectionError):
    """The peer does not speak this protocol, or broke a bound; the connection is closed."""


class TruncatedFrameError(ProtocolError):
    """The connection ended in the middle of a frame."""


@final
class _Patience:
    """How long one frame may take: no wait longer than the timeout, the whole no longer than on a slow link.

    The kernel keeps the time, on a blocking socket with a timeout, so that no call has to poll first. Mutable: it
    is a clock.
    """

    __slots__ = ("_deadline_s", "_direction", "_peer", "_timeout_s")

    def __init__(self, peer: socket.socket, direction: int, size_bytes: int, timeout_s: float) -> None:
        self._peer = peer
        self._direction = direction
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s + size_bytes / SLOWEST_BYTES_PER_S
        if peer.gettimeout() is not None:
            peer.settimeout(None)
        self._limit(timeout_s)

    def spend(self) -> None:
        """Let the next call wait no longer than is left.

        Raises:
            TimeoutError: when nothing is.
        """
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the peer took longer over a frame than a link of {SLOWEST_BYTES_PER_S} bytes/s")
        if left_s < self._timeout_s:
            self._limit(left_s)

    def over(self) -> TimeoutError:
        """What to raise when a call waited in vain."""
        return TimeoutError(f"the peer stalled for {self._timeout_s:g} s")

    def _limit(self, seconds: float) -> None:
        self._peer.setsockopt(socket.SOL_SOCKET, self._direction, _timeval(seconds))


@final
class Outgoing:
    """One frame on its way to a peer: all its bytes have to be taken within the time of a slow link."""

    __slots__ = ("_patience", "_peer")

    def __init__(self, peer: socket.socket, size_bytes: int, timeout_s: float) -> None:
        self._peer = peer
        self._patience = _Patience(peer, socket.SO_SNDTIMEO, size_bytes, timeout_s)

    def send(self, parts: Sequence[bytes | Bytes]) -> None:
        """Send the next bytes of it.

        Raises:
            TimeoutError: when the peer takes nothing for the timeout, or is slower than a slow link.
            OSError: when the connection breaks.
        """
        left = [part.data if isinstance(part, np.ndarray) else memoryview(part) for part in parts if len(part)]
        while left:
            self._patience.spend()
            try:
                moved = self._peer.sendmsg(left[:_MOST_VECTORS])
            except BlockingIOError as error:
                raise self._patience.over() from error
            _consume(left, moved)


@final
class Incoming:
    """One frame on its way from a peer: all its bytes have to come within the time of a slow link."""

    __slots__ = ("_patience", "_peer")

    def __init__(self, peer: socket.socket, size_bytes: int, timeout_s: float) -> None:
        self._peer = peer
        self._patience = _Patience(peer, socket.SO_RCVTIMEO, size_bytes, timeout_s)

    def receive(self, parts: Sequence[memoryview]) -> None:
        """Fill these parts with the next bytes of it.

        Raises:
            TimeoutError: when nothing comes for the timeout, or it all takes longer than a slow link would.
            TruncatedFrameError: when the connection ends before they are full.
            OSError: when it breaks.
        """
        left = [part for part in parts if part.nbytes]
        missing = sum([part.nbytes for part in left])
        while missing:
            got = self.receive_some(left[:_MOST_VECTORS], socket.MSG_WAITALL)
            missing -= got
            if not missing:
                return
            if not got:
                raise TruncatedFrameError(
                    f"the connection ended in the middle of a frame, {missing} bytes too early"
                )
            _consume(left, got)

    def receive_some(self, parts: Sequence[memoryview | bytearray], flags: int = 0) -> int:
        """Put what has come into these parts, and wait when nothing has; how many bytes, 0 at the end."""
        self._patience.spend()
        try:
            return self._peer.recvmsg_into(parts, 0, flags)[0]
        except BlockingIOError as error:
            raise self._patience.over() from error


@lru_cache(maxsize=32)
def _timeval(seconds: float) -> bytes:
    """A C timeval; 0 would be for ever."""
    return struct.pack("@ll", *divmod(max(round(seconds * 1e6), 1), 1_000_000))


def _consume(left: list[memoryview], moved: int) -> None:
    """Drop the first `moved` bytes of a list of views."""
    while left and moved >= left[0].nbytes:
        moved -= left.pop(0).nbytes
    if moved:
        left[0] = left[0][moved:]
