"""Remote: the blocks of another node's backend, over TCP."""

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, final

import msgspec
import numpy as np

from mooncake_lab.store.backends import remote_messages as messages
from mooncake_lab.store.backends import wire
from mooncake_lab.store.backends.base import (
    MAX_KEY_BYTES,
    Buffer,
    Bytes,
    CopyingBackend,
    DamagedBlockError,
    Reservation,
    StorageError,
    check_block,
    check_buffers,
    check_fingerprint,
)
from mooncake_lab.store.backends.checksums import checksum_seed

_Answer = TypeVar("_Answer", messages.Done, messages.Reserved, messages.Layers, messages.Listing, messages.Room)


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
    evicts: bool = True

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
        self._space = messages.key_space(fingerprint)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self._closed = False
        self.capacity_bytes: int = self._ask(messages.Status(), messages.Room).capacity_bytes
        """The bytes that the server's backend may hold, for all its clients."""

    @property
    def used_bytes(self) -> int:
        """The bytes that are reserved or held there, by all clients.

        Raises:
            OSError: when the server cannot be asked.
        """
        return self._ask(messages.Status(), messages.Room).used_bytes

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
        return self._ask(messages.Reserve(key, tuple(layer_bytes), position), messages.Reserved).block

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Send layers; for its errors see `StorageBackend.write`."""
        arrays = check_buffers(reservation, layers, first_layer)
        question = messages.Write(messages.name_of(reservation), first_layer, len(arrays))
        self._exchange(question, messages.Done, sent=arrays, seed=self._seed(reservation))

    def commit(self, *reservations: Reservation) -> None:
        """Make blocks readable; for its errors see `StorageBackend.commit`."""
        self._ask(messages.Commit(), messages.Done, _names(reservations))

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Receive layers and verify their checksums; for its errors see `StorageBackend.read_into`."""
        arrays = check_buffers(reservation, buffers, first_layer, writable=True)
        question = messages.Read(messages.name_of(reservation), first_layer, len(arrays))
        if not self._exchange(question, messages.Layers, wanted=arrays, seed=self._seed(reservation))[1]:
            raise DamagedBlockError(
                f"layers from {first_layer} on of block {reservation.key.hex()} of {self.name}"
                " are not what was written"
            )

    def free(self, *reservations: Reservation) -> None:
        """Release the space of blocks; for its errors see `StorageBackend.free`."""
        self._ask(messages.FreeBlocks(), messages.Done, _names(reservations))

    def blocks(self) -> Iterator[Reservation]:
        """The committed blocks of this model, oldest first, of all clients."""
        return iter(self._exchange(messages.ListBlocks(), messages.Listing)[2])

    def find(self, keys: Iterable[bytes]) -> list[Reservation]:
        """The committed blocks of this model that have one of these keys; the server counts that as a use."""
        packed = np.frombuffer(msgspec.msgpack.encode(list(keys)), np.uint8)
        return list(self._exchange(messages.Find(), messages.Listing, sent=[packed])[2])

    def close(self) -> None:
        """Close the connection, even while a question waits for the server, which keeps what was committed."""
        self._closed = True
        peer = self._peer
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._hang_up()

    def _ask(self, question: messages.Question, expected: type[_Answer], sent: Sequence[Bytes] = ()) -> _Answer:
        return self._exchange(question, expected, sent=sent)[0]

    def _exchange(
        self,
        question: messages.Question,
        expected: type[_Answer],
        *,
        sent: Sequence[Bytes] = (),
        wanted: Sequence[Bytes] = (),
        seed: int = 0,
    ) -> tuple[_Answer, bool, tuple[Reservation, ...]]:
        """Ask, connecting first if needed; the answer, whether `wanted` came as it was sent, and listed blocks.

        A question that ends early, even by an interrupt, closes the connection: its answer would be taken for that
        of the next one.
        """
        is_right, listed = True, tuple[Reservation, ...]()
        with self._lock:
            peer = self._connected()
            try:
                if isinstance(question, messages.Write):
                    wire.send_layers(peer, question, sent, self._timeout_s, seed=seed)
                else:
                    wire.send_frame(peer, question, sent, self._timeout_s)
                answer, payload_bytes = wire.receive_message(peer, messages.ANSWERS, self._timeout_s)
                self._check(question, expected, answer, payload_bytes, wanted)
                if isinstance(answer, messages.Listing):
                    listing = np.empty(payload_bytes, np.uint8)
                    wire.receive_into(peer, [listing], self._timeout_s)
                    listed = messages.LISTING.decode(listing.data)
                elif isinstance(answer, messages.Layers):
                    came, sums = wire.receive_layers(peer, wanted, seed, self._timeout_s)
                    is_right = came == sums
            except msgspec.DecodeError as error:
                self._hang_up()
                raise wire.ProtocolError(f"{self.name} sends what is no answer: {error}") from error
            except BaseException:
                self._hang_up()
                raise
        if isinstance(answer, messages.Failed):
            raise messages.error_of(answer, question)
        assert isinstance(answer, expected)  # noqa: S101  # it was checked
        return answer, is_right, listed

    def _check(
        self,
        question: messages.Question,
        expected: type[messages.Answer],
        answer: messages.Answer,
        payload_bytes: int,
        wanted: Sequence[Bytes],
    ) -> None:
        """Refuse an answer of another type, or with another payload, than the question allows."""
        if not isinstance(answer, expected | messages.Failed):
            raise wire.ProtocolError(f"{self.name} answers {type(answer).__name__} to {type(question).__name__}")
        if isinstance(answer, messages.Listing):
            is_allowed = payload_bytes <= messages.MAX_LISTING_BYTES
        else:
            layers = wanted if isinstance(answer, messages.Layers) else ()
            is_allowed = payload_bytes == wire.layers_bytes([layer.nbytes for layer in layers])
        if not is_allowed:
            raise wire.ProtocolError(f"{self.name} sends {payload_bytes} bytes that nobody asked for")

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

    def _seed(self, reservation: Reservation) -> int:
        return checksum_seed(self._space + reservation.key)


def _is_gone(peer: socket.socket) -> bool:
    """Whether an idle connection has ended, or has bytes that no question asked for."""
    try:
        peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _names(blocks: Sequence[Reservation]) -> list[Bytes]:
    return [np.frombuffer(msgspec.msgpack.encode([messages.name_of(block) for block in blocks]), np.uint8)]
