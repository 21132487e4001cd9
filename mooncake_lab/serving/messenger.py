"""The Messenger: KVCache from worker to worker over authenticated TCP (arXiv §3; FAST'25: Transfer Engine).

Where workers have a `Lane`, Mooncake's own Transfer Engine moves the bytes, and the connection only words.

A sender has one courier a destination, a thread with a queue, so that no engine waits for a network. Every
request's KVCache is acknowledged as a whole; an attempt whose connection breaks, stalls or is refused is reported
as trouble, and the cluster places the request again. A receiver believes no length that it has not compared with
its bound.
"""

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import msgspec
import numpy as np

from mooncake_lab.engine.kv_layout import Bytes
from mooncake_lab.serving.lane import WINDOW_BYTES, Lane
from mooncake_lab.serving.messages import VERSION, CancelOrder, Job
from mooncake_lab.serving.parcels import (
    PARCELS,
    Begin,
    Borrow,
    End,
    Granted,
    Hello,
    Parcel,
    Piece,
    Refused,
    Taken,
    Where,
)
from mooncake_lab.store.backends import ProtocolError, wire
from mooncake_lab.store.backends import StorageError as MediumError

HOST: Final = "127.0.0.1"
"""Workers of one machine talk over loopback."""
MOST_WAITING_BYTES: Final = 2**30
"""Of KVCache, for one destination; then whoever computes more of it waits."""
_Addressed = Begin | Piece | End | CancelOrder


class RefusedParcelError(MediumError, ConnectionError):
    """The other worker refused, with its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who speaks: what a worker shows to its peers."""

    name: str
    token: bytes
    fingerprint: bytes
    timeout_s: float


def dial(port: int, who: Identity) -> socket.socket:
    """A connection to another worker, after both sides proved that they belong to this cluster.

    Raises:
        OSError: when there is no such worker, or it stalls.
        MediumError: when one side refuses the other.
    """
    peer = socket.create_connection((HOST, port), who.timeout_s)
    try:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.greet_as_client(peer, who.token, who.fingerprint, who.timeout_s)
        hello = Hello(version=VERSION, name=who.name, fingerprint=who.fingerprint)
        wire.send_frame(peer, hello, (), who.timeout_s)
        expect(peer, Taken, who.timeout_s)
    except BaseException:
        peer.close()
        raise
    return peer


def receive(peer: socket.socket, timeout_s: float, *, idle_s: float | None = None) -> tuple[Parcel, int]:
    """The next parcel, and the bytes that follow it.

    Raises:
        OSError: when the peer is gone or stalls.
        ProtocolError: when what comes is no parcel.
    """
    body, size = wire.receive_head(peer, timeout_s, idle_s=idle_s)
    try:
        return PARCELS.decode(body), size
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a frame that is no parcel: {error}") from error


def expect(peer: socket.socket, kind: type[Parcel], timeout_s: float) -> tuple[Parcel, int]:
    """The next parcel, when it is of this kind.

    Raises:
        RefusedParcelError: when the peer refuses.
        ProtocolError: when it is of another kind.
        OSError: when the peer is gone or stalls.
    """
    parcel, size = receive(peer, timeout_s)
    if isinstance(parcel, Refused):
        raise RefusedParcelError(parcel.reason)
    if not isinstance(parcel, kind):
        raise ProtocolError(f"a {type(parcel).__name__} where a {kind.__name__} was expected")
    return parcel, size


def borrow(peer: socket.socket, who: Identity, size_bytes: int) -> Where | None:
    """Memory of a peer for the rest of this connection; None where it lends none. For its errors see `expect`."""
    wire.send_frame(peer, Borrow(size_bytes), (), who.timeout_s)
    granted, _ = expect(peer, Granted, who.timeout_s)
    assert isinstance(granted, Granted)  # noqa: S101  # `expect` has checked
    return granted.where


@final
class Courier:
    """Carries parcels to one destination, in order, on a thread of its own. Mutable: it owns a connection.

    Args:
        port: of the destination.
        who: we are.
        failed: told of each job that could not be delivered, and why.
        lane: takes the bytes of KVCache where the destination has one too; None sends them over the connection.
    """

    __slots__ = (
        "_carried",
        "_failed",
        "_is_broken",
        "_lane",
        "_lost",
        "_open",
        "_peer",
        "_port",
        "_queue",
        "_room",
        "_thread",
        "_waiting_bytes",
        "_who",
        "_window",
    )

    def __init__(
        self, port: int, who: Identity, failed: Callable[[Job, str], None], lane: Lane | None = None
    ) -> None:
        self._port = port
        self._who = who
        self._failed = failed
        self._lane = lane
        self._window: Where | None = None
        self._queue: queue.SimpleQueue[tuple[_Addressed, Sequence[Bytes]] | None] = queue.SimpleQueue()
        self._peer: socket.socket | None = None
        self._is_broken = False
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._carried = 0  # parcels that wait or are under way, those of ended requests too
        self._open: set[Job] = set()
        self._lost: set[Job] = set()
        self._thread = threading.Thread(target=self._run, name=f"courier-{port}", daemon=True)
        self._thread.start()

    def send(self, parcel: _Addressed, payload: Sequence[Bytes] = ()) -> None:
        """Let a parcel wait for its turn, once there is room for it; its bytes must stay as they are."""
        size = sum(part.nbytes for part in payload)
        with self._room:
            self._room.wait_for(lambda: self._waiting_bytes + size <= max(size, MOST_WAITING_BYTES))
            self._waiting_bytes += size
            self._carried += 1
        self._queue.put((parcel, payload))

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
            parcel, payload = item
            if parcel.job not in self._lost:
                try:
                    self._deliver(parcel, payload)
                except (OSError, MediumError) as error:
                    self._give_up(parcel.job, self._refusal() or str(error) or type(error).__name__)
            with self._room:
                self._waiting_bytes -= sum(part.nbytes for part in payload)
                self._carried -= 1
                self._room.notify()
            if isinstance(parcel, (End, CancelOrder)):
                self._lost.discard(parcel.job)
        self._hang_up()

    def _deliver(self, parcel: _Addressed, payload: Sequence[Bytes]) -> None:
        if isinstance(parcel, Begin):
            self._open.add(parcel.job)
            if self._peer is None:
                self._peer = dial(self._port, self._who)
                self._is_broken = False
                if self._lane is not None:
                    self._window = borrow(self._peer, self._who, WINDOW_BYTES)
        elif parcel.job not in self._open or self._peer is None:
            return  # cancelled before it began
        if isinstance(parcel, Piece) and self._lane is not None and self._window is not None:
            for cut, part in cuts(parcel, payload[0], WINDOW_BYTES):
                self._push(self._peer, self._lane, self._window, cut, part)
            return
        wire.send_frame(self._peer, parcel, payload, self._who.timeout_s)
        if isinstance(parcel, End):
            expect(self._peer, Taken, self._who.timeout_s)
        if isinstance(parcel, (End, CancelOrder)):
            self._open.discard(parcel.job)

    def _push(self, peer: socket.socket, lane: Lane, window: Where, piece: Piece, parts: Sequence[Bytes]) -> None:
        """Write into the window, and wait until it is free again; over the connection where memory is short."""
        pushed = lane.write(window, parts)
        rest = parts if pushed is None else ()
        wire.send_frame(peer, msgspec.structs.replace(piece, pushed=pushed), rest, self._who.timeout_s)
        if pushed is not None:
            expect(peer, Taken, self._who.timeout_s)

    def _give_up(self, job: Job, reason: str) -> None:
        """The connection is of no use: neither are the jobs that were under way on it."""
        self._hang_up()
        self._is_broken = True
        jobs = self._open | {job}
        self._lost |= jobs
        self._open = set()
        for each in sorted(jobs, key=lambda job: (job.run, job.request_id, job.n)):
            self._failed(each, f"KVCache could not be delivered: {reason}")

    def _refusal(self) -> str | None:
        """What the peer said before it hung up, if it did."""
        if self._peer is None:
            return None
        try:
            expect(self._peer, Taken, 0.2)
        except RefusedParcelError as error:
            return str(error)
        except (OSError, MediumError):
            return None
        return None

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer, self._window = None, None


def _has_ended(peer: socket.socket) -> bool:
    """Whether the other side has hung up; looking takes nothing out of the connection, and does not wait."""
    try:
        readable, _, _ = select.select([peer], [], [], 0)
        return bool(readable) and not peer.recv(1, socket.MSG_PEEK)
    except TimeoutError:  # what was there has been read meanwhile: it lives
        return False
    except (OSError, ValueError):  # closed meanwhile
        return True


def cuts(piece: Piece, payload: Bytes, most_bytes: int) -> Iterator[tuple[Piece, tuple[Bytes, Bytes]]]:
    """A piece in parts of at most so many bytes, or of one token; keys and values of each."""
    keys, values = np.split(payload, 2)
    half = keys.nbytes // piece.tokens
    step = max(1, most_bytes // (2 * half))
    for first in range(0, piece.tokens, step):
        tokens = min(step, piece.tokens - first)
        where = slice(first * half, (first + tokens) * half)
        part = Piece(job=piece.job, layer=piece.layer, start=piece.start + first, tokens=tokens)
        yield part, (keys[where], values[where])
