"""The block server: lends one backend of this machine to authenticated clients over TCP."""

import contextlib
import logging
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Sequence
from typing import Final, Self, TypeVar, final

import msgspec
import numpy as np

from mooncake_lab.store.backends import remote_messages as messages
from mooncake_lab.store.backends import wire
from mooncake_lab.store.backends.base import (
    BlockNotFoundError,
    Bytes,
    DamagedBlockError,
    Reservation,
    StorageBackend,
    StorageError,
    StorageFullError,
)
from mooncake_lab.store.backends.checksums import checksum_seed
from mooncake_lab.store.backends.listener import Listener

_LOG: Final = logging.getLogger(__name__)
_IDLE_S: Final = 3600.0
_MAX_PAYLOAD_BYTES: Final = 2**30
_Run = TypeVar("_Run", messages.Write, messages.Read)


@final
class BlockServer:
    """Serves a backend until it is closed; the backend stays open.

    Blocks are kept by model: a client finds only those stored under its own fingerprint. What a client reserved
    and did not commit is freed when its connection ends, and soon after its machine disappears. Mutable: it owns a
    `Listener`.

    Args:
        backend: what it lends.
        token: the secret that both sides share, at least 16 bytes.
        port: 0 lets the system choose, see `address`.
        timeout_s: how long a client may stall.

    Raises:
        ValueError: when the token is too short.
        OSError: when it cannot listen there.
    """

    def __init__(
        self,
        backend: StorageBackend,
        token: bytes,
        *,
        port: int = 0,
        timeout_s: float = 10.0,
    ) -> None:
        self._leases = Leases(backend, timeout_s)
        self._timeout_s = timeout_s
        self._listener = Listener("block-server", token, self._serve, port=port, timeout_s=timeout_s)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self._listener.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, close all connections, and wait until no client uses the backend.

        A backend that does not answer is waited for twice `timeout_s`; then a warning is logged.
        """
        busy = self._listener.close(2 * self._timeout_s)
        if busy:
            _LOG.warning("%d clients still use the backend of a server that is closed", busy)

    def _serve(self, client: socket.socket, fingerprint: bytes) -> None:
        _Session(client, self._leases, fingerprint, self._timeout_s).serve()


@final
class Leases:
    """The blocks of a backend by name; none is freed while its bytes are read or written. Mutable.

    When the backend is full, the least recently used blocks leave: the clients do not know what the others use.
    """

    def __init__(self, backend: StorageBackend, patience_s: float) -> None:
        self.backend = backend
        self._patience_s = patience_s
        self._blocks = {messages.name_of(block): block for block in backend.blocks()}
        self._sums: dict[messages.Name, dict[int, int]] = {}  # by layer, as their writers sent them
        self._used = OrderedDict[messages.Name, None].fromkeys(
            self._blocks
        )  # committed; least recently used first
        self._users: Counter[messages.Name] = Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lease(self, name: messages.Name) -> Generator[Reservation]:
        """The reservation, which is not freed meanwhile."""
        with self._changed:
            block = self._blocks.get(name)
            if block is None:
                raise BlockNotFoundError(
                    f"{self.backend.name} has no block {name.key.hex()} of sequence {name.sequence}"
                )
            self._users[name] += 1
            self._use(name)
        try:
            yield block
        finally:
            with self._changed:
                self._users[name] -= 1
                self._changed.notify_all()

    def reserve(self, key: bytes, layer_bytes: tuple[int, ...], position: int) -> Reservation:
        """Reserve in the backend, which evicts if it is full; for its errors see `StorageBackend.reserve`."""
        with self._changed:
            while True:
                try:
                    block = self.backend.reserve(key, layer_bytes, position=position)
                except StorageFullError:
                    if sum(layer_bytes) > self.backend.capacity_bytes or not self._evict_one():
                        raise
                else:
                    self._blocks[messages.name_of(block)] = block
                    return block

    def find(self, keys: Sequence[bytes]) -> list[Reservation]:
        """The committed blocks that have one of these keys, each now used once more."""
        with self._changed:
            found = self.backend.find(keys)
            for block in reversed(found):  # the first blocks of a prompt are the last to leave
                self._use(messages.name_of(block))
            return found

    def free(self, names: Sequence[messages.Name]) -> None:
        """Free blocks when no client reads or writes them."""
        with self._changed:
            is_idle = self._changed.wait_for(
                lambda: not any(self._users[name] for name in names), self._patience_s
            )
            missing = [name for name, count in Counter(names).items() if name not in self._blocks or count > 1]
            if missing:
                raise BlockNotFoundError(f"{self.backend.name} has no block {missing[0].key.hex()}, or not twice")
            if not is_idle:
                raise TimeoutError(f"{len(names)} blocks are still being read or written")
            for name in names:  # one by one: what the backend does not free is still held
                self._free(name)

    def commit(self, names: Sequence[messages.Name]) -> None:
        """Commit in the backend; for its errors see `StorageBackend.commit`."""
        with contextlib.ExitStack() as leases:
            self.backend.commit(*[leases.enter_context(self.lease(name)) for name in names])
            with self._changed:
                self._used.update(dict.fromkeys(names))

    def wrote(self, question: messages.Write, sums: Sequence[int]) -> None:
        """Keep the checksums of layers, as their writer sent them."""
        with self._changed:
            self._sums.setdefault(question.name, {}).update(enumerate(sums, question.first_layer))

    def sums(self, question: messages.Read) -> tuple[int, ...] | None:
        """The checksums of layers as their writer sent them, where all are known."""
        known = self._sums.get(question.name, {})
        layers = range(question.first_layer, question.first_layer + question.layers)
        return tuple(known[layer] for layer in layers) if all(layer in known for layer in layers) else None

    def _use(self, name: messages.Name) -> None:
        if name in self._used:
            self._used.move_to_end(name)

    def _evict_one(self) -> bool:
        """Free the least recently used block that no client reads; false where there is none."""
        name = next((name for name in self._used if not self._users[name]), None)
        if name is not None:
            self._free(name)
        return name is not None

    def _free(self, name: messages.Name) -> None:
        self.backend.free(self._blocks[name])
        del self._blocks[name], self._users[name]
        self._used.pop(name, None)
        self._sums.pop(name, None)


@final
class _Session:
    """One authenticated client: its questions, answered in order. Mutable: it knows the open reservations.

    Args:
        client: the connection.
        leases: the backend it asks about.
        fingerprint: of the client's model.
        timeout_s: how long the client may stall inside a frame.
    """

    def __init__(self, client: socket.socket, leases: Leases, fingerprint: bytes, timeout_s: float) -> None:
        self._client = client
        self._leases = leases
        self._space = messages.key_space(fingerprint)
        self._timeout_s = timeout_s
        self._open: set[messages.Name] = set()

    def serve(self) -> None:
        """Answer until the connection ends, and free what was not committed."""
        try:
            while True:
                question, payload_bytes = wire.receive_message(
                    self._client, messages.QUESTIONS, self._timeout_s, idle_s=_IDLE_S
                )
                self._answer(question, payload_bytes)
        finally:
            for name in self._open:
                with contextlib.suppress(StorageError, OSError):
                    self._leases.free([name])

    def _answer(self, question: messages.Question, payload_bytes: int) -> None:
        bound = _MAX_PAYLOAD_BYTES if isinstance(question, messages.Write) else 0
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
                seed = checksum_seed(block.key)
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
                _check_answer(question, block, _MAX_PAYLOAD_BYTES)
                layers = self._leases.backend.read(block, question.first_layer, question.layers)
                seed, known = checksum_seed(block.key), self._leases.sums(question)
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
