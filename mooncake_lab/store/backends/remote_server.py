"""The block server: lends one backend of this machine to authenticated clients over TCP."""

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final, Self, TypeVar, final

import msgspec
import numpy as np

from mooncake_lab.store.backends import remote_messages as messages
from mooncake_lab.store.backends import wire
from mooncake_lab.store.backends.base import Bytes, DamagedBlockError, Reservation, StorageBackend, StorageError
from mooncake_lab.store.backends.remote_leases import Leases

_LOG: Final = logging.getLogger(__name__)
_MAX_UNAUTHENTICATED: Final = 64
_RETRY_S: Final = 0.1
"""Pause after a failed accept: descriptors, memory or threads may be free again by then."""
_IDLE_S: Final = 3600.0
_Run = TypeVar("_Run", messages.Write, messages.Read)


@final
class BlockServer:
    """Serves a backend until it is closed; the backend stays open.

    Blocks are kept by model: a client finds only those stored under its own fingerprint. What a client reserved
    and did not commit is freed when its connection ends, and soon after its machine disappears. Connections that
    have not yet proved that they know the token do not count against `max_clients`; when there are too many of
    them, the oldest is closed. Mutable: it owns a port and threads.

    Args:
        backend: what it lends.
        token: the secret that both sides share, at least 16 bytes.
        host: where to listen.
        port: 0 lets the system choose, see `address`.
        timeout_s: how long a client may stall.
        max_clients: further ones are refused after their handshake.
        max_payload_bytes: of one frame.

    Raises:
        ValueError: when the token is too short.
        OSError: when it cannot listen there.
    """

    def __init__(
        self,
        backend: StorageBackend,
        token: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 10.0,
        max_clients: int = 64,
        max_payload_bytes: int = 2**30,
    ) -> None:
        wire.check_token(token)
        self._leases = Leases(backend, timeout_s)
        self._token = token
        self._timeout_s = timeout_s
        self._max_clients = max_clients
        self._max_payload_bytes = max_payload_bytes
        self._threads: dict[socket.socket, threading.Thread] = {}  # of every connection, the oldest first
        self._unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        self._clients: set[socket.socket] = set()
        self._lock = threading.Lock()
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
        """Stop listening, close all connections, and wait until no client uses the backend.

        A backend that does not answer is waited for twice `timeout_s`; then a warning is logged.
        """
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        ends_s = time.monotonic() + 2 * self._timeout_s
        self._accepting.join(self._timeout_s)  # no connections are added from now on
        with self._lock:
            threads = list(self._threads.values())
            for client in self._threads:
                _shut_down(client)
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        busy = sum(thread.is_alive() for thread in threads)
        if busy:
            _LOG.warning("%d clients still use the backend of a server that is closed", busy)

    def _accept(self) -> None:
        while not self._closing.is_set():
            client: socket.socket | None = None
            try:
                client, _ = self._listener.accept()
                self._start(client)
            except (OSError, RuntimeError, MemoryError) as error:  # no thread can start, or the client is gone
                if client is not None:
                    self._forget(client)
                if not self._closing.is_set():
                    _LOG.warning("a client cannot be served now: %s", error)
                    self._closing.wait(_RETRY_S)

    def _start(self, client: socket.socket) -> None:
        """Serve a connection on a thread of its own; closes the oldest unauthenticated one if there are many."""
        _configure(client, self._timeout_s)
        thread = threading.Thread(target=self._serve, args=(client,), name="block-client", daemon=True)
        with self._lock:
            if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                _shut_down(oldest)
            self._unauthenticated[client] = None
            self._threads[client] = thread
        thread.start()

    def _serve(self, client: socket.socket) -> None:
        try:
            fingerprint = wire.greet_as_server(client, self._token, self._timeout_s)
            if self._admit(client):
                _Session(client, self._leases, fingerprint, self._timeout_s, self._max_payload_bytes).serve()
        except msgspec.DecodeError as error:
            _LOG.warning("a client sent what is no question: %s", error)
        except (StorageError, OSError) as error:
            _LOG.info("a client is gone: %s", error)
        finally:
            self._forget(client)

    def _admit(self, client: socket.socket) -> bool:
        """Count an authenticated client; false when there are `max_clients` already."""
        with self._lock:
            self._unauthenticated.pop(client, None)
            is_admitted = len(self._clients) < self._max_clients
            if is_admitted:
                self._clients.add(client)
        if not is_admitted:
            _LOG.warning("a client is refused: %d are served already", self._max_clients)
        return is_admitted

    def _forget(self, client: socket.socket) -> None:
        with self._lock:
            self._unauthenticated.pop(client, None)
            self._clients.discard(client)
            self._threads.pop(client, None)
        client.close()


@final
class _Session:
    """One authenticated client: its questions, answered in order. Mutable: it knows the open reservations.

    Args:
        client: the connection.
        leases: the backend it asks about.
        fingerprint: of the client's model.
        timeout_s: how long the client may stall inside a frame.
        max_payload_bytes: of one frame.
    """

    def __init__(
        self, client: socket.socket, leases: Leases, fingerprint: bytes, timeout_s: float, max_payload_bytes: int
    ) -> None:
        self._client = client
        self._leases = leases
        self._space = messages.key_space(fingerprint)
        self._timeout_s = timeout_s
        self._max_payload_bytes = max_payload_bytes
        self._open: set[messages.Name] = set()

    def serve(self) -> None:
        """Answer until the connection ends, and free what was not committed."""
        try:
            while True:
                body, payload_bytes = wire.receive_head(self._client, self._timeout_s, idle_s=_IDLE_S)
                self._answer(messages.QUESTIONS.decode(body), payload_bytes)
        finally:
            for name in self._open:
                with contextlib.suppress(StorageError, OSError):
                    self._leases.free([name])

    def _answer(self, question: messages.Question, payload_bytes: int) -> None:
        bound = self._max_payload_bytes if isinstance(question, messages.Write) else 0
        if isinstance(question, messages.Commit | messages.FreeBlocks | messages.Find):
            bound = messages.MAX_NAMES_BYTES
        if payload_bytes > bound:
            raise wire.ProtocolError(f"a payload of {payload_bytes} bytes; allowed here are {bound}")
        if isinstance(question, messages.Write):
            self._write(self._with_space(question), payload_bytes)
        elif isinstance(question, messages.Read):
            self._read(self._with_space(question))
        else:
            packed = np.empty(payload_bytes, np.uint8)
            wire.receive_into(self._client, [packed], self._timeout_s)
            try:
                answer, payload = self._do(question, packed.data)
            except msgspec.DecodeError:
                raise  # a `ValueError` too, but no question
            except (StorageError, ValueError, OSError) as error:
                answer, payload = messages.failed(error), ()
            wire.send_frame(self._client, answer, payload, self._timeout_s)

    def _do(
        self,
        question: messages.Reserve
        | messages.Commit
        | messages.FreeBlocks
        | messages.ListBlocks
        | messages.Find
        | messages.Status,
        packed: memoryview,
    ) -> tuple[messages.Answer, Sequence[Bytes]]:
        """The answer and its payload."""
        backend = self._leases.backend
        match question:
            case messages.Reserve():
                block = self._leases.reserve(self._space + question.key, question.layer_bytes, question.position)
                self._open.add(messages.name_of(block))
                return messages.Reserved(self._without_space(block)), ()
            case messages.Commit() | messages.FreeBlocks():
                act = self._leases.commit if isinstance(question, messages.Commit) else self._leases.free
                names = [self._full_name(name) for name in messages.NAMES.decode(packed)]
                act(names)
                self._open.difference_update(names)
                return messages.Done(), ()
            case messages.ListBlocks():
                return self._listing(block for block in backend.blocks() if block.key.startswith(self._space))
            case messages.Find():
                keys = [self._space + key for key in messages.KEYS.decode(packed)]
                return self._listing(self._leases.find(keys))
            case messages.Status():
                return messages.Room(backend.capacity_bytes, backend.used_bytes), ()

    def _write(self, question: messages.Write, payload_bytes: int) -> None:
        """Receive layers into the backend; where they have no place, discard them and answer with the error."""
        answer: messages.Answer = messages.Done()
        try:
            with self._leases.lease(question.name) as block:
                _check_payload(question, block, payload_bytes)
                buffers = self._leases.backend.write_buffers(block, question.first_layer, question.layers)
                seed = messages.checksum_seed(block.key)
                came, sums = wire.receive_layers(self._client, buffers, seed, self._timeout_s)
                payload_bytes = 0
                if came != sums:
                    raise DamagedBlockError(
                        f"layers from {question.first_layer} on of block {block.key.hex()} came damaged"
                    )
                self._leases.backend.write(block, buffers, first_layer=question.first_layer)
                self._leases.wrote(question, sums)
        except (ConnectionError, TimeoutError):
            raise  # the client is gone
        except (StorageError, ValueError, OSError) as error:
            wire.skip(self._client, payload_bytes, self._timeout_s)
            answer = messages.failed(error)
        wire.send_frame(self._client, answer, (), self._timeout_s)

    def _read(self, question: messages.Read) -> None:
        try:
            with self._leases.lease(question.name) as block:
                _check_answer(question, block, self._max_payload_bytes)
                layers = self._leases.backend.read(block, question.first_layer, question.layers)
                seed, known = messages.checksum_seed(block.key), self._leases.sums(question)
                wire.send_layers(self._client, messages.Layers(), layers, self._timeout_s, seed=seed, known=known)
        except (ConnectionError, TimeoutError):
            raise
        except (StorageError, ValueError, OSError) as error:
            wire.send_frame(self._client, messages.failed(error), (), self._timeout_s)

    def _listing(self, blocks: Iterable[Reservation]) -> tuple[messages.Answer, Sequence[Bytes]]:
        packed = msgspec.msgpack.encode([self._without_space(block) for block in blocks])
        return messages.Listing(), [np.frombuffer(packed, np.uint8)]

    def _with_space(self, question: _Run) -> _Run:
        return msgspec.structs.replace(question, name=self._full_name(question.name))

    def _full_name(self, name: messages.Name) -> messages.Name:
        return messages.Name(self._space + name.key, name.sequence)

    def _without_space(self, block: Reservation) -> Reservation:
        return msgspec.structs.replace(block, key=block.key[len(self._space) :])


def _check_payload(question: messages.Write, block: Reservation, payload_bytes: int) -> None:
    if wire.layers_bytes(_layer_sizes(question, block)) != payload_bytes:
        raise ValueError(f"{payload_bytes} bytes are not {question.layers} layers from {question.first_layer} on")


def _check_answer(question: messages.Read, block: Reservation, max_bytes: int) -> None:
    size = sum(_layer_sizes(question, block))
    if size > max_bytes:
        raise ValueError(f"{size} bytes in one answer; allowed are {max_bytes}")


def _layer_sizes(question: messages.Write | messages.Read, block: Reservation) -> tuple[int, ...]:
    stop = question.first_layer + question.layers
    if not 0 <= question.first_layer < stop <= len(block.layer_bytes):
        raise ValueError(
            f"{question.layers} layers from {question.first_layer} on; there are {len(block.layer_bytes)}"
        )
    return block.layer_bytes[question.first_layer : stop]


def _shut_down(client: socket.socket) -> None:
    """End a connection; the thread that serves it notices and closes it."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def _configure(client: socket.socket, timeout_s: float) -> None:
    """Send small answers at once, and notice within a few timeouts when the client's machine is gone."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    patience_s = max(1, math.ceil(timeout_s))
    for name, value in (
        ("TCP_KEEPIDLE", patience_s),
        ("TCP_KEEPINTVL", max(1, patience_s // 3)),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 2000 * patience_s),  # milliseconds
    ):
        option = getattr(socket, name, None)  # not every system has all of them
        if option is not None:
            client.setsockopt(socket.IPPROTO_TCP, option, value)
