"""Where a worker receives: KVCache of requests that it will decode, and requests for blocks that it holds."""

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

import numpy as np
import torch

from mooncake_lab.engine import KVSpan
from mooncake_lab.engine.kv_layout import Bytes, KVLayout, bytes_of
from mooncake_lab.net import wire
from mooncake_lab.net.listener import Listener
from mooncake_lab.net.wire import ProtocolError
from mooncake_lab.serving import messages
from mooncake_lab.serving.kv_transfer import Identity, LayerStream
from mooncake_lab.serving.kv_transfer.transfer_engine import Buffer, TransferEngineChannel
from mooncake_lab.serving.messages import Job
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.store.backends import StorageError

_IDLE_S: Final = 3600.0
_MOST_PROBE_BYTES: Final = 2**26
_MOST_KEYS: Final = 8192


class Move(NamedTuple):
    """Bytes that arrived, from the first of them to the last."""

    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedKV:
    """A request's KVCache, complete."""

    job: Job
    kv: KVSpan
    first_token: int
    moves: tuple[Move, ...]
    reports: tuple[messages.PromptEvent, ...]
    """What its prefill worker reported of it."""
    answer: messages.AnswerBlocks | None = None
    """What the tokens are, where they are of an answer that is to be kept."""


@dataclass(slots=True, kw_only=True)
class PartialKV:
    """A request whose KVCache is arriving. Mutable: it fills up."""

    tokens: int
    layers: tuple[torch.Tensor, ...]
    covered: list[int]
    """Tokens of each layer that are here, from the front."""
    moves: list[Move] = field(default_factory=list[Move])


@dataclass(slots=True, kw_only=True, eq=False)
class Connection:
    """One connection. Mutable: requests come in over it."""

    peer: socket.socket
    lent: contextlib.ExitStack
    """Gives memory back when the connection ends."""
    coming: dict[Job, PartialKV] = field(default_factory=dict[Job, PartialKV])
    buffer: Buffer | None = None
    """Memory that a Transfer Engine may write."""

    def take_pushed(self, parts: Sequence[Bytes], pushed: messages.RemoteWrite) -> float:
        """Copy what such an engine has written; when it began to (s)."""
        if self.buffer is None:
            raise ProtocolError("a message refers to pushed bytes, but no buffer was lent to this connection")
        now_s = time.monotonic()
        if not 0 <= pushed.start_s <= now_s:
            raise ProtocolError(
                f"a push began at {pushed.start_s:g} s; allowed are 0 to {now_s:g} s, which is now"
            )
        self.buffer.copy_to(parts, pushed)
        return pushed.start_s


@final
class KVReceiver:
    """Listens for other workers of the cluster until the process ends. Mutable: it owns a port and threads.

    Args:
        identity: what this worker shows to its peers; peers must know the same token and model.
        layout: of the KVCache.
        most_tokens: of one request.
        delivered: told of each complete request, on the thread of its connection.
        give: the leading blocks of keys that others ask for, for an attempt.
        each_layer: whether each piece's move is told, or one for all of them.
        channel: lends memory that peers may write; None lends none.
        link: carries the blocks that others ask for.
    """

    def __init__(
        self,
        identity: Identity,
        layout: KVLayout,
        *,
        most_tokens: int,
        delivered: Callable[[ReceivedKV], None],
        give: Callable[[Job, Sequence[bytes]], LayerStream],
        each_layer: bool = False,
        channel: TransferEngineChannel | None = None,
        link: PacedLink | None = None,
    ) -> None:
        self._link = link or PacedLink()
        self._identity = identity
        self._layout = layout
        self._token_bytes = layout.layer_bytes // layout.block_tokens  # in one layer
        self._most_tokens = most_tokens
        self._delivered = delivered
        self._give = give
        self._each_layer = each_layer
        self._channel = channel
        self._listener = Listener(
            identity.name,
            identity.token,
            self._serve,
            refused=_refuse,
            timeout_s=identity.timeout_s,
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._listener.address[1]

    def sever(self) -> None:
        """Break every connection, as a network would."""
        self._listener.sever()

    def close(self) -> None:
        """Stop listening, and break every connection."""
        self._listener.close()

    def _serve(self, peer: socket.socket, fingerprint: bytes) -> None:
        if fingerprint != self._layout.fingerprint:
            raise ProtocolError(f"the peer runs another model than {self._identity.name}")
        self._reply(peer, messages.Ack())
        try:
            self._receive_messages(peer)
        except StorageError as error:  # of its cache or its Transfer Engine; the peer is told why
            raise ProtocolError(str(error)) from error

    def _receive_messages(self, peer: socket.socket) -> None:
        with contextlib.ExitStack() as lent:
            connection = Connection(peer=peer, lent=lent)
            while True:
                message, size = wire.receive_message(
                    peer, messages.TRANSFER_MESSAGES, self._identity.timeout_s, idle_s=_IDLE_S
                )
                if size and not isinstance(message, (messages.KVChunk, messages.Probe)):
                    raise ProtocolError(f"a {type(message).__name__} with {size} bytes behind it; allowed are 0")
                self._take(connection, message, size)

    def _take(self, connection: Connection, message: messages.TransferMessage, size: int) -> None:
        match message:
            case messages.AllocBuffer():
                self._reply(connection.peer, messages.BufferGranted(self._lend(connection, message.bytes)))
            case messages.StartTransfer():
                connection.coming[message.job] = self._begin(message)
            case messages.KVChunk():
                self._piece(connection, message, size)
            case messages.EndTransfer():
                self._end(message, connection.coming)
                self._reply(connection.peer, messages.Ack())
            case messages.CancelOrder():
                connection.coming.pop(message.job, None)
            case messages.GetBlocks():
                self._answer(connection.peer, message)
            case messages.Probe():
                self._probe(connection, message, size)
                self._reply(connection.peer, messages.Ack())
            case _:
                raise ProtocolError(f"a {type(message).__name__} answers a message; a receiver has sent none")

    def _reply(self, peer: socket.socket, message: messages.TransferMessage) -> None:
        wire.send_frame(peer, message, (), self._identity.timeout_s)

    def _begin(self, message: messages.StartTransfer) -> PartialKV:
        if not 0 < message.tokens <= self._most_tokens:
            raise ProtocolError(f"a request of {message.tokens} tokens; allowed are 1 to {self._most_tokens}")
        layers = self._layout.empty(message.tokens)
        return PartialKV(tokens=message.tokens, layers=layers, covered=[0] * len(layers))

    def _lend(self, connection: Connection, size_bytes: int) -> messages.RemoteAddress | None:
        if connection.buffer is not None:
            raise ProtocolError("a second buffer for one connection; allowed is 1")
        if self._channel is not None:
            connection.buffer = self._channel.lend(size_bytes, connection.lent)
        return None if connection.buffer is None else connection.buffer.where

    def _piece(self, connection: Connection, message: messages.KVChunk, size: int) -> None:
        into = connection.coming.get(message.job)
        if into is None:
            raise ProtocolError(f"a piece of {message.job}, which never began here")
        stop = message.start + message.tokens
        moved = message.tokens * self._token_bytes
        follow = moved if message.pushed is None else 0
        if not 0 <= message.layer < len(into.layers):
            raise ProtocolError(f"a piece of layer {message.layer}; allowed are 0 to {len(into.layers) - 1}")
        if not 0 <= message.start < stop <= into.tokens:
            raise ProtocolError(f"a piece of tokens {message.start} to {stop}; the request has {into.tokens}")
        if message.start > into.covered[message.layer]:
            raise ProtocolError(
                f"a piece of layer {message.layer} begins at token {message.start}; the one before it ended at"
                f" {into.covered[message.layer]}"
            )
        if size != follow:
            raise ProtocolError(
                f"a piece of {message.tokens} tokens with {size} bytes behind it; it needs {follow}"
            )
        start_s = time.monotonic()
        place = into.layers[message.layer]
        parts = [bytes_of(half[message.start : stop]) for half in place]  # keys, then values
        if message.pushed is None:
            wire.receive_into(connection.peer, parts, self._identity.timeout_s)
        else:
            start_s = connection.take_pushed(parts, message.pushed)
            self._reply(connection.peer, messages.Ack())
        into.covered[message.layer] = max(into.covered[message.layer], stop)
        into.moves.append(Move(start_s, time.monotonic(), moved))

    def _end(self, message: messages.EndTransfer, coming: dict[Job, PartialKV]) -> None:
        done = coming.pop(message.job, None)
        if done is None:
            raise ProtocolError(f"the end of {message.job}, which never began here")
        if min(done.covered) < done.tokens:
            raise ProtocolError(f"{message.job} ends before all of its KVCache came: a layer lacks tokens")
        answer, size = message.answer, self._layout.block_tokens
        if answer is not None and len(answer.keys) * size != done.tokens:
            blocks = f"{len(answer.keys)} keys of an answer for {done.tokens} tokens"
            raise ProtocolError(f"{blocks}; allowed is one for each block of {size}")
        moves = done.moves
        if not self._each_layer:
            moves = [Move(moves[0].start_s, moves[-1].end_s, sum(move.bytes for move in moves))]
        self._delivered(
            ReceivedKV(
                job=message.job,
                kv=self._layout.span(done.layers),
                first_token=message.first_token,
                moves=tuple(moves),
                reports=message.reports,
                answer=answer,
            )
        )

    def _answer(self, peer: socket.socket, message: messages.GetBlocks) -> None:
        if len(message.keys) > _MOST_KEYS:
            raise ProtocolError(f"a request for {len(message.keys)} blocks; allowed are {_MOST_KEYS}")
        sent_layers, into = 0, message.into
        for layer in self._give(message.job, message.keys):
            payload = bytes_of(layer)
            self._link.hold(payload.nbytes)
            pushed = None if self._channel is None or into is None else self._channel.write(into, [payload])
            rest = () if pushed else (payload,)
            wire.send_frame(peer, messages.Blocks(len(layer), pushed), rest, self._identity.timeout_s)
            sent_layers += 1
            if into is not None:
                into = messages.RemoteAddress(into.segment, into.address + payload.nbytes)
        if sent_layers < self._layout.layers:
            self._reply(peer, messages.Blocks(0))

    def _probe(self, connection: Connection, message: messages.Probe, size: int) -> None:
        if size and message.pushed is not None:
            raise ProtocolError(f"a probe that was pushed, with {size} bytes behind it; allowed are 0")
        if not 0 <= message.pushed_bytes <= _MOST_PROBE_BYTES - size:
            raise ProtocolError(f"a probe of {size + message.pushed_bytes} bytes; allowed are {_MOST_PROBE_BYTES}")
        if message.pushed is not None:
            connection.take_pushed([np.empty(message.pushed_bytes, np.uint8)], message.pushed)
            return
        wire.skip(connection.peer, size, self._identity.timeout_s)


def _refuse(peer: socket.socket, reason: str) -> None:
    """Send the reason, and read on for a moment: closing with unread bytes would destroy it."""
    with contextlib.suppress(OSError, StorageError):
        wire.send_frame(peer, messages.TransferRefused(reason[:1000]), (), 1.0)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(0.5)
        for _ in range(256):
            if not peer.recv(2**16):
                return
