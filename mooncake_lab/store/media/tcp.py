"""Remote: blocks in another node's medium, over TCP."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar, final

import msgspec

from mooncake_lab.store.media import messages, wire
from mooncake_lab.store.media.loans import key_space, wire_seed
from mooncake_lab.store.media.medium import (
    Bandwidth,
    Buffer,
    DamagedBlockError,
    Reservation,
    check_block,
    check_run,
)
from mooncake_lab.store.media.meter import Meter
from mooncake_lab.store.media.record import checksum

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
        """Set room aside for a block; for its errors see `Medium.reserve`."""
        check_block(key_space(self._fingerprint) + key if key else key, layer_bytes)
        answer = self._ask(messages.Reserve(key, tuple(layer_bytes), position), messages.Reserved)
        return Reservation(**msgspec.structs.asdict(answer))

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Send layers; for its errors see `Medium.write`."""
        arrays = check_run(reservation, layers, first_layer)
        seed = self._seed(reservation)
        with self._meter.writing(sum(array.nbytes for array in arrays)):
            sums = tuple(checksum(array, seed) for array in arrays)
            self._ask(messages.Write(_name(reservation), first_layer, sums), messages.Done, sent=arrays)

    def commit(self, *reservations: Reservation) -> None:
        """Make blocks readable; for its errors see `Medium.commit`."""
        self._ask(messages.Commit(tuple(map(_name, reservations))), messages.Done)

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Receive layers and verify their checksums; for its errors see `Medium.read_into`."""
        arrays = check_run(reservation, buffers, first_layer, writable=True)
        seed = self._seed(reservation)
        question = messages.Read(_name(reservation), first_layer, len(arrays))
        with self._meter.reading(sum(array.nbytes for array in arrays)):
            came: list[int] = []
            answer = self._ask(question, messages.Layers, wanted=arrays, seed=seed, came=came)
        if tuple(came) != answer.checksums:
            raise DamagedBlockError(
                f"layers from {first_layer} on of block {reservation.key.hex()} of {self._name}"
                " are not what was written"
            )

    def free(self, *reservations: Reservation) -> None:
        """Give room back; for its errors see `Medium.free`."""
        self._ask(messages.Free(tuple(map(_name, reservations))), messages.Done)

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
        self,
        question: messages.Question,
        expected: type[_Answer],
        *,
        sent: Sequence[wire.Bytes] = (),
        wanted: Sequence[wire.Bytes] = (),
        seed: int = 0,
        came: list[int] | None = None,
    ) -> _Answer:
        """Ask, connecting where there is no connection; any trouble with it closes it.

        Layers that are wanted are filled, and the checksums of what came are added to `came`.
        """
        with self._lock:
            peer = self._connected()
            try:
                wire.send_frame(peer, question, sent, self._timeout_s)
                body, payload_bytes = wire.receive_head(peer, self._timeout_s)
                answer = messages.ANSWERS.decode(body)
                if isinstance(answer, messages.Failed):
                    wanted = ()
                if payload_bytes != sum(part.nbytes for part in wanted):
                    raise wire.ProtocolError(f"{self._name} sends {payload_bytes} bytes that nobody asked for")
                sums = wire.receive_layers(peer, wanted, seed, self._timeout_s)
            except msgspec.DecodeError as error:
                self._hang_up()
                raise wire.ProtocolError(f"{self._name} sends what is no answer: {error}") from error
            except OSError:
                self._hang_up()
                raise
        if isinstance(answer, messages.Failed):
            raise messages.error_of(answer)
        if came is not None:
            came += sums
        if not isinstance(answer, expected):
            raise wire.ProtocolError(f"{self._name} answers {type(answer).__name__} to {type(question).__name__}")
        return answer

    def _connected(self) -> socket.socket:
        if self._closed:
            raise ConnectionError(f"{self._name} is closed")
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


def _name(block: Reservation) -> messages.Name:
    return messages.Name(block.key, block.sequence)
