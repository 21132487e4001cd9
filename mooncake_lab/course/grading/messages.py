"""What a grader and a submission say to each other: plain data, typed, over a pipe.

The submission runs in a process of its own and is believed nothing: it answers questions, and the grader checks
the answers. They are framed as everywhere in this package (`net.frames`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, Final, Literal, NamedTuple

import msgspec

from mooncake_lab.batching import Limits, Plan, Progress
from mooncake_lab.conductor import ClusterView, DecodeView, Placement, Rejection
from mooncake_lab.core import KIB, MIB, SLO, BlockKey, Request
from mooncake_lab.net import frames

LONGEST_QUESTION_BYTES: Final = 16 * MIB
LONGEST_ANSWER_BYTES: Final = 64 * KIB
"""No answer that is asked for comes near it."""
_ANY_BYTES: Final = 2**32 - 1
"""A frame that is too large is refused by the side that reads it."""


class Passes(msgspec.Struct, frozen=True, tag="passes"):
    """A request may go on: on arrival with the placement that was returned, at the decode instance with none."""

    placement: Placement | None


class Refuses(msgspec.Struct, frozen=True, tag="refuses"):
    """A request may not go on."""

    rejection: Rejection


Verdict = Passes | Refuses


class Signature(NamedTuple):
    """The types of a method's arguments, as stores, engines and clusters pass them, and of what it answers."""

    takes: tuple[Any, ...]
    gives: Any


SIGNATURES: Final[Mapping[str, Signature]] = MappingProxyType(
    {
        "touch": Signature((BlockKey,), None),
        "insert": Signature((BlockKey, int), None),
        "remove": Signature((BlockKey,), None),
        "victim": Signature((BlockKey | None, frozenset[BlockKey]), BlockKey),
        "__len__": Signature((), int),
        "__contains__": Signature((BlockKey,), bool),
        "plan": Signature((tuple[Progress, ...], tuple[Progress, ...], Limits), Plan),
        "place": Signature((Request, ClusterView), Placement),
        "admit": Signature((Request, Placement, ClusterView, SLO), Verdict),
        "double_check": Signature((Request, DecodeView, SLO), Verdict),
    }
)
"""Every method of a policy that the grader asks. Arguments at the end that have a default may be left out."""


class Code(NamedTuple):
    """A cell to execute."""

    name: str
    text: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Execute these cells, in order, in one namespace; the answer lists what went wrong in which.

    A cell that raises does not keep those behind it from being executed, as in a notebook that is run to its end.
    """

    cells: list[Code]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call a function by name, with plain arguments."""

    name: str
    arguments: list[Any]


class Make(msgspec.Struct, frozen=True, tag="make"):
    """Make an object of a class; the answer is its number."""

    name: str
    arguments: list[Any]


EstimatorName = Literal["paper", "round"]
"""Of the paper's nodes, as clusters have it; of round numbers, as the laws of admission have it."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Call a method of an object; `quiet` ones send no answer, and their errors come with the next answer."""

    number: int
    method: str
    arguments: msgspec.Raw
    quiet: bool = False
    estimate: EstimatorName = "paper"
    """The estimator that the method gets, if it gets one."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What came back, as msgpack."""

    value: msgspec.Raw


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """What was raised instead."""

    kind: str
    """The exception's class."""
    message: str


Question = Load | Call | Make | Ask
Reply = Answer | Raised


def pack(message: Any) -> bytes:
    """A frame."""
    return frames.encode(message, max_body_bytes=_ANY_BYTES)


def length_of(header: bytes, most_bytes: int) -> int:
    """How many bytes follow the header of a frame.

    Raises:
        ProtocolError: when it is no frame, or announces more than is allowed.
    """
    return frames.decode_header(header, max_body_bytes=most_bytes, max_payload_bytes=0)[0]


def read_question(stream: BinaryIO) -> bytes | None:
    """The next frame's body, as the submission's side reads it; None at the end.

    Raises:
        ProtocolError: when it is no frame, or too long.
    """
    return frames.read_body(stream, max_body_bytes=LONGEST_QUESTION_BYTES)
