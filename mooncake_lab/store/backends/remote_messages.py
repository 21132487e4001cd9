"""The bodies of the frames between a remote backend and a block server, each of a declared type."""

import errno
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from mooncake_lab.store.backends.base import (
    MAX_KEY_BYTES,
    BlockExistsError,
    BlockNotFoundError,
    DamagedBlockError,
    Reservation,
    StorageError,
    StorageFullError,
    SuspectBlockError,
)


class Name(msgspec.Struct, frozen=True, array_like=True):
    """A reservation, as both sides know it."""

    key: Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]
    sequence: int


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Reserve space; answered by `Reserved`."""

    key: bytes
    layer_bytes: tuple[int, ...]
    position: int


class Write(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The payload is layers, then the checksum of each; answered by `Done`."""

    name: Name
    first_layer: int
    layers: int


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Make the blocks readable whose names are the payload; answered by `Done`."""


class Read(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Send layers; answered by `Layers`."""

    name: Name
    first_layer: int
    layers: int


class FreeBlocks(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Release the space of the blocks whose names are the payload; answered by `Done`."""


class ListBlocks(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """List the committed blocks of this model; answered by `Listing`."""


class Status(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Report capacity and use; answered by `Room`."""


class Find(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """List the committed blocks of this model whose keys are the payload; answered by `Listing`."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The question was carried out."""


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """The space of a block."""

    block: Reservation


class Layers(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The payload is the layers, then the checksum of each."""


class Listing(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """The payload is the committed blocks, oldest first."""


class Room(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """The bytes of the backend, and those in use."""

    capacity_bytes: int
    used_bytes: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """The question could not be carried out, in the terms of the contract."""

    kind: Literal["full", "held", "not_held", "damaged", "doubtful", "value", "device"]
    reason: str
    error: str | None = None
    """The name of the system's error number, such as EACCES; numbers differ between systems."""


Question: TypeAlias = Reserve | Write | Commit | Read | FreeBlocks | ListBlocks | Find | Status
Answer: TypeAlias = Done | Reserved | Layers | Listing | Room | Failed
QUESTIONS: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)
ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
MAX_NAMES: Final = 2**16
"""In one question; they are a payload, since a body is bounded."""
MAX_NAMES_BYTES: Final = MAX_NAMES * (MAX_KEY_BYTES + 16)
MAX_LISTING_BYTES: Final = 2**28
KEYS: Final = msgspec.msgpack.Decoder(
    Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)], ...], msgspec.Meta(max_length=MAX_NAMES)
    ]
)
NAMES: Final = msgspec.msgpack.Decoder(Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMES)])
LISTING: Final = msgspec.msgpack.Decoder(tuple[Reservation, ...])

_KINDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (StorageFullError, "full"),
    (BlockExistsError, "held"),
    (BlockNotFoundError, "not_held"),
    (DamagedBlockError, "damaged"),
    (SuspectBlockError, "doubtful"),
    (ValueError, "value"),
    (OSError, "device"),
)


def name_of(block: Reservation) -> Name:
    """The name of a reservation."""
    return Name(block.key, block.sequence)


def key_space(fingerprint: bytes) -> bytes:
    """The prefix of every key of a model on the server; no prefix begins another."""
    return bytes([len(fingerprint)]) + fingerprint


def failed(error: Exception) -> Failed:
    """The answer that reports an error."""
    kind: Any = next((kind for known, kind in _KINDS if isinstance(error, known)), "device")
    if isinstance(error, OSError) and error.errno is not None:
        return Failed(kind, str(error.strerror)[:2000], errno.errorcode.get(error.errno))
    return Failed(kind, str(error)[:2000])


def error_of(answer: Failed, question: Question) -> Exception:
    """The server's error, to be raised by the client.

    Only a commit may be wrong in a way that the client cannot check first: layers that are missing. Any other
    `ValueError` of the server is not a mistake of the caller.
    """
    if answer.kind == "value" and not isinstance(question, Commit):
        return StorageError(f"the server refuses a {type(question).__name__}: {answer.reason}")
    number = next((number for number, name in errno.errorcode.items() if name == answer.error), None)
    if answer.kind == "device" and number is not None:
        return OSError(number, f"the server reports: {answer.reason}")
    return next(known for known, kind in _KINDS if kind == answer.kind)(answer.reason)
