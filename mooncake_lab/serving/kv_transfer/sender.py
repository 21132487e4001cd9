"""KVCache from worker to worker over authenticated TCP (arXiv §3: Messenger; FAST'25: Transfer Engine).

A worker has one sender per destination, a thread with a queue, so that no engine waits for a network. A request's
KVCache is acknowledged as a whole; an attempt whose connection breaks, stalls or is refused is reported as failed,
and the cluster places the request again. Where workers have a `TransferEngineChannel`, Mooncake's own Transfer
Engine moves the bytes, and the connection carries the other messages.
"""

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

import msgspec
import numpy as np

from mooncake_lab.engine.kv_layout import Bytes
from mooncake_lab.serving.kv_transfer import (
    Identity,
    RefusedByPeerError,
    borrow,
    dial,
    expect,
)
from mooncake_lab.serving.kv_transfer.transfer_engine import WINDOW_BYTES, TransferEngineChannel
from mooncake_lab.serving.messages import (
    Ack,
    CancelOrder,
    EndTransfer,
    Job,
    KVChunk,
    RemoteAddress,
    StartTransfer,
)
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.store.backends import StorageError, wire

MOST_WAITING_BYTES: Final = 2**30
"""Of KVCache that waits for one destination; then the engine waits, too."""
_Addressed = StartTransfer | KVChunk | EndTransfer | CancelOrder


@final
class KVSender:
    """Carries messages to one destination, in order, on a thread of its own. Mutable: it owns a connection.

    Args:
        port: of the destination.
        identity: what this worker shows to its peers.
        failed: told of each job that could not be delivered, and why.
        channel: takes the bytes of KVCache where the destination has one too; None sends them over the connection.
        link: that all senders of a worker share.
    """

    __slots__ = (
        "_carried",
        "_channel",
        "_failed",
        "_identity",
        "_is_broken",
        "_link",
        "_lost",
        "_open",
        "_peer",
        "_port",
        "_queue",
        "_room",
        "_thread",
        "_waiting_bytes",
        "_window",
    )

    def __init__(
        self,
        port: int,
        identity: Identity,
        failed: Callable[[Job, str], None],
        channel: TransferEngineChannel | None = None,
        link: PacedLink | None = None,
    ) -> None:
        self._link = link or PacedLink()
        self._port = port
        self._identity = identity
        self._failed = failed
        self._channel = channel
        self._window: RemoteAddress | None = None
        self._queue: queue.SimpleQueue[tuple[_Addressed, Sequence[Bytes]] | None] = queue.SimpleQueue()
        self._peer: socket.socket | None = None
        self._is_broken = False
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._carried = 0  # messages that wait or are under way, those of ended requests too
        self._open: set[Job] = set()
        self._lost: set[Job] = set()
        self._thread = threading.Thread(target=self._run, name=f"sender-{port}", daemon=True)
        self._thread.start()

    def send(self, message: _Addressed, payload: Sequence[Bytes] = ()) -> None:
        """Let a message wait for its turn, once there is room for it; its bytes must stay as they are."""
        size = sum(part.nbytes for part in payload)
        with self._room:
            self._room.wait_for(lambda: self._waiting_bytes + size <= max(size, MOST_WAITING_BYTES))
            self._waiting_bytes += size
            self._carried += 1
        self._queue.put((message, payload))

    def sever(self) -> None:
        """Break the connection, as a network would."""
        peer = self._peer
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    @property
    def is_stranded(self) -> bool:
        """Whether its connection has ended with nothing under way on it, and nothing waits to be carried."""
        with self._room:
            if self._carried or self._open:
                return False
        peer = self._peer
        return self._is_broken or (peer is not None and _has_ended(peer))

    def close(self) -> None:
        """Deliver what waits, then end."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            message, payload = item
            if message.job not in self._lost:
                try:
                    self._deliver(message, payload)
                except (OSError, StorageError) as error:
                    self._give_up(message.job, self._refusal() or str(error) or type(error).__name__)
            with self._room:
                self._waiting_bytes -= sum(part.nbytes for part in payload)
                self._carried -= 1
                self._room.notify()
            if isinstance(message, (EndTransfer, CancelOrder)):
                self._lost.discard(message.job)
        self._hang_up()

    def _deliver(self, message: _Addressed, payload: Sequence[Bytes]) -> None:
        if isinstance(message, StartTransfer):
            self._open.add(message.job)
            if self._peer is None:
                self._peer = dial(self._port, self._identity)
                self._is_broken = False
                if self._channel is not None:
                    self._window = borrow(self._peer, self._identity, WINDOW_BYTES)
        elif message.job not in self._open or self._peer is None:
            return  # cancelled before it began
        self._link.hold(sum(part.nbytes for part in payload))
        if isinstance(message, KVChunk) and self._channel is not None and self._window is not None:
            for cut, part in cuts(message, payload[0], WINDOW_BYTES):
                self._push(self._peer, self._channel, self._window, cut, part)
            return
        wire.send_frame(self._peer, message, payload, self._identity.timeout_s)
        if isinstance(message, EndTransfer):
            expect(self._peer, Ack, self._identity.timeout_s)
        if isinstance(message, (EndTransfer, CancelOrder)):
            self._open.discard(message.job)

    def _push(
        self,
        peer: socket.socket,
        channel: TransferEngineChannel,
        window: RemoteAddress,
        piece: KVChunk,
        parts: Sequence[Bytes],
    ) -> None:
        """Write into the window, and wait until it is free again; over the connection where memory is short."""
        pushed = channel.write(window, parts)
        rest = parts if pushed is None else ()
        wire.send_frame(peer, msgspec.structs.replace(piece, pushed=pushed), rest, self._identity.timeout_s)
        if pushed is not None:
            expect(peer, Ack, self._identity.timeout_s)

    def _give_up(self, job: Job, reason: str) -> None:
        """Close the connection, and report the jobs that were under way on it."""
        self._hang_up()
        self._is_broken = True
        jobs = self._open | {job}
        self._lost |= jobs
        self._open = set()
        for each in sorted(jobs, key=lambda job: (job.run, job.request_id, job.n)):
            self._failed(each, f"KVCache could not be delivered: {reason}")

    def _refusal(self) -> str | None:
        """The reason of a peer that refused before it closed the connection."""
        if self._peer is None:
            return None
        try:
            expect(self._peer, Ack, 0.2)
        except RefusedByPeerError as error:
            return str(error)
        except (OSError, StorageError):
            return None
        return None

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer, self._window = None, None


def _has_ended(peer: socket.socket) -> bool:
    """Whether the other side has closed the connection; reads nothing and does not wait."""
    try:
        poll = select.poll()  # `select` knows no file descriptor above 1023
        poll.register(peer, select.POLLIN)
        return bool(poll.poll(0)) and not peer.recv(1, socket.MSG_PEEK)
    except TimeoutError:  # what was there has been read meanwhile
        return False
    except (OSError, ValueError):  # closed meanwhile
        return True


def cuts(piece: KVChunk, payload: Bytes, most_bytes: int) -> Iterator[tuple[KVChunk, tuple[Bytes, Bytes]]]:
    """A chunk in parts of at most `most_bytes`, or of one token; keys and values of each."""
    keys, values = np.split(payload, 2)
    half = keys.nbytes // piece.tokens
    step = max(1, most_bytes // (2 * half))
    for first in range(0, piece.tokens, step):
        tokens = min(step, piece.tokens - first)
        where = slice(first * half, (first + tokens) * half)
        part = KVChunk(job=piece.job, layer=piece.layer, start=piece.start + first, tokens=tokens)
        yield part, (keys[where], values[where])


@final
class KVSenders:
    """One sender per destination. Mutable: it owns them."""

    __slots__ = ("_by_port", "_channel", "_failed", "_identity", "_link")

    def __init__(
        self,
        identity: Identity,
        failed: Callable[[Job, str], None],
        channel: TransferEngineChannel | None = None,
        link: PacedLink | None = None,
    ) -> None:
        self._link = link
        self._identity = identity
        self._failed = failed
        self._channel = channel
        self._by_port: dict[int, KVSender] = {}

    def to(self, port: int) -> KVSender:
        """The sender for a destination."""
        if port not in self._by_port:
            self._retire()
            self._by_port[port] = KVSender(port, self._identity, self._failed, self._channel, self._link)
        return self._by_port[port]

    def _retire(self) -> None:
        """End those whose connection has ended and that carry nothing: their worker may be gone."""
        for port in [port for port, sender in self._by_port.items() if sender.is_stranded]:
            self._by_port.pop(port).close()

    def close(self) -> None:
        """Break every connection, and end what waits for it."""
        self.sever()
        for sender in self._by_port.values():
            sender.close()
        self._by_port.clear()

    def sever(self) -> None:
        """Break every connection."""
        for sender in list(self._by_port.values()):
            sender.sever()
