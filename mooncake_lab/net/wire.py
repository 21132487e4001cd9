"""Frames (`net.frames`) over TCP between processes that share a token, with bounded waits.

Bodies have a declared type, nothing is unpickled, and no peer is waited for longer than its bytes may take. The
handshake authenticates; it does not encrypt. Use it inside a trusted network, or through a tunnel.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeAlias, TypeVar, final

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.net.frames import HEADER_BYTES, ProtocolError, decode_header, encode

__all__ = [
    "Bytes", "Frame", "PeerRefusedError", "ProtocolError", "TruncatedFrameError", "check_token", "connect",
    "frame_head", "greet_as_client", "greet_as_server", "receive_head", "receive_into", "receive_message",
    "send_frame", "skip",
]  # fmt: skip

Bytes: TypeAlias = npt.NDArray[np.uint8]
_Message = TypeVar("_Message")

SLOWEST_BYTES_PER_S: Final = 1_000_000
"""A slower link counts as stalled."""
MAX_BODY_BYTES: Final = 2**28
"""Enough to list the blocks of a pool of two terabytes. Nothing is read of peers that do not know the token."""
MIN_TOKEN_BYTES: Final = 16
MAX_FINGERPRINT_BYTES: Final = 64
"""Of the name of a model, which a client tells in the handshake."""
_MAX_PAYLOAD_BYTES: Final = 2**64 - 1
"""Any payload: whoever reads it knows what has to follow its message."""
_GREETING: Final = b"mooncake-lab-3\0\0"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_MAX_VECTORS: Final = 512


class TruncatedFrameError(ProtocolError):
    """The connection ended in the middle of a frame."""


class PeerRefusedError(ConnectionError):
    """One side does not know the other's token."""


@final
class Frame:
    """One frame in one direction: no wait exceeds the timeout, and the whole takes no longer than on a slow link.

    The kernel keeps the time, on a blocking socket with a timeout, so that no call has to poll first. Mutable.
    """

    __slots__ = ("_deadline_s", "_moved", "_option", "_peer", "_shortened", "_timeout_s")

    def __init__(self, peer: socket.socket, option: int, size_bytes: int, timeout_s: float) -> None:
        self._peer = peer
        self._option = option
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s + size_bytes / SLOWEST_BYTES_PER_S
        self._moved = False
        self._shortened = False
        if peer.gettimeout() is not None:
            peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, option, _timeval(timeout_s))

    def send(self, parts: Sequence[bytes | Bytes]) -> None:
        """Send the next bytes; for its errors see `send_frame`."""
        left = [part.data if isinstance(part, np.ndarray) else memoryview(part) for part in parts if len(part)]
        while left:
            self._limit()
            try:
                moved = self._peer.sendmsg(left[:_MAX_VECTORS])
            except BlockingIOError as error:
                raise self._too_late() from error
            self._moved = True
            _consume(left, moved)

    def receive(self, parts: Sequence[memoryview]) -> None:
        """Fill these parts with the next bytes; for its errors see `receive_into`."""
        left = [part for part in parts if part.nbytes]
        missing = sum([part.nbytes for part in left])
        while missing:
            got = self.receive_some(left[:_MAX_VECTORS], socket.MSG_WAITALL)
            missing -= got
            if not missing:
                return
            if not got:
                raise TruncatedFrameError(
                    f"the connection ended in the middle of a frame, {missing} bytes too early"
                )
            _consume(left, got)

    def receive_some(self, parts: Sequence[memoryview | bytearray], flags: int = 0) -> int:
        """Fill these parts with what has come, waiting for the first byte; how many bytes, 0 at the end."""
        self._limit()
        try:
            got = self._peer.recvmsg_into(parts, 0, flags)[0]
        except BlockingIOError as error:
            raise self._too_late() from error
        self._moved = True
        return got

    def _limit(self) -> None:
        """Let the next call wait no longer than is left of the frame's time."""
        left_s = self._deadline_s - time.monotonic()
        self._shortened = left_s < self._timeout_s
        if left_s <= 0:
            raise self._too_late()
        if self._shortened:
            self._peer.setsockopt(socket.SOL_SOCKET, self._option, _timeval(left_s))

    def _too_late(self) -> TimeoutError:
        """What ended: the wait for one byte, or the time of the frame, if some of it moved and less was left."""
        if self._moved and self._shortened:
            return TimeoutError(f"the peer took longer over a frame than a link of {SLOWEST_BYTES_PER_S} bytes/s")
        return TimeoutError(f"the peer stalled for {self._timeout_s:g} s")


def send_frame(peer: socket.socket, body: msgspec.Struct, payload: Sequence[Bytes], timeout_s: float) -> None:
    """Send one frame.

    Raises:
        ProtocolError: when the body is out of bounds; nothing is sent then.
        TimeoutError: when the peer takes nothing for `timeout_s`, or is slower than a slow link.
        OSError: when the connection breaks.
    """
    size = sum(part.nbytes for part in payload)
    head = frame_head(body, size)
    Frame(peer, socket.SO_SNDTIMEO, len(head) + size, timeout_s).send([head, *payload])


def receive_head(peer: socket.socket, timeout_s: float, *, idle_s: float | None = None) -> tuple[bytearray, int]:
    """The body of the next frame, and the bytes of the payload that follows.

    Args:
        peer: the connection.
        timeout_s: how long a frame that has begun may take.
        idle_s: how long to wait for one to begin; `None` is `timeout_s`.

    Raises:
        TimeoutError: when it takes longer.
        ProtocolError: when it is not a frame, or its body is out of bounds.
        ConnectionError: when the peer is gone.
    """
    begun = bytearray(HEADER_BYTES)
    first = Frame(peer, socket.SO_RCVTIMEO, 0, timeout_s if idle_s is None else idle_s)
    got = first.receive_some([begun])
    if not got:
        raise ConnectionResetError("the peer closed the connection")
    if got < len(begun):
        Frame(peer, socket.SO_RCVTIMEO, 0, timeout_s).receive([memoryview(begun)[got:]])
    body_bytes, payload_bytes = decode_header(
        begun, max_body_bytes=MAX_BODY_BYTES, max_payload_bytes=_MAX_PAYLOAD_BYTES
    )
    body = bytearray(body_bytes)
    Frame(peer, socket.SO_RCVTIMEO, body_bytes, timeout_s).receive([memoryview(body)])
    return body, payload_bytes


def receive_message(
    peer: socket.socket,
    decoder: msgspec.msgpack.Decoder[_Message],
    timeout_s: float,
    *,
    idle_s: float | None = None,
) -> tuple[_Message, int]:
    """The next message, a `ProtocolError` where it is none, and the bytes that follow it; see `receive_head`."""
    body, payload_bytes = receive_head(peer, timeout_s, idle_s=idle_s)
    try:
        return decoder.decode(body), payload_bytes
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a frame that is no message: {error}") from error


def receive_into(peer: socket.socket, parts: Sequence[Bytes], timeout_s: float) -> None:
    """Fill these parts with what comes next.

    Raises:
        TimeoutError: when nothing comes for `timeout_s`, or it all takes longer than a slow link would.
        TruncatedFrameError: when the connection ends before they are full.
        OSError: when it breaks.
    """
    frame = Frame(peer, socket.SO_RCVTIMEO, sum(part.nbytes for part in parts), timeout_s)
    frame.receive([part.data for part in parts])


def skip(peer: socket.socket, size_bytes: int, timeout_s: float) -> None:
    """Discard the next bytes; for its errors see `receive_into`."""
    frame = Frame(peer, socket.SO_RCVTIMEO, size_bytes, timeout_s)
    scratch = memoryview(bytearray(min(size_bytes, 2**20)))
    while size_bytes:
        part = scratch[:size_bytes]
        frame.receive([part])
        size_bytes -= part.nbytes


def connect(address: tuple[str, int], token: bytes, fingerprint: bytes, timeout_s: float) -> socket.socket:
    """A connection to a server that knows the token; for its errors see `greet_as_client`."""
    peer = socket.create_connection(address, timeout_s)
    try:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet_as_client(peer, token, fingerprint, timeout_s)
    except BaseException:
        peer.close()
        raise
    return peer


def greet_as_server(peer: socket.socket, token: bytes, timeout_s: float) -> bytes:
    """Challenge a client; the fingerprint of its model once it has proved that it knows the token.

    Raises:
        PeerRefusedError: when it does not know it.
        ProtocolError: when it names no model.
        OSError: when the connection breaks or the client stalls.
    """
    challenge = secrets.token_bytes(_NONCE_BYTES)
    peer.settimeout(timeout_s)
    peer.sendall(_GREETING + challenge)
    reply = _receive(peer, _NONCE_BYTES + _MAC_BYTES + 1 + MAX_FINGERPRINT_BYTES, timeout_s)
    nonce, named = reply[:_NONCE_BYTES], reply[_NONCE_BYTES + _MAC_BYTES :]
    mac = reply[_NONCE_BYTES : _NONCE_BYTES + _MAC_BYTES]
    if not hmac.compare_digest(mac, _mac(token, b"client", challenge, nonce, named)):
        raise PeerRefusedError("a client does not know the token")
    if not 0 < named[0] <= MAX_FINGERPRINT_BYTES:
        raise ProtocolError(f"a model fingerprint of {named[0]} bytes; allowed are 1 to {MAX_FINGERPRINT_BYTES}")
    peer.sendall(_mac(token, b"server", nonce, challenge, named))
    return named[1 : 1 + named[0]]


def greet_as_client(peer: socket.socket, token: bytes, fingerprint: bytes, timeout_s: float) -> None:
    """Answer the server's challenge, and have it prove that it knows the token, too.

    Raises:
        PeerRefusedError: when either side does not know it.
        ProtocolError: when it is no such server.
        OSError: when the connection breaks or the server stalls.
    """
    greeting = _receive(peer, len(_GREETING) + _NONCE_BYTES, timeout_s)
    magic, challenge = greeting[: len(_GREETING)], greeting[len(_GREETING) :]
    if magic != _GREETING:
        raise ProtocolError(f"the server greets with {magic!r}; a block store greets with {_GREETING!r}")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    named = bytes([len(fingerprint)]) + fingerprint.ljust(MAX_FINGERPRINT_BYTES, b"\0")
    peer.sendall(nonce + _mac(token, b"client", challenge, nonce, named) + named)
    try:
        proof = _receive(peer, _MAC_BYTES, timeout_s)
    except ConnectionError as error:
        raise PeerRefusedError("the server closed the connection: it does not accept this token") from error
    if not hmac.compare_digest(proof, _mac(token, b"server", nonce, challenge, named)):
        raise PeerRefusedError("the server does not know the token")


def check_token(token: bytes) -> None:
    """Refuse tokens that could be guessed.

    Raises:
        ValueError: when it is shorter than 16 bytes.
    """
    if len(token) < MIN_TOKEN_BYTES:
        raise ValueError(f"a token of {len(token)} bytes; at least {MIN_TOKEN_BYTES} are needed")


def _receive(peer: socket.socket, size_bytes: int, timeout_s: float) -> bytes:
    received = np.empty(size_bytes, np.uint8)
    receive_into(peer, [received], timeout_s)
    return received.tobytes()


def _mac(token: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, b"".join((role, *parts)), hashlib.sha256).digest()


def frame_head(body: msgspec.Struct, payload_bytes: int) -> bytes:
    """The bytes of a frame before its payload; for its errors see `send_frame`."""
    return encode(body, max_body_bytes=MAX_BODY_BYTES, payload_bytes=payload_bytes)


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
