"""Frames between the cluster and its workers: a magic word, a length checked before it is believed, a body."""

import asyncio
import struct
from collections.abc import Iterable
from typing import BinaryIO, Final

import msgspec

from mooncake_lab.store.backends import ProtocolError

MOST_BODY_BYTES: Final = 16 * 1024**2
"""The largest frame: a prompt of four million tokens."""
_HEADER: Final = struct.Struct("<4sI")
_MAGIC: Final = b"MLC1"
_CUT: Final = "the peer closed the connection in the middle of a frame"


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


def read_frame(stream: BinaryIO) -> bytes | None:
    """The body of the next frame, `None` at the end of the connection.

    Raises:
        ProtocolError: when it is no frame, or its length is out of bounds.
        ConnectionError: when the peer is gone in the middle of one.
    """
    head = stream.read(_HEADER.size)
    if not head:
        return None
    size = _body_bytes(head)
    body = stream.read(size)
    if len(body) < size:
        raise ConnectionResetError(_CUT)
    return body


async def receive_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The body of the next frame, `None` at the end of the connection; for its errors see `read_frame`."""
    is_begun = False
    try:
        head = await reader.readexactly(_HEADER.size)
        is_begun = True
        return await reader.readexactly(_body_bytes(head))
    except asyncio.IncompleteReadError as error:
        if is_begun or error.partial:
            raise ConnectionResetError(_CUT) from error
        return None


def _body_bytes(head: bytes) -> int:
    if len(head) < _HEADER.size:
        raise ConnectionResetError(_CUT)
    magic, size = _HEADER.unpack(head)
    if magic != _MAGIC or size > MOST_BODY_BYTES:
        raise ProtocolError(
            f"a frame that begins with {magic!r} and a body of {size} bytes; allowed are {_MAGIC!r}"
            f" and {MOST_BODY_BYTES}"
        )
    return size
