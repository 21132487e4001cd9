"""Served traffic as a trace that may be shared: lengths, times, sessions, and block ids that name no tokens.

An id is a keyed hash (BLAKE2b) of the block's key, and the name of a session is one likewise. The key is drawn
when a recording begins, stays in memory, and is gone when it ends. So equal blocks of one recording have equal
ids, and nobody can test whether a known prompt is in it, or find the same block in two recordings by its id.
Lengths and times are as they were: they can identify, too.
"""

import hashlib
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from mooncake_lab.cluster import Event, events
from mooncake_lab.core import BlockKey, Finished, Record, Rejected

_ID_BITS: Final = 53
"""Whole numbers up to here are exact in every reader of JSON. Two of a million blocks share an id in one recording
of 18,000."""
_KEY_BYTES: Final = 32
_MOST_SESSIONS: Final = 100_000
"""Whose latest answer is remembered; a turn of one that was quiet for longer has no delay."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Taken:
    """A request that arrived, and once it has ended, how long its answer became. Mutable for that reason."""

    at_ms: int
    input_tokens: int
    ids: "array[int]"
    block_size_tokens: int
    session: str | None
    delay_ms: int | None = None
    output_tokens: int | None = None


@final
class TraceRecorder:
    """Writes a line of Mooncake's format per request with an answer, in order of arrival. Mutable.

    Times begin at the first request. A line waits until its request and all before it have ended. A request that
    never got a token has no line.

    Args:
        write: gets each line, as JSON-compatible fields.
        shown_tokens: of a request in flight, the tokens that its client has.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], shown_tokens: Callable[[int], int]) -> None:
        self._write = write
        self._shown_tokens = shown_tokens
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._zero_s: float | None = None
        self._taken: dict[int, _Taken] = {}
        """In order of arrival: those in flight, and those behind the first of them."""
        self._answered_ms: dict[str, int | None] = {}
        """By session: when the answer to its latest turn ended, None while that is in flight."""
        self._is_open = True
        self.without_answer = 0
        """Requests that ended without a token."""

    def note_event(self, event: Event, _now_s: float) -> None:
        """Take up a request that arrives."""
        if not (self._is_open and isinstance(event, events.RequestArrived)):
            return
        request = event.request
        self._zero_s = event.at_s if self._zero_s is None else self._zero_s
        session = None if request.session is None else self._hash(b"session", request.session.encode()).hex()
        taken = _Taken(
            at_ms=self._ms(event.at_s),
            input_tokens=request.input_tokens,
            ids=array("q", self._ids(request.block_keys)),
            block_size_tokens=request.block_size_tokens,
            session=session,
        )
        if session is not None:
            answered_ms = self._answered_ms.get(session)
            taken.delay_ms = None if answered_ms is None else max(0, taken.at_ms - answered_ms)
            self._answered_ms.pop(session, None)
            self._answered_ms[session] = None
            if len(self._answered_ms) > _MOST_SESSIONS:
                del self._answered_ms[next(iter(self._answered_ms))]
        self._taken[request.id] = taken

    def note(self, record: Record) -> None:
        """Note how a request ended; a request that failed or was stopped keeps the tokens that its client has."""
        if isinstance(record, Finished):
            self._ended(record.request_id, record.output_tokens, record.at_s)
        elif isinstance(record, Rejected):
            self._ended(record.request_id, self._shown_tokens(record.request_id), record.at_s)

    def close(self) -> None:
        """Write what is known of requests that never ended, and forget the key."""
        for request_id in [number for number, taken in self._taken.items() if taken.output_tokens is None]:
            self._ended(request_id, self._shown_tokens(request_id), None)
        self._key, self._is_open = b"", False

    def _ended(self, request_id: int, output_tokens: int, at_s: float | None) -> None:
        taken = self._taken.get(request_id)
        if taken is None:
            return
        taken.output_tokens = output_tokens
        if taken.session is not None and taken.session in self._answered_ms:
            ended_ms = None if at_s is None or not output_tokens else self._ms(at_s)
            self._answered_ms[taken.session] = ended_ms
        while self._taken:
            first = next(iter(self._taken))
            tokens = self._taken[first].output_tokens
            if tokens is None:
                return
            taken = self._taken.pop(first)
            if tokens:
                self._write(_line(taken, tokens))
            else:
                self.without_answer += 1

    def _ids(self, keys: Sequence[BlockKey]) -> list[int]:
        found = [self._hash(b"block", key if isinstance(key, bytes) else str(key).encode()) for key in keys]
        return [int.from_bytes(each, "big") >> (64 - _ID_BITS) for each in found]

    def _hash(self, kind: bytes, name: bytes) -> bytes:
        return hashlib.blake2b(name, digest_size=8, key=self._key, person=kind).digest()

    def _ms(self, at_s: float) -> int:
        return max(0, round(1000 * (at_s - (self._zero_s or 0.0))))


def _line(taken: _Taken, output_tokens: int) -> dict[str, Any]:
    line: dict[str, Any] = {
        "timestamp": taken.at_ms,
        "input_length": taken.input_tokens,
        "output_length": output_tokens,
        "hash_ids": taken.ids.tolist(),
        "trace_block_size": taken.block_size_tokens,
    }
    if taken.session is not None:
        line["session_id"] = taken.session
    if taken.delay_ms is not None:
        line["delay"] = taken.delay_ms
    return line
