"""KVCache from worker to worker over authenticated TCP (arXiv §3: Messenger; FAST'25: Transfer Engine).

A worker has one sender per destination, a queue and a thread, so that no engine waits for a network. A request's
KVCache is acknowledged as a whole; an attempt whose connection breaks, stalls or is refused is reported as failed,
and the cluster places the request again. Where workers have a `TransferEngineChannel`, Mooncake's own Transfer
Engine moves the bytes, and the connection carries the other messages.
"""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

import msgspec
import numpy as np

from mooncake_lab.engine.kv_layout import Bytes
from mooncake_lab.net import wire
from mooncake_lab.serving import messages
from mooncake_lab.serving.kv_transfer import Identity, RefusedByPeerError, borrow, dial, expect
from mooncake_lab.serving.kv_transfer.transfer_engine import BUFFER_BYTES, TransferEngineChannel
from mooncake_lab.serving.messages import Job
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.store.backends import StorageError

MOST_WAITING_BYTES: Final = 2**30
"""KVCache that may wait for one destination; with more, the engine waits, too."""
_IDLE_S: Final = 60.0
"""Without a message for so long a sender closes its connection, and opens another one for the next."""
_Addressed = messages.StartTransfer | messages.KVChunk | messages.EndTransfer | messages.CancelOrder


@final
class KVSender:
    """Carries messages to one destination, in order, on a thread. Mutable: it owns that and a connection.

    Args:
        port: of the destination.
        identity: what this worker shows to its peers.
        failed: told of each job that could not be delivered, and why.
        channel: takes the bytes of KVCache where the destination has one too; None sends them over the connection.
        link: that all senders of a worker share.
    """

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
        self._buffer: messages.RemoteAddress | None = None
        self._peer: socket.socket | None = None
        self._open: set[Job] = set()
        self._lost: set[Job] = set()
        self._queue: deque[tuple[_Addressed, Sequence[Bytes], Callable[[], object] | None]] = deque()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None  # while it has something to do
        self._is_closed = False
        self._changed = threading.Condition()  # guards these four

    def send(
        self, message: _Addressed, payload: Sequence[Bytes] = (), *, wait: Callable[[], object] | None = None
    ) -> None:
        """Let a message wait for its turn, once there is room for it; its bytes must stay as they are.

        Where they are still on their way from a device, `wait` returns when they are there.
        """
        size = sum(part.nbytes for part in payload)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes + size <= max(size, MOST_WAITING_BYTES))
            self._waiting_bytes += size
            self._queue.append((message, payload, wait))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"sender-{self._port}", daemon=True)
                self._thread.start()

    def sever(self) -> None:
        """Break the connection, as a network would."""
        peer = self._peer
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Deliver what waits, then end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            message, payload, wait = item
            if message.job not in self._lost:
                try:
                    if wait is not None:
                        wait()
                    self._deliver(message, payload)
                except (OSError, StorageError) as error:
                    self._give_up(message.job, self._refusal() or str(error) or type(error).__name__)
            with self._changed:
                self._waiting_bytes -= sum(part.nbytes for part in payload)
                self._changed.notify_all()
            if isinstance(message, (messages.EndTransfer, messages.CancelOrder)):
                self._lost.discard(message.job)

    def _next(self) -> tuple[_Addressed, Sequence[Bytes], Callable[[], object] | None] | None:
        """The next message; None after an idle time in which the destination may have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed, None if self._open else _IDLE_S)
            if self._queue:
                return self._queue.popleft()
            self._hang_up()
            self._thread = None
            return None

    def _deliver(self, message: _Addressed, payload: Sequence[Bytes]) -> None:
        if isinstance(message, messages.StartTransfer):
            self._open.add(message.job)
            if self._peer is None:
                self._peer = dial(self._port, self._identity)
                if self._channel is not None:
                    self._buffer = borrow(self._peer, self._identity, BUFFER_BYTES)
        elif message.job not in self._open or self._peer is None:
            return  # cancelled before it began
        self._link.hold(sum(part.nbytes for part in payload))
        if isinstance(message, messages.KVChunk) and self._channel is not None and self._buffer is not None:
            for cut, part in cuts(message, payload[0], BUFFER_BYTES):
                self._push(self._peer, self._channel, self._buffer, cut, part)
            return
        wire.send_frame(self._peer, message, payload, self._identity.timeout_s)
        if isinstance(message, messages.EndTransfer):
            expect(self._peer, messages.Ack, self._identity.timeout_s)
        if isinstance(message, (messages.EndTransfer, messages.CancelOrder)):
            self._open.discard(message.job)

    def _push(
        self,
        peer: socket.socket,
        channel: TransferEngineChannel,
        buffer: messages.RemoteAddress,
        piece: messages.KVChunk,
        parts: Sequence[Bytes],
    ) -> None:
        """Write into the buffer, and wait until it is free again; over the connection where memory is short."""
        pushed = channel.write(buffer, parts)
        rest = parts if pushed is None else ()
        wire.send_frame(peer, msgspec.structs.replace(piece, pushed=pushed), rest, self._identity.timeout_s)
        if pushed is not None:
            expect(peer, messages.Ack, self._identity.timeout_s)

    def _give_up(self, job: Job, reason: str) -> None:
        """Close the connection, and report the jobs that were under way on it."""
        self._hang_up()
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
            expect(self._peer, messages.Ack, 0.2)
        except RefusedByPeerError as error:
            return str(error)
        except (OSError, StorageError):
            return None
        return None

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer, self._buffer = None, None


def cuts(
    piece: messages.KVChunk, payload: Bytes, most_bytes: int
) -> Iterator[tuple[messages.KVChunk, tuple[Bytes, Bytes]]]:
    """A chunk in parts of at most `most_bytes`, or of one token; keys and values of each."""
    keys, values = np.split(payload, 2)
    half = keys.nbytes // piece.tokens
    step = max(1, most_bytes // (2 * half))
    for first in range(0, piece.tokens, step):
        tokens = min(step, piece.tokens - first)
        where = slice(first * half, (first + tokens) * half)
        part = messages.KVChunk(job=piece.job, layer=piece.layer, start=piece.start + first, tokens=tokens)
        yield part, (keys[where], values[where])


@final
class KVSenders:
    """One sender per destination. Mutable: it owns them."""

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
            self._by_port[port] = KVSender(port, self._identity, self._failed, self._channel, self._link)
        return self._by_port[port]

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
