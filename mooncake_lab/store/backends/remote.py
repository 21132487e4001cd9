"""Remote: the blocks of another node's backend, over TCP; and the messages between the two."""

import contextlib
import errno
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar, final

import msgspec

from mooncake_lab.net import wire
from mooncake_lab.net.layers import layers_bytes, receive_layers, send_layers
from mooncake_lab.store.backends.base import (
    MAX_KEY_BYTES,
    BlockExistsError,
    BlockNotFoundError,
    Buffer,
    Bytes,
    CopyingBackend,
    DamagedBlockError,
    Reservation,
    StorageError,
    StorageFullError,
    SuspectBlockError,
    check_block,
    check_buffers,
    check_fingerprint,
    checksum_seed,
)


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Reserve space; answered by `Reservations`."""

    key: bytes
    layer_bytes: tuple[int, ...]
    position: int


class Write(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The payload is layers, then the checksum of each; answered by `Done`."""

    block: Reservation
    first_layer: int
    layers: int


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Make blocks readable; answered by `Done`."""

    blocks: tuple[Reservation, ...]


class Read(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Send layers; answered by `Done`."""

    block: Reservation
    first_layer: int
    layers: int


class FreeBlocks(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Release the space of blocks; answered by `Done`."""

    blocks: tuple[Reservation, ...]


class Find(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """List the committed blocks of this model that have one of these keys, or all; answered by `Reservations`."""

    keys: tuple[bytes, ...] | None


class Status(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Report capacity and use; answered by `Room`."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """The question was carried out. After a `Read` the payload is the layers, then the checksum of each."""


class Reservations(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """The reserved block, or the listed ones, oldest first."""

    blocks: tuple[Reservation, ...]


class Room(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The bytes of the backend, and those in use."""

    capacity_bytes: int
    used_bytes: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """The question could not be carried out, in the terms of the contract."""

    kind: Literal["full", "held", "not_held", "damaged", "suspect", "value", "device"]
    reason: str
    error: str | None = None
    """The name of the system's error number, such as EACCES; numbers differ between systems."""


Question: TypeAlias = Reserve | Write | Commit | Read | FreeBlocks | Find | Status
Answer: TypeAlias = Done | Reservations | Room | Failed
QUESTIONS: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)
ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
_Answer = TypeVar("_Answer", Done, Reservations, Room)
_KINDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (StorageFullError, "full"),
    (BlockExistsError, "held"),
    (BlockNotFoundError, "not_held"),
    (DamagedBlockError, "damaged"),
    (SuspectBlockError, "suspect"),
    (ValueError, "value"),
    (OSError, "device"),
)


def key_space(fingerprint: bytes) -> bytes:
    """The prefix of every key of a model on the server; no prefix begins another."""
    return bytes([len(fingerprint)]) + fingerprint


def failed(error: Exception) -> Failed:
    """The answer that reports an error."""
    kind: Any = next((kind for known, kind in _KINDS if isinstance(error, known)), "device")
    if isinstance(error, OSError) and error.errno is not None:
        return Failed(kind, str(error.strerror)[:2000], errno.errorcode.get(error.errno))
    return Failed(kind, str(error)[:2000])


def error_of(answer: Failed, question: Question) -> Exception:
    """The server's error, to be raised by the client.

    Only a commit may be wrong in a way that the client cannot check first: layers that are missing. Any other
    `ValueError` of the server is not a mistake of the caller.
    """
    if answer.kind == "value" and not isinstance(question, Commit):
        return StorageError(f"the server refuses a {type(question).__name__}: {answer.reason}")
    number = next((number for number, name in errno.errorcode.items() if name == answer.error), None)
    if answer.kind == "device" and number is not None:
        return OSError(number, f"the server reports: {answer.reason}")
    return next(known for known, kind in _KINDS if kind == answer.kind)(answer.reason)


@final
class RemoteBackend(CopyingBackend):
    """The backend that a `BlockServer` lends, as if it were local (FAST'25 §3: blocks of other nodes).

    The server evicts the least recently used blocks of all its clients when it is full, so a block may be gone at
    any time. One connection carries one question at a time. When it breaks, the current question fails with an
    `OSError`, and the next one connects again; open reservations are gone then. Layers carry checksums from their
    writer to their reader. Mutable: it owns a connection.

    Args:
        address: host and port of the server.
        token: the secret that both sides share, at least 16 bytes.
        fingerprint: names the model; other models' blocks are not seen.
        name: its name in statistics and messages.
        timeout_s: how long the server may stall.

    Raises:
        PeerRefusedError: when one side does not know the other's token.
        OSError: when there is no server.
        ValueError: when the token is too short, or the fingerprint empty or too long.
    """

    is_shared: bool = True

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        *,
        fingerprint: bytes,
        name: str = "remote",
        timeout_s: float = 10.0,
    ) -> None:
        wire.check_token(token)
        check_fingerprint(fingerprint)
        self.name: str = name
        self._address = address
        self._token = token
        self._fingerprint = fingerprint
        self._space = key_space(fingerprint)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self._closed = False
        self.capacity_bytes: int = self._ask(Status(), Room).capacity_bytes
        """The bytes that the server's backend may hold, for all its clients."""

    @property
    def used_bytes(self) -> int:
        """The bytes that are reserved or held there, by all clients.

        Raises:
            OSError: when the server cannot be asked.
        """
        return self._ask(Status(), Room).used_bytes

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes of the layers; the server's padding is not known here."""
        del key
        return sum(layer_bytes)

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Reserve space for a block; for its errors see `StorageBackend.reserve`.

        Raises:
            StorageError: when key and fingerprint together are too long for the server.
        """
        check_block(key, layer_bytes)
        space = len(self._space)
        if space + len(key) > MAX_KEY_BYTES:
            raise StorageError(
                f"{self.name} stores keys behind {space} bytes that name the model, so they may have"
                f" {MAX_KEY_BYTES - space} bytes; this one has {len(key)}"
            )
        return self._ask(Reserve(key, tuple(layer_bytes), position), Reservations).blocks[0]

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Send layers; for its errors see `StorageBackend.write`."""
        arrays = check_buffers(reservation, layers, first_layer)
        self._ask(Write(reservation, first_layer, len(arrays)), Done, layers=arrays)

    def commit(self, *reservations: Reservation) -> None:
        """Make blocks readable; for its errors see `StorageBackend.commit`."""
        self._ask(Commit(reservations), Done)

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Receive layers and verify their checksums; for its errors see `StorageBackend.read_into`."""
        arrays = check_buffers(reservation, buffers, first_layer, writable=True)
        self._ask(Read(reservation, first_layer, len(arrays)), Done, layers=arrays)

    def free(self, *reservations: Reservation) -> None:
        """Release the space of blocks; for its errors see `StorageBackend.free`."""
        self._ask(FreeBlocks(reservations), Done)

    def blocks(self) -> Iterator[Reservation]:
        """The committed blocks of this model, oldest first, of all clients."""
        return iter(self._ask(Find(None), Reservations).blocks)

    def find(self, keys: Iterable[bytes]) -> list[Reservation]:
        """The committed blocks of this model that have one of these keys; the server counts that as a use."""
        return list(self._ask(Find(tuple(keys)), Reservations).blocks)

    def close(self) -> None:
        """Close the connection, even while a question waits for the server, which keeps what was committed."""
        self._closed = True
        peer = self._peer
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._hang_up()

    def _ask(self, question: Question, expected: type[_Answer], *, layers: Sequence[Bytes] = ()) -> _Answer:
        """Ask, connecting first if needed, and return the answer; `layers` are those to write or to read.

        A question that ends early, even by an interrupt, closes the connection: its answer would be taken for that
        of the next one.
        """
        seed = checksum_seed(self._space + question.block.key) if isinstance(question, Write | Read) else 0
        is_intact = True
        with self._lock:
            peer = self._connected()
            try:
                if isinstance(question, Write):
                    send_layers(peer, question, layers, self._timeout_s, seed=seed)
                else:
                    wire.send_frame(peer, question, (), self._timeout_s)
                answer, payload_bytes = wire.receive_message(peer, ANSWERS, self._timeout_s)
                wanted = layers if isinstance(question, Read) and isinstance(answer, Done) else ()
                follow = layers_bytes([layer.nbytes for layer in wanted])
                names = type(answer).__name__, type(question).__name__
                if not isinstance(answer, expected | Failed):
                    raise wire.ProtocolError(f"{self.name} answers a {names[1]} with a {names[0]}")  # noqa: TRY301
                if payload_bytes != follow:
                    raise wire.ProtocolError(  # noqa: TRY301
                        f"{self.name} answers a {names[1]} with {payload_bytes} bytes behind it, not {follow}"
                    )
                if wanted:
                    came, sums = receive_layers(peer, wanted, seed, self._timeout_s)
                    is_intact = came == sums
            except BaseException:
                self._hang_up()
                raise
        if isinstance(answer, Failed):
            raise error_of(answer, question)
        if not is_intact and isinstance(question, Read):
            raise DamagedBlockError(
                f"layers from {question.first_layer} on of block {question.block.key.hex()} of {self.name}"
                " are not what was written"
            )
        assert isinstance(answer, expected)  # noqa: S101  # it was checked
        return answer

    def _connected(self) -> socket.socket:
        if self._closed:
            raise ConnectionError(f"{self.name} is closed")
        if self._peer is not None and _is_gone(self._peer):
            self._hang_up()  # the server closed the connection meanwhile, or was restarted
        if self._peer is None:
            self._peer = wire.connect(self._address, self._token, self._fingerprint, self._timeout_s)
        return self._peer

    def _hang_up(self) -> None:
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.close()
            self._peer = None


def _is_gone(peer: socket.socket) -> bool:
    """Whether an idle connection has ended, or has bytes that no question asked for."""
    try:
        peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
