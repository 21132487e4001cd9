"""Frames between the cluster and its workers: a magic word, a length checked before it is believed, a body."""

import asyncio
import socket
import struct
from collections.abc import Iterable
from typing import Final

import msgspec

from mooncake_lab.store.backends import ProtocolError

MOST_BODY_BYTES: Final = 16 * 1024**2
"""The largest frame: a prompt of four million tokens."""
_HEADER: Final = struct.Struct("<4sI")
_MAGIC: Final = b"MLC1"


def pack(messages: Iterable[msgspec.Struct]) -> bytes:
    """Messages as frames.

    Raises:
        ValueError: when one is larger than a frame may be.
    """
    parts: list[bytes] = []
    for message in messages:
        body = msgspec.msgpack.encode(message)
        if len(body) > MOST_BODY_BYTES:
            raise ValueError(
                f"a {type(message).__name__} message of {len(body)} bytes; allowed are {MOST_BODY_BYTES}"
            )
        parts += (_HEADER.pack(_MAGIC, len(body)), body)
    return b"".join(parts)


def read_frame(peer: socket.socket) -> bytes | None:
    """The body of the next frame, `None` at the end of the connection.

    Raises:
        ProtocolError: when it is no frame, or its length is out of bounds.
        ConnectionError: when the peer is gone in the middle of one.
    """
    head = _read(peer, _HEADER.size)
    if head is None:
        return None
    body = _read(peer, _body_bytes(head))
    if body is None:
        raise ConnectionResetError("the peer closed the connection in the middle of a frame")
    return body


async def receive_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The body of the next frame, `None` at the end of the connection; for its errors see `read_frame`."""
    try:
        head = await reader.readexactly(_HEADER.size)
        return await reader.readexactly(_body_bytes(head))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ConnectionResetError("the peer closed the connection in the middle of a frame") from error
        return None


def _body_bytes(head: bytes) -> int:
    magic, size = _HEADER.unpack(head)
    if magic != _MAGIC or size > MOST_BODY_BYTES:
        raise ProtocolError(
            f"a frame that begins with {magic!r} and a body of {size} bytes; allowed are {_MAGIC!r}"
            f" and {MOST_BODY_BYTES}"
        )
    return size


def _read(peer: socket.socket, size: int) -> bytes | None:
    """Exactly `size` bytes, or `None` where the connection ends before the first."""
    found = bytearray(size)
    view, got = memoryview(found), 0
    while got < size:
        count = peer.recv_into(view[got:])
        if not count:
            if got:
                raise ConnectionResetError("the peer closed the connection in the middle of a frame")
            return None
        got += count
    return bytes(found)
