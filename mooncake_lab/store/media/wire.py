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
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from mooncake_lab.store.media import stream
from mooncake_lab.store.media.medium import MediumError
from mooncake_lab.store.media.record import checksums, runs
from mooncake_lab.store.media.stream import Bytes, Incoming, Outgoing, ProtocolError

SLOWEST_BYTES_PER_S: Final = stream.SLOWEST_BYTES_PER_S
MOST_BODY_BYTES: Final = 256 * 1024
MOST_FINGERPRINT_BYTES: Final = 64
LEAST_TOKEN_BYTES: Final = 16
_HEADER: Final = struct.Struct("<4sIQ")  # magic, bytes of the body, bytes of the payload
_MAGIC: Final = b"MCK1"
_GREETING: Final = b"mooncake-lab-2\0\0"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_SUM_BYTES: Final = 8
_RUN_BYTES: Final = 128 * 1024
"""Layers that are hashed at once: they stay in the processor's own cache meanwhile."""


class PeerRefusedError(MediumError, ConnectionError):
    """One side does not know the other's token."""


def send_frame(peer: socket.socket, body: msgspec.Struct, payload: Sequence[Bytes], timeout_s: float) -> None:
    """Send one frame.

    Raises:
        ProtocolError: when the body is out of bounds; nothing is sent then.
        TimeoutError: when the peer takes nothing for `timeout_s`, or is slower than a slow link.
        OSError: when the connection breaks.
    """
    size = sum(part.nbytes for part in payload)
    head = _head(body, size)
    Outgoing(peer, len(head) + size, timeout_s).send([head, *payload])


def send_layers(
    peer: socket.socket,
    body: msgspec.Struct,
    layers: Sequence[Bytes],
    timeout_s: float,
    *,
    seed: int,
    known: Sequence[int] | None = None,
) -> None:
    """Send a frame with layers and, behind them, the checksum of each, unless those are known already.

    Checksums come last, so that each run is hashed and then sent while it is in the processor's cache, and while
    the peer takes the run before. For its errors see `send_frame`.
    """
    sizes = [layer.nbytes for layer in layers]
    size = layers_bytes(sizes)
    head = _head(body, size)
    frame = Outgoing(peer, len(head) + size, timeout_s)
    waiting: list[bytes | Bytes] = [head]
    sums: list[int] = []
    for run in runs(sizes, _RUN_BYTES if known is None else size):
        sums += checksums(layers[run], seed) if known is None else known[run]
        waiting += layers[run]
        if len(sums) < len(layers):
            frame.send(waiting)
            waiting = []
    frame.send([*waiting, struct.pack(f"<{len(sums)}Q", *sums)])


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
    begun = bytearray(_HEADER.size)
    got = Incoming(peer, 0, timeout_s if idle_s is None else idle_s).receive_some([begun])
    if not got:
        raise ConnectionResetError("the peer closed the connection")
    frame = Incoming(peer, MOST_BODY_BYTES, timeout_s)
    if got < len(begun):
        frame.receive([memoryview(begun)[got:]])
    magic, body_bytes, payload_bytes = _HEADER.unpack(begun)
    if magic != _MAGIC or body_bytes > MOST_BODY_BYTES:
        raise ProtocolError(
            f"a frame that begins with {magic!r} and a body of {body_bytes} bytes; allowed are {_MAGIC!r}"
            f" and {MOST_BODY_BYTES}"
        )
    body = bytearray(body_bytes)
    frame.receive([memoryview(body)])
    return bytes(body), payload_bytes


def receive_into(peer: socket.socket, parts: Sequence[Bytes], timeout_s: float) -> None:
    """Fill these parts with what comes next.

    Raises:
        TimeoutError: when nothing comes for `timeout_s`, or it all takes longer than a slow link would.
        TruncatedFrameError: when the connection ends before they are full.
        OSError: when it breaks.
    """
    Incoming(peer, sum(part.nbytes for part in parts), timeout_s).receive([part.data for part in parts])


def receive_layers(
    peer: socket.socket, layers: Sequence[Bytes], seed: int, timeout_s: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Fill layers with what comes next; their checksums as they came, and as the peer sent them.

    A run is hashed while it is in the processor's cache, and while the peer sends the next one. For its errors see
    `receive_into`; the time that is allowed is one for all layers.
    """
    sizes = [layer.nbytes for layer in layers]
    frame = Incoming(peer, layers_bytes(sizes), timeout_s)
    came: list[int] = []
    told = bytearray(_SUM_BYTES * len(layers))
    for run in runs(sizes, _RUN_BYTES):
        parts = [layer.data for layer in layers[run]]
        frame.receive(parts if run.stop < len(layers) else [*parts, memoryview(told)])
        came += checksums(layers[run], seed)
    return tuple(came), struct.unpack(f"<{len(layers)}Q", told)


def skip(peer: socket.socket, size_bytes: int, timeout_s: float) -> None:
    """Throw away so many bytes of what comes next; for its errors see `receive_into`."""
    frame = Incoming(peer, size_bytes, timeout_s)
    scratch = memoryview(bytearray(min(size_bytes, 2**20)))
    while size_bytes:
        part = scratch[:size_bytes]
        frame.receive([part])
        size_bytes -= part.nbytes


def layers_bytes(sizes: Sequence[int]) -> int:
    """The payload of layers of these sizes: their bytes, and the checksum of each."""
    return sum(sizes) + _SUM_BYTES * len(sizes)


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


def _head(body: msgspec.Struct, payload_bytes: int) -> bytes:
    """What stands before a payload."""
    encoded = msgspec.msgpack.encode(body)
    if len(encoded) > MOST_BODY_BYTES:
        raise ProtocolError(
            f"a {type(body).__name__} of {len(encoded)} bytes; a frame's body may have {MOST_BODY_BYTES}"
        )
    return _HEADER.pack(_MAGIC, len(encoded), payload_bytes) + encoded
