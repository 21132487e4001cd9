"""What a grader and a submission say to each other: plain data, typed, over a pipe.

The submission runs in a process of its own and is believed nothing: it answers questions, and the grader checks
the answers. A frame is four bytes of length and a msgpack message.
"""

import io
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from mooncake_lab.batching import Limits, Plan, Progress
from mooncake_lab.conductor import ClusterView, DecodeView, Placement
from mooncake_lab.core import MIB, SLO, Request

LONGEST_FRAME_BYTES: Final = 16 * MIB
_HEAD: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size
"""What announces the length of a frame."""


class Signature(NamedTuple):
    """The types of a method's arguments, and of what it answers."""

    takes: tuple[Any, ...]
    gives: Any


SIGNATURES: Final[Mapping[str, Signature]] = MappingProxyType(
    {
        "plan": Signature((list[Progress], list[Progress], Limits), Plan),
        "place": Signature((Request, ClusterView), Placement),
        "admit": Signature((Request, Placement, ClusterView, SLO), bool),
        "double_check": Signature((Request, DecodeView, SLO), bool),
    }
)
"""Methods whose arguments are more than plain values. The last two answer whether the request passes."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Execute these cells, in order, in one namespace."""

    cells: list[str]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call a function by name, with plain arguments."""

    name: str
    arguments: list[Any]


class Make(msgspec.Struct, frozen=True, tag="make"):
    """Make an object of a class; the answer is its number."""

    name: str
    arguments: list[Any]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Call a method of an object; `quiet` ones send no answer, and their errors come with the next answer."""

    number: int
    method: str
    arguments: msgspec.Raw
    quiet: bool = False


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What came back, as msgpack."""

    value: msgspec.Raw
    reason: str = ""


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """What was raised instead."""

    kind: str
    """The exception's class."""
    message: str


Question = Load | Call | Make | Ask
Reply = Answer | Raised


def pack(message: Any) -> bytes:
    """A frame."""
    body = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """How many bytes follow a frame's head.

    Raises:
        ValueError: when it announces more than is allowed.
    """
    (length,) = _HEAD.unpack(head)
    if length > LONGEST_FRAME_BYTES:
        raise ValueError(f"a frame announces {length} bytes; allowed are {LONGEST_FRAME_BYTES}")
    return length


def read_frame(stream: io.BufferedIOBase) -> bytes | None:
    """The next frame's body; None at the end.

    Raises:
        ValueError: when the frame is too long.
    """
    head = stream.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    return stream.read(length_of(head))
