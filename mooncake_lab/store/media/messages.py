"""What a block server is asked, and what it answers: the bodies of frames, each of a declared type."""

from typing import Any, Final, Literal, TypeAlias

import msgspec

from mooncake_lab.store.media.medium import (
    AlreadyHeldError,
    DamagedBlockError,
    MediumFullError,
    NotHeldError,
)

PAGE_BLOCKS: Final = 128
"""Blocks in one answer to `Blocks`, so that its body stays bounded."""


class Name(msgspec.Struct, frozen=True, array_like=True):
    """A reservation, as both sides know it."""

    key: bytes
    sequence: int


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Set room aside; answered by `Reserved`."""

    key: bytes
    layer_bytes: tuple[int, ...]
    position: int


class Write(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Layers follow as payload, each with its checksum here; answered by `Done`."""

    name: Name
    first_layer: int
    checksums: tuple[int, ...]


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Make blocks readable; answered by `Done`."""

    names: tuple[Name, ...]


class Read(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Send layers; answered by `Layers` and a payload."""

    name: Name
    first_layer: int
    layers: int


class Free(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Give room back; answered by `Done`."""

    names: tuple[Name, ...]


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
    """The checksums of the layers that follow as payload."""

    checksums: tuple[int, ...]


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

    kind: Literal["full", "held", "not_held", "damaged", "value", "device"]
    reason: str


Question: TypeAlias = Reserve | Write | Commit | Read | Free | Blocks | Status
Answer: TypeAlias = Done | Reserved | Layers | Page | Room | Failed
QUESTIONS: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)
ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)

_KINDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (MediumFullError, "full"),
    (AlreadyHeldError, "held"),
    (NotHeldError, "not_held"),
    (DamagedBlockError, "damaged"),
    (ValueError, "value"),
    (OSError, "device"),
)


def failed(error: Exception) -> Failed:
    """The answer that says what went wrong."""
    kind: Any = next((kind for known, kind in _KINDS if isinstance(error, known)), "device")
    return Failed(kind, str(error)[:2000])


def error_of(answer: Failed) -> Exception:
    """What went wrong there, to be raised here."""
    return next(known for known, kind in _KINDS if kind == answer.kind)(answer.reason)
