"""TraceLab's rounds of coding agents (2026): no block ids, but how much of each prompt was cached.

The engine reported `prefix_tokens` of each round. Ids are minted from them: a round keeps the whole blocks of
that prefix from the round before it in its session and gets new ones for the rest. So prompts share blocks only
with earlier rounds of their session, in whole blocks; what sessions share is not in the file. Rounds stand in
order of the time at which their last input came; a round without any time is refused. Sub-agents are sessions
of their own.
"""

from collections.abc import Iterable
from typing import Annotated, Final, final

import msgspec
from msgspec import Meta

from mooncake_lab.workload.formats.rows import (
    LARGEST_LENGTH,
    LENGTH,
    FreshIds,
    JsonRecord,
    LineError,
    Reading,
    Row,
    ticks,
)

_Length = Annotated[int, Meta(ge=1, le=LARGEST_LENGTH)]
_Tokens = Annotated[int, Meta(ge=0, le=LARGEST_LENGTH)]


class TraceLabEvent(msgspec.Struct):
    """Something that happened in a round."""

    event_type: str
    timestamp: str | None = None


class TraceLabRound(msgspec.Struct):
    """The fields that are read."""

    session_id: str
    round_index: int
    input_tokens_total: _Length
    prefix_tokens: _Tokens
    output_tokens: _Length
    timing_events: list[TraceLabEvent]


_ALLOWED: Final = {
    "input_tokens_total": LENGTH,
    "output_tokens": LENGTH,
    "prefix_tokens": f"a whole number from 0 to {LARGEST_LENGTH}",
    "timestamp": "a date of ISO 8601, or null",
}
_INPUTS: Final = frozenset({"user_message", "tool_result"})
_OUTPUTS: Final = frozenset({"text", "reasoning", "tool_call"})


class _Round(msgspec.Struct, gc=False):
    """What is kept of a round until the file ends; times in ticks."""

    at: int
    index: int
    ended: int | None
    input_tokens: int
    prefix_tokens: int
    output_tokens: int


@final
class TraceLabReader:
    """Rows of all rounds, once the file has ended."""

    def __init__(self, reading: Reading) -> None:
        self._block_size_tokens = reading.block_size_tokens
        self._records = JsonRecord(TraceLabRound, _ALLOWED)
        self._sessions: dict[str, list[_Round]] = {}

    def rows(self, record: bytes) -> list[Row]:
        """Nothing yet: the rounds of a session need not stand in order."""
        line = self._records.decode(record)
        inputs, outputs = _times(line, _INPUTS), _times(line, _OUTPUTS)
        if not inputs and not outputs:
            raise LineError("timing_events", "a list without a time", "an event of input or output with a time")
        at = max(inputs) if inputs else min(outputs)
        if line.prefix_tokens > line.input_tokens_total:
            allowed = f"at most input_tokens_total, {line.input_tokens_total}"
            raise LineError("prefix_tokens", str(line.prefix_tokens), allowed)
        ended = max(at, *outputs) if outputs else None
        self._sessions.setdefault(line.session_id, []).append(
            _Round(at, line.round_index, ended, line.input_tokens_total, line.prefix_tokens, line.output_tokens)
        )
        return []

    def kept(self, row: Row) -> None:
        """Nothing."""

    def finish(self) -> Iterable[Row]:
        """The rounds of one session after another, each in order of time."""
        fresh = FreshIds()
        size = self._block_size_tokens or 1
        for session, rounds in self._sessions.items():
            rounds.sort(key=lambda each: (each.at, each.index))
            before, shared = None, list[int]()
            for each in rounds:
                whole, rest = divmod(each.input_tokens, size)
                shared = shared[: min(each.prefix_tokens // size, whole)]
                shared += fresh.take(whole - len(shared))
                yield Row(
                    at=each.at,
                    input_tokens=each.input_tokens,
                    output_tokens=each.output_tokens,
                    ids=shared + fresh.take(1) if rest else shared,
                    session=session,
                    delay=None if before is None or before.ended is None else max(0, each.at - before.ended),
                )
                before = each


def _times(line: TraceLabRound, kinds: frozenset[str]) -> list[int]:
    found = list[int]()
    for place, event in enumerate(line.timing_events):
        if event.event_type in kinds and event.timestamp:
            try:
                found.append(ticks(event.timestamp))
            except ValueError:
                where = f"timing_events[{place}].timestamp"
                raise LineError(where, repr(event.timestamp), _ALLOWED["timestamp"]) from None
    return found
