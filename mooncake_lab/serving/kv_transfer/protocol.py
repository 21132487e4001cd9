"""What workers send each other to move KVCache: messages, some with bytes behind them, over authenticated TCP."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
import torch

from mooncake_lab.cluster import PrefillDone
from mooncake_lab.serving.messages import CancelOrder, Job
from mooncake_lab.store.backends import ProtocolError, StorageError, wire

_Message = TypeVar("_Message")

LayerStream: TypeAlias = Iterator[torch.Tensor]
"""The leading blocks of a prefix, layer by layer: tensors (blocks, *`KVLayout.layer_shape`) on the CPU.

The number of blocks may shrink; when none is left the stream ends early."""
HOST: Final = "127.0.0.1"
"""Workers of one machine are connected over loopback."""


class StartTransfer(msgspec.Struct, frozen=True, kw_only=True, tag=61):
    """KVCache of a request follows, in any order of pieces."""

    job: Job
    tokens: int


class RemoteAddress(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a process of this machine, as Transfer Engines name it."""

    segment: Annotated[str, msgspec.Meta(pattern=r"^127\.0\.0\.1:[0-9]{1,5}$")]
    address: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class RemoteWrite(msgspec.Struct, frozen=True, array_like=True):
    """A Transfer Engine has written the bytes into the memory that was lent."""

    checksum: int
    start_s: float


class AllocBuffer(msgspec.Struct, frozen=True, tag=69):
    """Lend this connection memory that a Transfer Engine may write; answered by `BufferGranted`."""

    bytes: Annotated[int, msgspec.Meta(ge=1, le=2**30)]


class BufferGranted(msgspec.Struct, frozen=True, tag=70):
    """Here, or nowhere: then the connection carries the bytes."""

    where: RemoteAddress | None


class KVChunk(msgspec.Struct, frozen=True, kw_only=True, tag=62):
    """Keys, then values, of some tokens of one layer follow as bytes; or were pushed, which `Ack` answers."""

    job: Job
    layer: int
    start: int
    tokens: int
    pushed: RemoteWrite | None = None


class EndTransfer(msgspec.Struct, frozen=True, kw_only=True, tag=63):
    """That was all of it; answered by `Ack`."""

    job: Job
    first_token: int
    prefilled: PrefillDone
    """How the prefill was: its worker may go down before it reports that."""


class GetBlocks(msgspec.Struct, frozen=True, tag=64):
    """Send these blocks, as far as you have them; answered by a `Blocks` for each layer, or one of 0 blocks."""

    job: Job
    """Whose prefix they are."""
    keys: tuple[bytes, ...]
    into: RemoteAddress | None = None
    """Memory that a Transfer Engine may write each layer of them to, one behind the other."""


class Blocks(msgspec.Struct, frozen=True, tag=65):
    """The next layer of this number of leading blocks, never more than before, follows as bytes or was pushed."""

    blocks: int
    pushed: RemoteWrite | None = None


class Probe(msgspec.Struct, frozen=True, tag=66):
    """Bytes follow, which are discarded and answered by `Ack`: a measurement."""

    pushed: RemoteWrite | None = None
    """Or this number of bytes was pushed."""
    pushed_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class Ack(msgspec.Struct, frozen=True, tag=67):
    """What was sent has arrived, or the connection is accepted."""


class TransferRefused(msgspec.Struct, frozen=True, tag=68):
    """What was sent is refused for this reason; the connection ends."""

    reason: str


TransferMessage: TypeAlias = (
    StartTransfer
    | KVChunk
    | EndTransfer
    | CancelOrder
    | GetBlocks
    | Blocks
    | Probe
    | Ack
    | TransferRefused
    | AllocBuffer
    | BufferGranted
)
"""What workers send each other."""

TRANSFER_MESSAGES: Final[msgspec.msgpack.Decoder[TransferMessage]] = msgspec.msgpack.Decoder(TransferMessage)


class RefusedByPeerError(StorageError, ConnectionError):
    """The other worker refused, with its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a worker uses to connect to its peers."""

    name: str
    token: bytes
    fingerprint: bytes
    timeout_s: float


def dial(port: int, identity: Identity) -> socket.socket:
    """A connection to another worker of the same cluster and model, which has accepted it with an `Ack`.

    Raises:
        OSError: when there is no such worker, or it stalls.
        StorageError: when one side refuses the other.
    """
    peer = wire.connect((HOST, port), identity.token, identity.fingerprint, identity.timeout_s)
    try:
        expect(peer, Ack, identity.timeout_s)
    except BaseException:
        peer.close()
        raise
    return peer


def expect(peer: socket.socket, kind: type[_Message], timeout_s: float) -> tuple[_Message, int]:
    """The next message, when it is of this kind, and the bytes that follow it.

    Raises:
        RefusedByPeerError: when the peer refuses.
        ProtocolError: when it is of another kind, or none.
        OSError: when the peer is gone or stalls.
    """
    message, size = wire.receive_message(peer, TRANSFER_MESSAGES, timeout_s)
    if isinstance(message, TransferRefused):
        raise RefusedByPeerError(message.reason)
    if not isinstance(message, kind):
        raise ProtocolError(f"a {type(message).__name__} where a {kind.__name__} was expected")
    return message, size


def borrow(peer: socket.socket, identity: Identity, size_bytes: int) -> RemoteAddress | None:
    """Memory of a peer for the rest of this connection; None where it lends none. For its errors see `expect`."""
    wire.send_frame(peer, AllocBuffer(size_bytes), (), identity.timeout_s)
    return expect(peer, BufferGranted, identity.timeout_s)[0].where
