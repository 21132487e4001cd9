"""What remote stores say to each other: bounded frames over TCP, after both sides proved that they know a token.

A frame is a fixed header, a msgpack body of a declared type, and a payload of layers. Nothing is unpickled, no
length is believed before it is compared with its bound, and no peer is waited for longer than its bytes may
take. The handshake authenticates; it does not encrypt. Use it inside a network you trust, or through a tunnel.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.medium import MediumError
from mooncake_lab.store.media.record import checksum

Bytes: TypeAlias = npt.NDArray[np.uint8]

MOST_BODY_BYTES: Final = 256 * 1024
MOST_FINGERPRINT_BYTES: Final = 64
LEAST_TOKEN_BYTES: Final = 16
SLOWEST_BYTES_PER_S: Final = 1_000_000
"""A link that is slower counts as stalled."""
_HEADER: Final = struct.Struct("<4sIQ")  # magic, bytes of the body, bytes of the payload
_MAGIC: Final = b"MCK1"
_GREETING: Final = b"mooncake-lab-1\0\0"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_MOST_VECTORS: Final = 512


class ProtocolError(MediumError, ConnectionError):
    """The peer does not speak this protocol, or broke a bound; the connection is closed."""


class TruncatedFrameError(ProtocolError):
    """The connection ended in the middle of a frame."""


class PeerRefusedError(MediumError, ConnectionError):
    """One side does not know the other's token."""


def send_frame(peer: socket.socket, body: msgspec.Struct, payload: Sequence[Bytes], timeout_s: float) -> None:
    """Send one frame.

    Raises:
        TimeoutError: when the peer takes nothing for `timeout_s`, or is slower than a slow link.
        OSError: when the connection breaks.
    """
    encoded = msgspec.msgpack.encode(body)
    size = sum(part.nbytes for part in payload)
    head = np.frombuffer(_HEADER.pack(_MAGIC, len(encoded), size) + encoded, np.uint8)
    left = _views([head, *payload])
    deadline_s = _deadline(head.nbytes + size, timeout_s)
    while left:
        peer.settimeout(min(timeout_s, _left(deadline_s, "take a frame")))
        _consume(left, peer.sendmsg(left[:_MOST_VECTORS]))


def receive_head(peer: socket.socket, timeout_s: float, *, idle_s: float | None = None) -> tuple[bytes, int]:
    """The body of the next frame, and the bytes of the payload that follows.

    Args:
        peer: the connection.
        timeout_s: how long a frame that has begun may take.
        idle_s: how long to wait for one to begin; `None` is `timeout_s`.

    Raises:
        TimeoutError: when it takes longer.
        ProtocolError: when the frame is not one, or its body is out of bounds.
        ConnectionError: when the peer is gone.
    """
    head = np.empty(_HEADER.size, np.uint8)
    peer.settimeout(timeout_s if idle_s is None else idle_s)
    got = peer.recv_into(head.data)
    if not got:
        raise ConnectionResetError("the peer closed the connection")
    receive_into(peer, [head[got:]], timeout_s)
    magic, body_bytes, payload_bytes = _HEADER.unpack(head.tobytes())
    if magic != _MAGIC or body_bytes > MOST_BODY_BYTES:
        raise ProtocolError(
            f"a frame that begins with {magic!r} and a body of {body_bytes} bytes; allowed are {_MAGIC!r}"
            f" and {MOST_BODY_BYTES}"
        )
    body = np.empty(body_bytes, np.uint8)
    receive_into(peer, [body], timeout_s)
    return body.tobytes(), payload_bytes


def receive_into(peer: socket.socket, parts: Sequence[Bytes], timeout_s: float) -> None:
    """Fill these parts with what comes next.

    Raises:
        TimeoutError: when nothing comes for `timeout_s`, or it all takes longer than a slow link would.
        TruncatedFrameError: when the connection ends before they are full.
        OSError: when it breaks.
    """
    left = _views(parts)
    deadline_s = _deadline(sum(part.nbytes for part in left), timeout_s)
    while left:
        peer.settimeout(min(timeout_s, _left(deadline_s, "send a frame")))
        got, *_ = peer.recvmsg_into(left[:_MOST_VECTORS])
        if not got:
            missing = sum(part.nbytes for part in left)
            raise TruncatedFrameError(f"the connection ended in the middle of a frame, {missing} bytes too early")
        _consume(left, got)


def receive_layers(peer: socket.socket, layers: Sequence[Bytes], seed: int, timeout_s: float) -> list[int]:
    """Fill layers with what comes next; their checksums, taken while each is still in the processor's cache.

    Raises:
        TimeoutError: when nothing comes for `timeout_s`, or one takes longer than a slow link would.
        ConnectionError: when the peer is gone.
    """
    sums: list[int] = []
    for layer in layers:
        receive_into(peer, [layer], timeout_s)
        sums.append(checksum(layer, seed))
    return sums


def greet_as_server(peer: socket.socket, token: bytes, timeout_s: float) -> bytes:
    """Challenge a client; the fingerprint of its model, once it has proved that it knows the token.

    Raises:
        PeerRefusedError: when it has not.
        ProtocolError: when it names no model.
        OSError: when the connection breaks or the client stalls.
    """
    challenge = secrets.token_bytes(_NONCE_BYTES)
    peer.settimeout(timeout_s)
    peer.sendall(_GREETING + challenge)
    reply = np.empty(_NONCE_BYTES + _MAC_BYTES + 1 + MOST_FINGERPRINT_BYTES, np.uint8)
    receive_into(peer, [reply], timeout_s)
    nonce, mac, named = _split(reply.tobytes(), _NONCE_BYTES, _MAC_BYTES)
    if not hmac.compare_digest(mac, _mac(token, b"client", challenge, nonce, named)):
        raise PeerRefusedError("a client does not know the token")
    if not 0 < named[0] <= MOST_FINGERPRINT_BYTES:
        raise ProtocolError(f"a model fingerprint of {named[0]} bytes; allowed are 1 to {MOST_FINGERPRINT_BYTES}")
    peer.sendall(_mac(token, b"server", nonce, challenge, named))
    return named[1 : 1 + named[0]]


def greet_as_client(peer: socket.socket, token: bytes, fingerprint: bytes, timeout_s: float) -> None:
    """Answer the server's challenge, and have it prove that it knows the token too.

    Raises:
        PeerRefusedError: when either side does not.
        ProtocolError: when it is no such server.
        OSError: when the connection breaks or the server stalls.
    """
    greeting = np.empty(len(_GREETING) + _NONCE_BYTES, np.uint8)
    receive_into(peer, [greeting], timeout_s)
    magic, challenge = greeting.tobytes()[: len(_GREETING)], greeting.tobytes()[len(_GREETING) :]
    if magic != _GREETING:
        raise ProtocolError(f"the server greets with {magic!r}; a block store greets with {_GREETING!r}")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    named = bytes([len(fingerprint)]) + fingerprint.ljust(MOST_FINGERPRINT_BYTES, b"\0")
    peer.sendall(nonce + _mac(token, b"client", challenge, nonce, named) + named)
    proof = np.empty(_MAC_BYTES, np.uint8)
    try:
        receive_into(peer, [proof], timeout_s)
    except ConnectionError as error:
        raise PeerRefusedError("the server closed the connection: it does not accept this token") from error
    if not hmac.compare_digest(proof.tobytes(), _mac(token, b"server", nonce, challenge, named)):
        raise PeerRefusedError("the server does not know the token")


def check_token(token: bytes) -> None:
    """Refuse tokens that could be guessed.

    Raises:
        ValueError: when it is shorter than 16 bytes.
    """
    if len(token) < LEAST_TOKEN_BYTES:
        raise ValueError(f"a token of {len(token)} bytes; at least {LEAST_TOKEN_BYTES} are needed")


def _mac(token: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, b"".join((role, *parts)), hashlib.sha256).digest()


def _split(data: bytes, first: int, second: int) -> tuple[bytes, bytes, bytes]:
    return data[:first], data[first : first + second], data[first + second :]


def _views(parts: Sequence[Bytes]) -> list[memoryview]:
    return [part.data for part in parts if part.nbytes]


def _deadline(size_bytes: int, timeout_s: float) -> float:
    return time.monotonic() + timeout_s + size_bytes / SLOWEST_BYTES_PER_S


def _left(deadline_s: float, what: str) -> float:
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the peer took too long to {what}")
    return left


def _consume(left: list[memoryview], moved: int) -> None:
    """Drop the first `moved` bytes of a list of views."""
    while left and moved >= left[0].nbytes:
        moved -= left.pop(0).nbytes
    if moved:
        left[0] = left[0][moved:]
