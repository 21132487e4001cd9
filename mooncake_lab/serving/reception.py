"""Where a worker receives: KVCache of requests it will decode, and questions for blocks it holds."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np
import torch

from mooncake_lab.engine.kv_layout import Bytes
from mooncake_lab.engine.kv_layout import KVLayout as KVShape
from mooncake_lab.engine.kv_layout import bytes_of as raw
from mooncake_lab.serving import parcels
from mooncake_lab.serving.arriving import Delivery, Incoming, Move, Talk
from mooncake_lab.serving.lane import Lane
from mooncake_lab.serving.messages import VERSION, CancelOrder, Job
from mooncake_lab.serving.messenger import HOST, Identity, receive
from mooncake_lab.serving.parcels import Granted, Hello, Pushed, Refused, Taken, Where
from mooncake_lab.store.backends import ProtocolError, wire
from mooncake_lab.store.backends import StorageError as MediumError

_LOG: Final = logging.getLogger(__name__)
_IDLE_S: Final = 3600.0
_PAUSE_S: Final = 0.1
_MOST_PEERS: Final = 64
"""Other workers that are connected at once."""
_MOST_STRANGERS: Final = 64
"""Connections at once that have not proved yet to be a worker's."""
_SELDOM_S: Final = 10.0
"""Between two lines about peers in the log: whoever can connect could fill it otherwise."""
_MOST_PROBE_BYTES: Final = 2**26
_MOST_KEYS: Final = 8192


Answer = Callable[[Sequence[bytes]], list[tuple[torch.Tensor, ...]]]
"""Gives the leading blocks of these keys that a worker holds, each as its layers."""


@final
class Reception:
    """Listens for other workers of the cluster until the process ends. Mutable: it owns a port and threads.

    Args:
        who: we are; peers must know the same token and model.
        shape: of the KVCache.
        most_tokens: of one request.
        delivered: told of each complete request, on the thread of its connection.
        give: looks for blocks that others ask for.
        each_layer: whether each piece's move is told, or one for all of them.
        lane: lends memory that peers may write; None lends none.
    """

    __slots__ = (
        "_closing",
        "_delivered",
        "_each_layer",
        "_give",
        "_lane",
        "_listener",
        "_most_tokens",
        "_peers",
        "_peers_lock",
        "_quiet_until_s",
        "_shape",
        "_strangers",
        "_unsaid",
        "_who",
    )

    def __init__(
        self,
        who: Identity,
        shape: KVShape,
        *,
        most_tokens: int,
        delivered: Callable[[Delivery], None],
        give: Answer,
        each_layer: bool = False,
        lane: Lane | None = None,
    ) -> None:
        self._who = who
        self._shape = shape
        self._most_tokens = most_tokens
        self._delivered = delivered
        self._give = give
        self._each_layer = each_layer
        self._lane = lane
        self._closing = False
        self._peers: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}
        """Those who have not proved yet who they are, who came first in front."""
        self._quiet_until_s = 0.0
        self._unsaid = 0
        self._peers_lock = threading.Lock()
        self._listener = socket.create_server((HOST, 0))
        threading.Thread(target=self._accept, name="reception", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def sever(self) -> None:
        """Break every connection, as a network would."""
        with self._peers_lock:
            peers = [*self._peers, *self._strangers]
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening, and hang up."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.sever()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                self._warn(f"{self._who.name} cannot take another peer now: {error}")
                time.sleep(_PAUSE_S)  # no descriptor is free, say; those who wait are not forgotten
                continue
            self._admit(peer)
            threading.Thread(target=self._serve, args=(peer,), name="receiver", daemon=True).start()

    def _admit(self, peer: socket.socket) -> None:
        """Let somebody try to prove who it is; where too many try, the one who has tried longest is hung up on."""
        with self._peers_lock:
            oldest = next(iter(self._strangers)) if len(self._strangers) >= _MOST_STRANGERS else None
            if oldest is not None:
                del self._strangers[oldest]
            self._strangers[peer] = None
        if oldest is not None:
            self._warn(f"{self._who.name} hangs up on a peer: {_MOST_STRANGERS} have not proved who they are")
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def _warn(self, message: str) -> None:
        """Write a line to the log, unless there was one just now; the next says how many were left out."""
        with self._peers_lock:
            now_s = time.monotonic()
            if now_s < self._quiet_until_s:
                self._unsaid += 1
                return
            self._quiet_until_s = now_s + _SELDOM_S
            left_out, self._unsaid = self._unsaid, 0
        _LOG.warning("%s%s", message, f" ({left_out} such lines were left out)" if left_out else "")

    def _serve(self, peer: socket.socket) -> None:
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.greet_as_server(peer, self._who.token, self._who.timeout_s)
            self._welcome(peer)
            self._take_parcels(peer)
        except (ConnectionResetError, BrokenPipeError):
            pass  # between two frames, or reset: the sender knows, and says so to the cluster
        except TimeoutError:
            self._refuse(peer, f"the peer took too long to send a frame; allowed are {self._who.timeout_s:g} s")
        except (MediumError, ValueError) as error:
            self._warn(f"{self._who.name} refuses a peer: {error}")
            self._refuse(peer, str(error))
        except OSError as error:
            _LOG.info("%s lost a peer: %s", self._who.name, error)
        finally:
            peer.close()
            with self._peers_lock:
                self._peers.discard(peer)
                self._strangers.pop(peer, None)

    def _welcome(self, peer: socket.socket) -> None:
        parcel, _ = receive(peer, self._who.timeout_s)
        if not isinstance(parcel, Hello):
            raise ProtocolError(f"a peer begins with {type(parcel).__name__}; it must begin with Hello")
        if parcel.version != VERSION:
            raise ProtocolError(
                f"{parcel.name} speaks version {parcel.version}; {self._who.name} speaks {VERSION}"
            )
        if parcel.fingerprint != self._shape.fingerprint:
            raise ProtocolError(f"{parcel.name} runs another model than {self._who.name}")
        with self._peers_lock:
            known = len(self._peers)
            if known < _MOST_PEERS:
                self._strangers.pop(peer, None)
                self._peers.add(peer)
        if known >= _MOST_PEERS:
            raise ProtocolError(f"{self._who.name} has {known} peers; allowed are {_MOST_PEERS}")
        wire.send_frame(peer, Taken(), (), self._who.timeout_s)

    def _take_parcels(self, peer: socket.socket) -> None:
        with contextlib.ExitStack() as lent:
            talk = Talk(peer=peer, lent=lent)
            while True:
                parcel, size = receive(peer, self._who.timeout_s, idle_s=_IDLE_S)
                if size and not isinstance(parcel, (parcels.Piece, parcels.Probe)):
                    raise ProtocolError(f"a {type(parcel).__name__} with {size} bytes behind it; allowed are 0")
                self._take(talk, parcel, size)

    def _take(self, talk: Talk, parcel: parcels.Parcel, size: int) -> None:
        match parcel:
            case parcels.Borrow():
                wire.send_frame(talk.peer, Granted(self._lend(talk, parcel.bytes)), (), self._who.timeout_s)
            case parcels.Begin():
                talk.coming[parcel.job] = self._begin(parcel)
            case parcels.Piece():
                self._piece(talk, parcel, size)
            case parcels.End():
                self._end(parcel, talk.coming)
                wire.send_frame(talk.peer, Taken(), (), self._who.timeout_s)
            case CancelOrder():
                talk.coming.pop(parcel.job, None)
            case parcels.Ask():
                self._answer(talk.peer, parcel)
            case parcels.Probe():
                self._probe(talk, parcel, size)
                wire.send_frame(talk.peer, Taken(), (), self._who.timeout_s)
            case _:
                raise ProtocolError(f"a {type(parcel).__name__} is no question")

    def _begin(self, parcel: parcels.Begin) -> Incoming:
        if not 0 < parcel.tokens <= self._most_tokens:
            raise ProtocolError(f"a request of {parcel.tokens} tokens; allowed are 1 to {self._most_tokens}")
        layers = self._shape.empty(parcel.tokens)
        return Incoming(tokens=parcel.tokens, layers=layers, covered=[0] * len(layers))

    def _lend(self, talk: Talk, size_bytes: int) -> Where | None:
        if talk.window is not None:
            raise ProtocolError("a second window for one connection; allowed is 1")
        if self._lane is not None:
            talk.window = self._lane.lend(size_bytes, talk.lent)
        return None if talk.window is None else talk.window.where

    def _piece(self, talk: Talk, parcel: parcels.Piece, size: int) -> None:
        into = talk.coming.get(parcel.job)
        if into is None:
            raise ProtocolError(f"a piece of {parcel.job}, which never began here")
        stop = parcel.start + parcel.tokens
        fits = 0 <= parcel.layer < len(into.layers) and 0 <= parcel.start < stop <= into.tokens
        moved = parcel.tokens * self._shape.layer_bytes
        follow = moved if parcel.pushed is None else 0
        if not fits or parcel.start > into.covered[parcel.layer] or size != follow:
            raise ProtocolError(
                f"{size} bytes for tokens {parcel.start} to {stop} of layer {parcel.layer}; it has {into.tokens}"
                f" tokens in {len(into.layers)} layers, {self._shape.layer_bytes} bytes a token and layer"
            )
        start_s = time.monotonic()
        place = into.layers[parcel.layer]
        parts = [raw(half[parcel.start : stop]) for half in place]  # keys, then values
        if parcel.pushed is None:
            wire.receive_into(talk.peer, parts, self._who.timeout_s)
        else:
            start_s = talk.take_pushed(parts, parcel.pushed)
            wire.send_frame(talk.peer, Taken(), (), self._who.timeout_s)
        into.covered[parcel.layer] = max(into.covered[parcel.layer], stop)
        into.moves.append(Move(start_s, time.monotonic(), moved))

    def _end(self, parcel: parcels.End, coming: dict[Job, Incoming]) -> None:
        done = coming.pop(parcel.job, None)
        if done is None or min(done.covered) < done.tokens:
            raise ProtocolError(f"{parcel.job} ends before all of its KVCache came")
        moves = done.moves
        if not self._each_layer:
            moves = [Move(moves[0].start_s, moves[-1].end_s, sum(move.bytes for move in moves))]
        self._delivered(
            Delivery(
                job=parcel.job,
                kv=self._shape.span(done.layers),
                first_token=parcel.first_token,
                moves=tuple(moves),
                prefilled=parcel.prefilled,
            )
        )

    def _answer(self, peer: socket.socket, parcel: parcels.Ask) -> None:
        if len(parcel.keys) > _MOST_KEYS:
            raise ProtocolError(f"a question for {len(parcel.keys)} blocks; allowed are {_MOST_KEYS}")
        blocks = self._give(parcel.keys)
        payload = [raw(layer) for block in blocks for layer in block]
        pushed = self._push(parcel.into, payload)
        wire.send_frame(peer, parcels.Give(len(blocks), pushed), () if pushed else payload, self._who.timeout_s)

    def _push(self, into: Where | None, payload: Sequence[Bytes]) -> Pushed | None:
        if self._lane is None or into is None or not payload:
            return None
        return self._lane.write(into, payload)

    def _probe(self, talk: Talk, parcel: parcels.Probe, size: int) -> None:
        if size + parcel.pushed_bytes > _MOST_PROBE_BYTES or (size and parcel.pushed is not None):
            raise ProtocolError(
                f"a probe of {size} bytes and {parcel.pushed_bytes} pushed ones; allowed are {_MOST_PROBE_BYTES}"
            )
        if parcel.pushed is not None:
            talk.take_pushed([np.empty(parcel.pushed_bytes, np.uint8)], parcel.pushed)
            return
        scratch: Bytes = np.empty(min(size, 2**20) or 1, np.uint8)
        while size:
            wire.receive_into(talk.peer, [scratch[:size]], self._who.timeout_s)
            size -= min(size, scratch.nbytes)

    def _refuse(self, peer: socket.socket, reason: str) -> None:
        """Say why, and read on for a moment: closing with unread bytes would destroy what was said."""
        with contextlib.suppress(OSError, MediumError):
            wire.send_frame(peer, Refused(reason[:1000]), (), 1.0)
            peer.shutdown(socket.SHUT_WR)
            peer.settimeout(0.5)
            for _ in range(256):
                if not peer.recv(2**16):
                    return
