"""A block server: one medium of this machine, lent to authenticated peers over TCP."""

import contextlib
import logging
import socket
import threading
from typing import Final, Self, final

import msgspec

from mooncake_lab.store.media import wire
from mooncake_lab.store.media.loans import Loans
from mooncake_lab.store.media.medium import Medium, MediumError
from mooncake_lab.store.media.tcp_session import Session

_LOG: Final = logging.getLogger(__name__)


@final
class BlockServer:
    """Serves a medium until it is closed; the medium stays its maker's to close.

    Blocks are kept by model: a client finds only those stored under the fingerprint it named. What a client
    reserved and did not commit is freed when it goes. Mutable: it owns a port and threads.

    Args:
        medium: what it lends.
        token: the secret that both sides must know, at least 16 bytes.
        host: where to listen; loopback unless told otherwise.
        port: 0 lets the system choose, see `address`.
        timeout_s: how long a peer may stall.
        most_clients: further ones are turned away.
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
        self._clients: set[socket.socket] = set()
        self._books = threading.Lock()
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
        """Stop listening and hang up."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for clients
        self._listener.close()
        with self._books:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self._accepting.join(self._timeout_s)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._books:
                welcome = len(self._clients) < self._most_clients
                if welcome:
                    self._clients.add(client)
            if not welcome:
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), name="block-client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fingerprint = wire.greet_as_server(client, self._token, self._timeout_s)
            Session(client, self._loans, fingerprint, self._timeout_s, self._most_payload_bytes).serve()
        except msgspec.DecodeError as error:
            _LOG.warning("a client sent what is no question: %s", error)
        except (MediumError, OSError) as error:
            _LOG.info("a client is gone: %s", error)
        finally:
            client.close()
            with self._books:
                self._clients.discard(client)
