"""Listens on a port, and serves each connection that proves to know the token on a thread of its own."""

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, final

from mooncake_lab.net import wire

_LOG: Final = logging.getLogger(__name__)
_HOST: Final = "127.0.0.1"
"""Only processes of this machine can connect."""
_MAX_PEERS: Final = 64
_MAX_UNAUTHENTICATED: Final = 64
_RETRY_S: Final = 0.1
"""Pause after a failed accept: descriptors, memory or threads may be free again by then."""
_QUIET_S: Final = 10.0
"""Between two warnings: a process that can connect could fill the log otherwise."""


@final
class Listener:
    """Accepts connections until it is closed.

    It serves 64 peers at once and refuses further ones after their handshake. Connections that have not yet proved
    that they know the token are counted apart; when there are too many of them, the oldest is closed. Mutable: it
    owns a port and threads.

    Args:
        name: its name in messages.
        token: the secret that both sides share, at least 16 bytes.
        serve: called with each authenticated connection and the fingerprint that it names; returns at its end.
        refused: called with a connection that is about to be closed, and the reason.
        port: of this machine; 0 lets the system choose, see `address`.
        timeout_s: how long a peer may stall.

    Raises:
        ValueError: when the token is too short.
        OSError: when it cannot listen there.
    """

    def __init__(
        self,
        name: str,
        token: bytes,
        serve: Callable[[socket.socket, bytes], None],
        *,
        refused: Callable[[socket.socket, str], None] | None = None,
        port: int = 0,
        timeout_s: float,
    ) -> None:
        wire.check_token(token)
        self._name = name
        self._token = token
        self._serve_peer = serve
        self._refused = refused
        self._timeout_s = timeout_s
        self._threads: dict[socket.socket, threading.Thread] = {}  # of every connection, the oldest first
        self._unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        self._peers: set[socket.socket] = set()
        self._quiet_until_s = 0.0
        self._left_out = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._socket = socket.create_server((_HOST, port))
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-listener", daemon=True)
        self._accepting.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port, *_ = self._socket.getsockname()
        return host, port

    def sever(self) -> list[threading.Thread]:
        """Break every connection, as a network would; the threads that serve them, which then end."""
        with self._lock:
            for peer in self._threads:
                _shut_down(peer)
            return list(self._threads.values())

    def close(self, wait_s: float = 0.0) -> int:
        """Stop listening and break all connections; how many are still served after that time."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        ends_s = time.monotonic() + wait_s
        self._accepting.join(self._timeout_s)  # no connections are added from now on
        threads = self.sever()
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return sum(thread.is_alive() for thread in threads)

    def _accept(self) -> None:
        while not self._closing.is_set():
            peer: socket.socket | None = None
            try:
                peer, _ = self._socket.accept()
                self._start(peer)
            except (OSError, RuntimeError, MemoryError) as error:  # no thread can start, or the peer is gone
                if peer is not None:
                    self._forget(peer)
                if not self._closing.is_set():
                    self._warn(f"{self._name} cannot serve another peer now: {error}")
                    self._closing.wait(_RETRY_S)

    def _start(self, peer: socket.socket) -> None:
        """Serve a connection on a thread of its own; closes the oldest unauthenticated one if there are many."""
        _configure(peer, self._timeout_s)
        thread = threading.Thread(target=self._serve, args=(peer,), name=f"{self._name}-peer", daemon=True)
        oldest: socket.socket | None = None
        with self._lock:
            if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
            self._unauthenticated[peer] = None
            self._threads[peer] = thread
        if oldest is not None:
            self._warn(f"{self._name} closes a connection: {_MAX_UNAUTHENTICATED} have not authenticated")
            _shut_down(oldest)
        thread.start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            fingerprint = wire.greet_as_server(peer, self._token, self._timeout_s)
            self._admit(peer)
            self._serve_peer(peer, fingerprint)
        except (ConnectionResetError, BrokenPipeError):
            pass  # the peer has closed the connection, between two frames or otherwise, and knows why
        except TimeoutError:
            self._refuse(peer, f"the peer took too long to send a frame; allowed are {self._timeout_s:g} s")
        except (wire.ProtocolError, wire.PeerRefusedError, ValueError) as error:
            self._warn(f"{self._name} refuses a peer: {error}")
            self._refuse(peer, str(error))
        except OSError as error:
            _LOG.info("%s lost a peer: %s", self._name, error)
        finally:
            self._forget(peer)

    def _admit(self, peer: socket.socket) -> None:
        """Count an authenticated peer.

        Raises:
            PeerRefusedError: when there are too many already.
        """
        with self._lock:
            self._unauthenticated.pop(peer, None)
            if len(self._peers) >= _MAX_PEERS:
                raise wire.PeerRefusedError(f"{self._name} has {len(self._peers)} peers; allowed are {_MAX_PEERS}")
            self._peers.add(peer)

    def _refuse(self, peer: socket.socket, reason: str) -> None:
        if self._refused is not None:
            self._refused(peer, reason)

    def _forget(self, peer: socket.socket) -> None:
        with self._lock:
            self._unauthenticated.pop(peer, None)
            self._peers.discard(peer)
            self._threads.pop(peer, None)
        peer.close()

    def _warn(self, message: str) -> None:
        """Write a line to the log, unless there was one just now; the next says how many were left out."""
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._quiet_until_s:
                self._left_out += 1
                return
            self._quiet_until_s = now_s + _QUIET_S
            left_out, self._left_out = self._left_out, 0
        _LOG.warning("%s%s", message, f" ({left_out} such lines were left out)" if left_out else "")


def _shut_down(peer: socket.socket) -> None:
    """End a connection; the thread that serves it notices and closes it."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def _configure(peer: socket.socket, timeout_s: float) -> None:
    """Send small answers at once, and notice within a few timeouts when the peer's machine is gone."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    patience_s = max(1, math.ceil(timeout_s))
    for name, value in (
        ("TCP_KEEPIDLE", patience_s),
        ("TCP_KEEPINTVL", max(1, patience_s // 3)),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 2000 * patience_s),  # milliseconds
    ):
        option = getattr(socket, name, None)  # not every system has all of them
        if option is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
