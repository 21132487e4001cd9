"""A block server: one medium of this machine, lent to authenticated peers over TCP."""

import contextlib
import logging
import math
import socket
import threading
import time
from typing import Final, Self, final

import msgspec

from mooncake_lab.store.media import wire
from mooncake_lab.store.media.loans import Loans
from mooncake_lab.store.media.medium import Medium, MediumError
from mooncake_lab.store.media.tcp_session import Session

_LOG: Final = logging.getLogger(__name__)
_MOST_STRANGERS: Final = 64
_BREATH_S: Final = 0.1
"""How long to wait after a failed accept: what was lacking (descriptors, memory, threads) may be back by then."""


@final
class BlockServer:
    """Serves a medium until it is closed; the medium stays its maker's to close, afterwards.

    Blocks are kept by model: a client finds only those stored under the fingerprint it named. What a client
    reserved and did not commit is freed when it goes, and soon after its machine has gone without a word. Clients
    that have not yet proved that they know the token take no place of those who have: when there are too many of
    them, the one that has been silent longest is hung up on. Mutable: it owns a port and threads.

    Args:
        medium: what it lends.
        token: the secret that both sides must know, at least 16 bytes.
        host: where to listen; loopback unless told otherwise.
        port: 0 lets the system choose, see `address`.
        timeout_s: how long a peer may stall.
        most_clients: further ones are turned away, once they have proved who they are.
        most_payload_bytes: of one frame.

    Raises:
        ValueError: when the token is too short.
        OSError: when it cannot listen there.
    """

    def __init__(
        self,
        medium: Medium,
        token: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 10.0,
        most_clients: int = 64,
        most_payload_bytes: int = 2**30,
    ) -> None:
        wire.check_token(token)
        self._loans = Loans(medium, timeout_s)
        self._token = token
        self._timeout_s = timeout_s
        self._most_clients = most_clients
        self._most_payload_bytes = most_payload_bytes
        self._threads: dict[socket.socket, threading.Thread] = {}  # of every connection, the oldest first
        self._strangers: dict[socket.socket, None] = {}  # those that have proved nothing yet, the oldest first
        self._guests: set[socket.socket] = set()  # those that have
        self._books = threading.Lock()
        self._closing = threading.Event()
        self._listener = socket.create_server((host, port))
        self._accepting = threading.Thread(target=self._accept, name="block-server", daemon=True)
        self._accepting.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port, *_ = self._listener.getsockname()
        return host, port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, hang up, and wait until no client uses the medium any more.

        A medium that does not answer is waited for twice `timeout_s`, and the log says so then.
        """
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for clients
        self._listener.close()
        ends_s = time.monotonic() + 2 * self._timeout_s
        self._accepting.join(self._timeout_s)  # from now on there are no more of them
        with self._books:
            threads = list(self._threads.values())
            for client in self._threads:
                _hang_up(client)
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        busy = sum(thread.is_alive() for thread in threads)
        if busy:
            _LOG.warning("%d clients still use the medium of a server that is closed", busy)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                self._breathe(error)
                continue
            try:
                self._welcome(client)
            except (OSError, RuntimeError, MemoryError) as error:  # no thread to be had, or a client gone already
                self._forget(client)
                self._breathe(error)

    def _breathe(self, error: Exception) -> None:
        if not self._closing.is_set():
            _LOG.warning("a client cannot be served now: %s", error)
            self._closing.wait(_BREATH_S)

    def _welcome(self, client: socket.socket) -> None:
        """Serve a client on a thread of its own; where there are many strangers, the oldest has to go."""
        _configure(client, self._timeout_s)
        thread = threading.Thread(target=self._serve, args=(client,), name="block-client", daemon=True)
        with self._books:
            if len(self._strangers) >= _MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _hang_up(oldest)
            self._strangers[client] = None
            self._threads[client] = thread
        thread.start()

    def _serve(self, client: socket.socket) -> None:
        try:
            fingerprint = wire.greet_as_server(client, self._token, self._timeout_s)
            if self._may_enter(client):
                Session(client, self._loans, fingerprint, self._timeout_s, self._most_payload_bytes).serve()
        except msgspec.DecodeError as error:
            _LOG.warning("a client sent what is no question: %s", error)
        except (MediumError, OSError) as error:
            _LOG.info("a client is gone: %s", error)
        finally:
            self._forget(client)

    def _may_enter(self, client: socket.socket) -> bool:
        """Whether there is a place for a client that has proved who it is."""
        with self._books:
            self._strangers.pop(client, None)
            welcome = len(self._guests) < self._most_clients
            if welcome:
                self._guests.add(client)
        if not welcome:
            _LOG.warning("a client is turned away: %d are served already", self._most_clients)
        return welcome

    def _forget(self, client: socket.socket) -> None:
        with self._books:
            self._strangers.pop(client, None)
            self._guests.discard(client)
            self._threads.pop(client, None)
        client.close()


def _hang_up(client: socket.socket) -> None:
    """End a connection; the thread that serves it notices, and closes it."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def _configure(client: socket.socket, timeout_s: float) -> None:
    """Send small answers at once, and notice a peer whose machine is gone within a few timeouts, where one can.

    Raises:
        OSError: when the connection is gone already.
    """
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    patience_s = max(1, math.ceil(timeout_s))
    for name, value in (
        ("TCP_KEEPIDLE", patience_s),
        ("TCP_KEEPINTVL", max(1, patience_s // 3)),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 2000 * patience_s),  # milliseconds
    ):
        option = getattr(socket, name, None)
        if option is not None:
            client.setsockopt(socket.IPPROTO_TCP, option, value)
