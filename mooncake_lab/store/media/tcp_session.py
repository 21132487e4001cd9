"""One client of a block server: its questions, answered one after the other."""

import contextlib
import socket
from collections.abc import Sequence
from typing import Final, TypeVar, final

import msgspec
import numpy as np

from mooncake_lab.store.media import messages, wire
from mooncake_lab.store.media.loans import Loans, key_space, name_of, page, told, wire_seed
from mooncake_lab.store.media.medium import MediumError, Reservation

Named = TypeVar("Named", messages.Write, messages.Read)
_IDLE_S: Final = 3600.0


@final
class Session:
    """A connection after its handshake: what it reserved and did not commit is freed when it ends.

    Args:
        client: the connection.
        loans: the medium it asks about.
        fingerprint: of the client's model; its length and it stand before every key.
        timeout_s: how long the client may stall inside a frame.
        most_payload_bytes: of one frame.
    """

    __slots__ = ("_client", "_listing", "_loans", "_most_payload_bytes", "_open", "_space", "_timeout_s")

    def __init__(
        self, client: socket.socket, loans: Loans, fingerprint: bytes, timeout_s: float, most_payload_bytes: int
    ) -> None:
        self._client = client
        self._loans = loans
        self._space = key_space(fingerprint)
        self._timeout_s = timeout_s
        self._most_payload_bytes = most_payload_bytes
        self._open: set[messages.Name] = set()
        self._listing: list[Reservation] = []  # while it is paged through: what was committed at its first page

    def serve(self) -> None:
        """Answer until the client goes.

        Raises:
            OSError: when it has gone, or stalls.
            ProtocolError: when it breaks a bound.
            DecodeError: when it sends what is no question.
        """
        try:
            while True:
                body, payload_bytes = wire.receive_head(self._client, self._timeout_s, idle_s=_IDLE_S)
                self._answer(messages.QUESTIONS.decode(body), payload_bytes)
        finally:
            for name in self._open:
                with contextlib.suppress(MediumError, OSError):
                    self._loans.free([name])

    def _answer(self, question: messages.Question, payload_bytes: int) -> None:
        most = self._most_payload_bytes if isinstance(question, messages.Write) else 0
        if isinstance(question, messages.Commit | messages.Free):
            most = messages.MOST_NAMES_BYTES
        if payload_bytes > most:
            raise wire.ProtocolError(f"a payload of {payload_bytes} bytes; allowed here are {most}")
        if isinstance(question, messages.Write):
            self._send(self._write(self._renamed(question), payload_bytes))
        elif isinstance(question, messages.Read):
            self._read(self._renamed(question))
        else:
            names = self._names(payload_bytes) if payload_bytes else []
            try:
                answer = self._do(question, names)
            except (MediumError, ValueError, OSError) as error:
                answer = messages.failed(error)
            self._send(answer)

    def _do(
        self,
        question: messages.Reserve | messages.Commit | messages.Free | messages.Blocks | messages.Status,
        names: Sequence[messages.Name],
    ) -> messages.Answer:
        match question:
            case messages.Reserve():
                key = self._space + question.key
                reservation = self._loans.reserve(key, question.layer_bytes, question.position)
                self._open.add(name_of(reservation))
                return told(reservation, len(self._space))
            case messages.Commit() | messages.Free():
                act = self._loans.commit if isinstance(question, messages.Commit) else self._loans.free
                act(names)
                self._open.difference_update(names)
                return messages.Done()
            case messages.Blocks():
                if not question.after or not self._listing:
                    self._listing = self._loans.listing(self._space)
                shown = page(self._listing, question.after, len(self._space))
                if not shown.more:
                    self._listing = []
                return shown
            case messages.Status():
                return self._loans.room()

    def _write(self, asked: messages.Write, payload_bytes: int) -> messages.Answer:
        """Bytes that have no place are read and thrown away, so that the next frame can be read."""
        try:
            with self._loans.borrow(asked.name) as held:
                places = self._loans.places(asked, held, payload_bytes)
                sums = wire.receive_layers(self._client, places, wire_seed(held.key), self._timeout_s)
                payload_bytes = 0
                self._loans.keep(asked, held, places, sums)
        except (ConnectionError, TimeoutError):
            raise  # the client, not the medium: nobody is there to be told
        except (MediumError, ValueError, OSError) as error:
            wire.skip(self._client, payload_bytes, self._timeout_s)
            return messages.failed(error)
        return messages.Done()

    def _read(self, asked: messages.Read) -> None:
        try:
            with self._loans.borrow(asked.name) as held:
                layers, known = self._loans.layers(asked, held, self._most_payload_bytes)
                seed = wire_seed(held.key)
                wire.send_layers(self._client, messages.Layers(), layers, self._timeout_s, seed=seed, known=known)
        except (ConnectionError, TimeoutError):
            raise
        except (MediumError, ValueError, OSError) as error:
            self._send(messages.failed(error))

    def _send(self, answer: messages.Answer) -> None:
        wire.send_frame(self._client, answer, (), self._timeout_s)

    def _names(self, payload_bytes: int) -> list[messages.Name]:
        """The names that follow a question, with their model's key space."""
        packed = np.empty(payload_bytes, np.uint8)
        wire.receive_into(self._client, [packed], self._timeout_s)
        return [self._full(name) for name in messages.NAMES.decode(packed.data)]

    def _renamed(self, question: Named) -> Named:
        return msgspec.structs.replace(question, name=self._full(question.name))

    def _full(self, name: messages.Name) -> messages.Name:
        return messages.Name(self._space + name.key, name.sequence)
