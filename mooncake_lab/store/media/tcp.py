"""Remote: blocks in another node's medium, over TCP."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar, final

import msgspec
import numpy as np

from mooncake_lab.store.media import messages, wire
from mooncake_lab.store.media.loans import key_space, wire_seed
from mooncake_lab.store.media.medium import (
    MAX_KEY_BYTES,
    Bandwidth,
    Buffer,
    DamagedBlockError,
    MediumError,
    Reservation,
    check_block,
    check_run,
)
from mooncake_lab.store.media.meter import Meter

_Answer = TypeVar("_Answer", messages.Done, messages.Reserved, messages.Layers, messages.Page, messages.Room)


@final
class TcpMedium:
    """The medium that a `BlockServer` lends, as if it were here (FAST'25 §3: blocks of other nodes).

    One connection, one question at a time. When it breaks, the question under way fails with an `OSError`, and the
    next one connects anew; reservations that were open are gone then. Layers carry checksums from their writer to
    their reader. Mutable: it owns a connection.

    Args:
        address: host and port of the server.
        token: the secret that both sides must know, at least 16 bytes.
        fingerprint: names the model; other models' blocks are not seen.
        name: what statistics and messages call it.
        timeout_s: how long the server may stall.

    Raises:
        PeerRefusedError: when one side does not know the other's token.
        OSError: when there is no server.
        ValueError: when the token is too short, or the fingerprint empty or too long.
    """

    __slots__ = (
        "_address",
        "_capacity_bytes",
        "_closed",
        "_fingerprint",
        "_lock",
        "_meter",
        "_name",
        "_peer",
        "_timeout_s",
        "_token",
    )

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
        if not 0 < len(fingerprint) <= wire.MOST_FINGERPRINT_BYTES:
            raise ValueError(f"a model fingerprint of {len(fingerprint)} bytes; allowed are 1 to 64")
        self._address = address
        self._token = token
        self._fingerprint = fingerprint
        self._name = name
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._meter = Meter()
        self._peer: socket.socket | None = None
        self._closed = False
        self._capacity_bytes = self._ask(messages.Status(), messages.Room).capacity_bytes

    @property
    def name(self) -> str:
        """What statistics and messages call it."""
        return self._name

    @property
    def capacity_bytes(self) -> int:
        """The bytes that the server's medium may hold, for all its clients."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes that are reserved or held there now, by all clients.

        Raises:
            OSError: when the server cannot be asked.
        """
        return self._ask(messages.Status(), messages.Room).used_bytes

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """The bytes of the layers; what the server's medium adds is not known here."""
        del key
        return sum(layer_bytes)

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """Set room aside for a block; for its errors see `Medium.reserve`.

        Raises:
            MediumError: when key and fingerprint together are too long for the server.
        """
        check_block(key, layer_bytes)
        space = len(key_space(self._fingerprint))
        if space + len(key) > MAX_KEY_BYTES:
            raise MediumError(
                f"{self._name} stores keys behind {space} bytes that name the model, so they may have"
                f" {MAX_KEY_BYTES - space} bytes; this one has {len(key)}"
            )
        answer = self._ask(messages.Reserve(key, tuple(layer_bytes), position), messages.Reserved)
        return Reservation(**msgspec.structs.asdict(answer))

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Send layers; for its errors see `Medium.write`."""
        arrays = check_run(reservation, layers, first_layer)
        with self._meter.writing(sum([array.nbytes for array in arrays])):
            question = messages.Write(_name(reservation), first_layer, len(arrays))
            self._exchange(question, messages.Done, sent=arrays, seed=self._seed(reservation))

    def commit(self, *reservations: Reservation) -> None:
        """Make blocks readable; for its errors see `Medium.commit`."""
        self._ask(messages.Commit(), messages.Done, _names(reservations))

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Receive layers and verify their checksums; for its errors see `Medium.read_into`."""
        arrays = check_run(reservation, buffers, first_layer, writable=True)
        question = messages.Read(_name(reservation), first_layer, len(arrays))
        with self._meter.reading(sum([array.nbytes for array in arrays])):
            seed = self._seed(reservation)
            _, is_right = self._exchange(question, messages.Layers, wanted=arrays, seed=seed)
        if not is_right:
            raise DamagedBlockError(
                f"layers from {first_layer} on of block {reservation.key.hex()} of {self._name}"
                " are not what was written"
            )

    def free(self, *reservations: Reservation) -> None:
        """Give room back; for its errors see `Medium.free`."""
        self._ask(messages.Free(), messages.Done, _names(reservations))

    def blocks(self) -> Iterator[Reservation]:
        """The committed blocks of this model, oldest first, whoever wrote them."""
        after = 0
        while True:
            page = self._ask(messages.Blocks(after), messages.Page)
            for block in page.blocks:
                yield Reservation(**msgspec.structs.asdict(block))
            if not page.more:
                return
            after = page.blocks[-1].sequence

    def bandwidth(self) -> Bandwidth:
        """Its own estimate of how fast it is."""
        return self._meter.bandwidth()

    def close(self) -> None:
        """Hang up; what was committed stays with the server."""
        self._closed = True
        with self._lock:
            self._hang_up()

    def _ask(
        self, question: messages.Question, expected: type[_Answer], sent: Sequence[wire.Bytes] = ()
    ) -> _Answer:
        return self._exchange(question, expected, sent=sent)[0]

    def _exchange(
        self,
        question: messages.Question,
        expected: type[_Answer],
        *,
        sent: Sequence[wire.Bytes] = (),
        wanted: Sequence[wire.Bytes] = (),
        seed: int = 0,
    ) -> tuple[_Answer, bool]:
        """Ask, connecting first where needed; the answer, and whether wanted layers came as they were sent.

        A question that does not end as it should, even an interrupted one, closes the connection: its answer would
        be taken for that of the next one.
        """
        with self._lock:
            peer = self._connected()
            try:
                answer, is_right = self._talk(peer, question, expected, sent, wanted, seed)
            except msgspec.DecodeError as error:
                self._hang_up()
                raise wire.ProtocolError(f"{self._name} sends what is no answer: {error}") from error
            except BaseException:
                self._hang_up()
                raise
        if isinstance(answer, messages.Failed):
            raise messages.error_of(answer, question)
        return answer, is_right

    def _talk(
        self,
        peer: socket.socket,
        question: messages.Question,
        expected: type[_Answer],
        sent: Sequence[wire.Bytes],
        wanted: Sequence[wire.Bytes],
        seed: int,
    ) -> tuple[_Answer | messages.Failed, bool]:
        if isinstance(question, messages.Write):
            wire.send_layers(peer, question, sent, self._timeout_s, seed=seed)
        else:
            wire.send_frame(peer, question, sent, self._timeout_s)
        body, payload_bytes = wire.receive_head(peer, self._timeout_s)
        answer = messages.ANSWERS.decode(body)
        if not isinstance(answer, expected | messages.Failed):
            raise wire.ProtocolError(f"{self._name} answers {type(answer).__name__} to {type(question).__name__}")
        coming = () if isinstance(answer, messages.Failed) else wanted
        if payload_bytes != wire.layers_bytes([part.nbytes for part in coming]):
            raise wire.ProtocolError(f"{self._name} sends {payload_bytes} bytes that nobody asked for")
        if not coming:
            return answer, True
        came, told = wire.receive_layers(peer, coming, seed, self._timeout_s)
        return answer, came == told

    def _connected(self) -> socket.socket:
        if self._closed:
            raise ConnectionError(f"{self._name} is closed")
        if self._peer is not None and _is_gone(self._peer):
            self._hang_up()  # the server hung up meanwhile, or was started anew
        if self._peer is None:
            peer = socket.create_connection(self._address, self._timeout_s)
            try:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                wire.greet_as_client(peer, self._token, self._fingerprint, self._timeout_s)
            except BaseException:
                peer.close()
                raise
            self._peer = peer
        return self._peer

    def _hang_up(self) -> None:
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.close()
            self._peer = None

    def _seed(self, reservation: Reservation) -> int:
        return wire_seed(key_space(self._fingerprint) + reservation.key)


def _is_gone(peer: socket.socket) -> bool:
    """Whether a connection on which nothing is expected has ended, or brings what nobody asked for."""
    try:
        peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _names(blocks: Sequence[Reservation]) -> list[wire.Bytes]:
    return [np.frombuffer(msgspec.msgpack.encode([_name(block) for block in blocks]), np.uint8)]


def _name(block: Reservation) -> messages.Name:
    return messages.Name(block.key, block.sequence)
