"""The block server: lends one backend of this machine to authenticated clients over TCP."""

import contextlib
import logging
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Generator, Sequence
from typing import Final, Self, final

import msgspec

from mooncake_lab.net import wire
from mooncake_lab.net.layers import layers_bytes, receive_layers, send_layers
from mooncake_lab.net.listener import Listener
from mooncake_lab.store.backends import remote
from mooncake_lab.store.backends.base import (
    BlockNotFoundError,
    DamagedBlockError,
    Reservation,
    StorageBackend,
    StorageError,
    StorageFullError,
    checksum_seed,
)

_LOG: Final = logging.getLogger(__name__)
_IDLE_S: Final = 3600.0


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
    """The blocks of a backend; none is freed while its bytes are read or written. Mutable.

    When the backend is full, the least recently used blocks leave: the clients do not know what the others use.
    """

    def __init__(self, backend: StorageBackend, patience_s: float) -> None:
        self.backend = backend
        self._patience_s = patience_s
        self._blocks = set(backend.blocks())
        self._sums: dict[Reservation, dict[int, int]] = {}  # by layer, as their writers sent them
        self._used = OrderedDict[Reservation, None].fromkeys(backend.blocks())  # least recently used first
        self._users: Counter[Reservation] = Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lease(self, block: Reservation) -> Generator[None]:
        """The block is not freed meanwhile."""
        with self._changed:
            if block not in self._blocks:
                raise BlockNotFoundError(
                    f"{self.backend.name} has no block {block.key.hex()} of sequence {block.sequence}"
                )
            self._users[block] += 1
            self._use(block)
        try:
            yield
        finally:
            with self._changed:
                self._users[block] -= 1
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
                    self._blocks.add(block)
                    return block

    def find(self, keys: Sequence[bytes]) -> list[Reservation]:
        """The committed blocks that have one of these keys, each now used once more."""
        with self._changed:
            found = self.backend.find(keys)
            for block in reversed(found):  # the first blocks of a prompt are the last to leave
                self._use(block)
            return found

    def free(self, blocks: Sequence[Reservation]) -> None:
        """Free blocks when no client reads or writes them."""
        with self._changed:
            is_idle = self._changed.wait_for(
                lambda: not any(self._users[block] for block in blocks), self._patience_s
            )
            for block, count in Counter(blocks).items():
                if block not in self._blocks:
                    raise BlockNotFoundError(f"{self.backend.name} has no block {block.key.hex()}")
                if count > 1:
                    raise BlockNotFoundError(f"block {block.key.hex()} comes {count} times; once is allowed")
            if not is_idle:
                raise TimeoutError(
                    f"a client still reads or writes one of {len(blocks)} blocks after {self._patience_s:g} s"
                )
            for block in blocks:  # one by one: what the backend does not free is still held
                self._free(block)

    def commit(self, blocks: Sequence[Reservation]) -> None:
        """Commit in the backend; for its errors see `StorageBackend.commit`."""
        with contextlib.ExitStack() as leases:
            for block in blocks:
                leases.enter_context(self.lease(block))
            self.backend.commit(*blocks)
            with self._changed:
                self._used.update(dict.fromkeys(blocks))

    def wrote(self, block: Reservation, first_layer: int, sums: Sequence[int]) -> None:
        """Keep the checksums of layers, as their writer sent them."""
        with self._changed:
            self._sums.setdefault(block, {}).update(enumerate(sums, first_layer))

    def sums(self, block: Reservation, layers: range) -> list[int] | None:
        """The checksums of layers as their writer sent them, where all are known."""
        known = self._sums.get(block, {})
        return [known[layer] for layer in layers] if all(layer in known for layer in layers) else None

    def _use(self, block: Reservation) -> None:
        if block in self._used:
            self._used.move_to_end(block)

    def _evict_one(self) -> bool:
        """Free the least recently used block that no client reads; false where there is none."""
        block = next((block for block in self._used if not self._users[block]), None)
        if block is not None:
            self._free(block)
        return block is not None

    def _free(self, block: Reservation) -> None:
        self.backend.free(block)
        self._blocks.discard(block)
        del self._users[block]
        self._used.pop(block, None)
        self._sums.pop(block, None)


@final
class _Session:
    """One authenticated client: its questions, answered in order. Mutable: it knows the open reservations."""

    def __init__(self, client: socket.socket, leases: Leases, fingerprint: bytes, timeout_s: float) -> None:
        self._client = client
        self._leases = leases
        self._backend = leases.backend
        self._space = remote.key_space(fingerprint)
        self._timeout_s = timeout_s
        self._open: set[Reservation] = set()

    def serve(self) -> None:
        """Answer until the connection ends, and free what was not committed."""
        try:
            while True:
                question, payload_bytes = wire.receive_message(
                    self._client, remote.QUESTIONS, self._timeout_s, idle_s=_IDLE_S
                )
                match question:
                    case remote.Write():
                        self._write(question, payload_bytes)
                    case _ if payload_bytes:
                        name = type(question).__name__
                        raise wire.ProtocolError(
                            f"a {name} with a payload of {payload_bytes} bytes; allowed are 0"
                        )
                    case remote.Read():
                        self._read(question)
                    case _:
                        self._send(self._answer(question))
        finally:
            for block in self._open:
                with contextlib.suppress(StorageError, OSError):
                    self._leases.free([block])

    def _answer(
        self, question: remote.Reserve | remote.Commit | remote.FreeBlocks | remote.Find | remote.Status
    ) -> remote.Answer:
        try:
            match question:
                case remote.Reserve(key, layer_bytes, position):
                    block = self._leases.reserve(self._space + key, layer_bytes, position)
                    self._open.add(block)
                    return self._listing([block])
                case remote.Commit(blocks) | remote.FreeBlocks(blocks):
                    act = self._leases.commit if isinstance(question, remote.Commit) else self._leases.free
                    own = list(map(self._with_space, blocks))
                    act(own)
                    self._open.difference_update(own)
                    return remote.Done()
                case remote.Find(None):
                    return self._listing([b for b in self._backend.blocks() if b.key.startswith(self._space)])
                case remote.Find(keys):
                    return self._listing(self._leases.find([self._space + key for key in keys or ()]))
                case remote.Status():
                    return remote.Room(self._backend.capacity_bytes, self._backend.used_bytes)
        except (StorageError, ValueError, OSError) as error:
            return remote.failed(error)

    def _write(self, question: remote.Write, payload_bytes: int) -> None:
        """Receive layers into the backend; where they have no place, discard them and answer with the error."""
        answer: remote.Answer = remote.Done()
        block, first = self._with_space(question.block), question.first_layer
        try:
            with self._leases.lease(block):
                expected = layers_bytes(_layer_sizes(question))
                if expected != payload_bytes:
                    raise ValueError(  # noqa: TRY301
                        f"a Write of {question.layers} layers with a payload of {payload_bytes} bytes; they take"
                        f" {expected}"
                    )
                buffers = self._backend.write_buffers(block, first, question.layers)
                seed = checksum_seed(block.key)
                came, sums = receive_layers(self._client, buffers, seed, self._timeout_s)
                payload_bytes = 0
                if came != sums:
                    raise DamagedBlockError(f"layers from {first} on of block {block.key.hex()} came damaged")
                self._backend.write(block, buffers, first_layer=first)
                self._leases.wrote(block, first, sums)
        except (ConnectionError, TimeoutError):
            raise  # the client is gone
        except (StorageError, ValueError, OSError) as error:
            wire.skip(self._client, payload_bytes, self._timeout_s)
            answer = remote.failed(error)
        self._send(answer)

    def _read(self, question: remote.Read) -> None:
        block, first = self._with_space(question.block), question.first_layer
        try:
            with self._leases.lease(block):
                count = len(_layer_sizes(question))
                layers = self._backend.read(block, first, count)
                seed, known = checksum_seed(block.key), self._leases.sums(block, range(first, first + count))
                send_layers(self._client, remote.Done(), layers, self._timeout_s, seed=seed, known=known)
        except (ConnectionError, TimeoutError):
            raise
        except (StorageError, ValueError, OSError) as error:
            self._send(remote.failed(error))

    def _send(self, answer: remote.Answer) -> None:
        wire.send_frame(self._client, answer, (), self._timeout_s)

    def _listing(self, blocks: Sequence[Reservation]) -> remote.Reservations:
        length = len(self._space)
        return remote.Reservations(
            tuple([msgspec.structs.replace(block, key=block.key[length:]) for block in blocks])
        )

    def _with_space(self, block: Reservation) -> Reservation:
        return msgspec.structs.replace(block, key=self._space + block.key)


def _layer_sizes(question: remote.Write | remote.Read) -> tuple[int, ...]:
    """The bytes of the layers that are asked for.

    Raises:
        ValueError: when the block has no such layers.
    """
    sizes = question.block.layer_bytes
    stop = question.first_layer + question.layers
    if not 0 <= question.first_layer < stop <= len(sizes):
        raise ValueError(
            f"layers {question.first_layer} to {stop - 1} of a block of {len(sizes)} layers; allowed are 0 to"
            f" {len(sizes) - 1}"
        )
    return sizes[question.first_layer : stop]
