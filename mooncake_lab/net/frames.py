"""Frames: a fixed header, a msgpack body and a payload of raw bytes, on sockets, pipes and streams alike.

The header has a magic word, the bytes of the body and the bytes of the payload. Each length is compared with its
bound before anything is read or allocated for it.
"""

import struct
from typing import Any, BinaryIO, Final

import msgspec

_HEADER: Final = struct.Struct("<4sIQ")
HEADER_BYTES: Final = _HEADER.size
MAGIC: Final = b"MCK2"
CUT: Final = "the peer closed the connection in the middle of a frame"


class ProtocolError(ConnectionError):
    """The peer does not speak this protocol, or broke a bound; the connection is closed."""


class OversizedFrameError(ProtocolError, ValueError):
    """A message is larger than the body of a frame may be."""


def encode(message: Any, *, max_body_bytes: int, payload_bytes: int = 0) -> bytes:
    """The header and the body of a frame.

    Raises:
        OversizedFrameError: when the body is larger than that.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > max_body_bytes:
        raise OversizedFrameError(
            f"a {type(message).__name__} message of {len(body)} bytes; allowed are {max_body_bytes}"
        )
    return _HEADER.pack(MAGIC, len(body), payload_bytes) + body


def decode_header(header: bytes | bytearray, *, max_body_bytes: int, max_payload_bytes: int) -> tuple[int, int]:
    """The bytes of the body and of the payload that follow a header.

    Raises:
        ProtocolError: when it is no header of a frame, or announces too much.
    """
    magic, body_bytes, payload_bytes = _HEADER.unpack(header)
    if magic != MAGIC:
        raise ProtocolError(f"a frame that begins with {magic!r}; frames begin with {MAGIC!r}")
    if body_bytes > max_body_bytes:
        raise ProtocolError(f"a frame with a body of {body_bytes} bytes; allowed are {max_body_bytes}")
    if payload_bytes > max_payload_bytes:
        raise ProtocolError(f"a frame with a payload of {payload_bytes} bytes; allowed are {max_payload_bytes}")
    return body_bytes, payload_bytes


def read_body(stream: BinaryIO, *, max_body_bytes: int) -> bytes | None:
    """The body of the next frame without a payload, `None` at the end of the stream.

    Raises:
        ProtocolError: when it is no frame, has a payload, or is too large.
        ConnectionError: when the stream ends in the middle of it.
    """
    header = stream.read(HEADER_BYTES)
    if not header:
        return None
    if len(header) < HEADER_BYTES:
        raise ConnectionResetError(CUT)
    size, _ = decode_header(header, max_body_bytes=max_body_bytes, max_payload_bytes=0)
    body = stream.read(size)
    if len(body) < size:
        raise ConnectionResetError(CUT)
    return body
