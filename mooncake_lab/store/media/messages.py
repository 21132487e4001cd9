"""What a block server is asked, and what it answers: the bodies of frames, each of a declared type."""

import errno
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from mooncake_lab.store.media.medium import (
    MAX_KEY_BYTES,
    AlreadyHeldError,
    DamagedBlockError,
    DoubtfulBlockError,
    MediumError,
    MediumFullError,
    NotHeldError,
)

PAGE_BLOCKS: Final = 128
"""Blocks in one answer to `Blocks`: at most so many, and fewer when their layers are many."""


class Name(msgspec.Struct, frozen=True, array_like=True):
    """A reservation, as both sides know it."""

    key: Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]
    sequence: int


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Set room aside; answered by `Reserved`."""

    key: bytes
    layer_bytes: tuple[int, ...]
    position: int


class Write(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Layers follow as payload, and then the checksum of each; answered by `Done`."""

    name: Name
    first_layer: int
    layers: int


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Make blocks readable whose `Names` follow as payload; answered by `Done`."""


class Read(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Send layers; answered by `Layers`."""

    name: Name
    first_layer: int
    layers: int


class Free(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Give the room of blocks back whose `Names` follow as payload; answered by `Done`."""


class Blocks(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """List committed blocks of this model after a sequence number; answered by `Page`."""

    after: int


class Status(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """How large and how full; answered by `Room`."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """It is done."""


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Where the block is to lie."""

    key: bytes
    layer_bytes: tuple[int, ...]
    position: int
    offset_bytes: int
    sequence: int


class Layers(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The layers that were asked for follow as payload, and then the checksum of each."""


class Page(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Some committed blocks, oldest first, and whether there are more."""

    blocks: tuple[Reserved, ...]
    more: bool


class Room(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """Bytes there are, and bytes in use."""

    capacity_bytes: int
    used_bytes: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """It could not be done, in the contract's own terms."""

    kind: Literal["full", "held", "not_held", "damaged", "doubtful", "value", "device"]
    reason: str
    error: str | None = None
    """The name of the system's error number, such as EACCES; numbers differ between systems."""


Question: TypeAlias = Reserve | Write | Commit | Read | Free | Blocks | Status
Answer: TypeAlias = Done | Reserved | Layers | Page | Room | Failed
QUESTIONS: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)
ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
MOST_NAMES: Final = 2**16
"""In one question; they are a payload, since a body is bounded."""
MOST_NAMES_BYTES: Final = MOST_NAMES * (MAX_KEY_BYTES + 16)
NAMES: Final = msgspec.msgpack.Decoder(Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_NAMES)])

_KINDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (MediumFullError, "full"),
    (AlreadyHeldError, "held"),
    (NotHeldError, "not_held"),
    (DamagedBlockError, "damaged"),
    (DoubtfulBlockError, "doubtful"),
    (ValueError, "value"),
    (OSError, "device"),
)


def failed(error: Exception) -> Failed:
    """The answer that says what went wrong."""
    kind: Any = next((kind for known, kind in _KINDS if isinstance(error, known)), "device")
    if isinstance(error, OSError) and error.errno is not None:
        return Failed(kind, str(error.strerror)[:2000], errno.errorcode.get(error.errno))
    return Failed(kind, str(error)[:2000])


def error_of(answer: Failed, question: Question) -> Exception:
    """What went wrong there, to be raised here.

    Only a commit may be wrong in a way that its asker cannot see: layers that are missing. All other values were
    looked at before they were sent, so that what the server says of them is no mistake of the caller.
    """
    if answer.kind == "value" and not isinstance(question, Commit):
        return MediumError(f"the server refuses a {type(question).__name__}: {answer.reason}")
    number = next((number for number, name in errno.errorcode.items() if name == answer.error), None)
    if answer.kind == "device" and number is not None:
        return OSError(number, f"the server says: {answer.reason}")
    return next(known for known, kind in _KINDS if kind == answer.kind)(answer.reason)
