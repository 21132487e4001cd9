"""KVCache between workers: layer by layer to the decode worker, and prefix blocks from one that holds them."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import torch

from mooncake_lab.net import wire
from mooncake_lab.net.wire import ProtocolError
from mooncake_lab.serving import messages
from mooncake_lab.store.backends import StorageError

_Message = TypeVar("_Message")

LayerStream: TypeAlias = Iterator[torch.Tensor]
"""The leading blocks of a prefix, layer by layer: tensors (blocks, *`KVLayout.layer_shape`) on the CPU.

The number of blocks may shrink; when none is left the stream ends early."""
HOST: Final = "127.0.0.1"
"""Workers of one machine are connected over loopback."""


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
        expect(peer, messages.Ack, identity.timeout_s)
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
    message, size = wire.receive_message(peer, messages.TRANSFER_MESSAGES, timeout_s)
    if isinstance(message, messages.TransferRefused):
        raise RefusedByPeerError(message.reason)
    if not isinstance(message, kind):
        raise ProtocolError(f"a {type(message).__name__} where a {kind.__name__} was expected")
    return message, size


def borrow(peer: socket.socket, identity: Identity, size_bytes: int) -> messages.RemoteAddress | None:
    """Memory of a peer for the rest of this connection; None where it lends none. For its errors see `expect`."""
    wire.send_frame(peer, messages.AllocBuffer(size_bytes), (), identity.timeout_s)
    return expect(peer, messages.BufferGranted, identity.timeout_s)[0].where
