"""Mooncake's own traces (FAST'25 Appendix A), and the fields that other tools add to them.

A file holds one JSON object a line: `timestamp` (ms from any origin), `input_length`, `output_length` (tokens)
and `hash_ids` (one a block). Both lengths are at least 1: prefill produces the first token of every answer, and
the shortest answers of the released traces have one token. `max_tokens`, the most tokens that the client allows
for the answer, may be stated too; a line with a longer answer contradicts itself and is refused.

Sessions: a line of a `session_id` follows the line before it in that session; one with `wait_for` follows the
answers of the lines whose `request_id` it names. `delay` is the time between these answers and the request. How
long the answers took is not in the file, so a line without a `timestamp` arrives, in an open loop, that long
after the latest of the lines that it follows, and the first line of a session at the beginning.

A good line under the released traces' names costs one typed decoding. Any other is looked at field by field, to
adopt the names of other tools or to say what is wrong.
"""

import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, final, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mooncake_lab.workload.formats.rows import (
    LARGEST_LENGTH,
    LENGTH,
    UNIT_NAMES,
    LineError,
    Reading,
    Row,
    json_object,
)

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "created_time": "timestamp",
        "input_tokens": "input_length",
        "output_tokens": "output_length",
        "delay_ms": "delay",
        "tool_wait_ms": "delay",
        "block_size": "trace_block_size",
    }
)
"""Names that other tools write, and the field of the released traces each stands for."""

_Length = Annotated[int, Meta(ge=1, le=LARGEST_LENGTH)]
_Time = Annotated[float, Meta(ge=0)]


class Line(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A line of a trace under the names of the released traces."""

    input_length: _Length
    output_length: _Length
    hash_ids: list[int] | UnsetType = UNSET
    timestamp: _Time | UnsetType = UNSET
    delay: _Time | UnsetType = UNSET
    session_id: str | None = None
    max_tokens: _Length | None = None
    trace_block_size: _Length | UnsetType = UNSET
    request_id: str | int | None = None
    wait_for: list[str | int] | None = None


_DECODER: Final = msgspec.json.Decoder(Line)
_TYPES: Final = get_type_hints(Line, include_extras=True)
_ALLOWED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "timestamp": "a finite number of milliseconds from 0",
        "input_length": LENGTH,
        "output_length": LENGTH,
        "hash_ids": "a list of whole numbers",
        "session_id": "a string or null",
        "max_tokens": f"{LENGTH}, or null",
        "delay": "a finite number of milliseconds from 0",
        "trace_block_size": LENGTH,
        "request_id": "a string or a whole number, or null",
        "wait_for": "a list of the request_id of earlier lines, or null",
    }
)
"""What each field of `Line` may be, in words."""
IGNORED: Final = frozenset({"branches", "prefix_reset", "tool_events", "extra", "type"})
"""Fields of agents' traces that say nothing about prompts, lengths and times."""


def read_line(raw: bytes) -> Line:
    """A line with its fields under the released traces' names, each value in its range.

    Raises:
        LineError: when the line is not a JSON object of known fields with allowed values.
    """
    try:
        line = _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        line = _examined(raw, error)
    if line.timestamp is not UNSET and line.delay is not UNSET and not (line.session_id or line.wait_for):
        allowed = "either 'timestamp' or 'delay', not both, where nothing comes before; milliseconds from 0"
        raise LineError("timestamp", repr(line.timestamp), allowed)
    if line.max_tokens is not None and line.max_tokens < line.output_length:
        raise LineError("max_tokens", str(line.max_tokens), f"at least the output_length, {line.output_length}")
    return line


def _examined(raw: bytes, error: Exception) -> Line:
    """A line that has other names than the released traces; else the first thing that is wrong with it.

    Raises:
        LineError: naming that.
    """
    content = json_object(raw, error)
    fields: dict[str, Any] = {}
    for field, value in content.items():
        name = ALIASES.get(field, field)
        if field in IGNORED:
            continue
        if name not in _ALLOWED:
            known = ", ".join((*_ALLOWED, *ALIASES, *sorted(IGNORED)))
            raise LineError(field, repr(value), f"one of the fields {known}")
        if name in fields or (name != field and name in content):
            raise LineError(field, repr(value), f"either {field!r} or {name!r}, not both")
        try:
            fields[name] = msgspec.convert(value, _TYPES[name])
        except msgspec.ValidationError as wrong:
            item = re.search(r"\$\[(\d+)\]", str(wrong))
            shown = f"a list with {value[int(item[1])]!r} at {item[1]}" if item else repr(value)
            raise LineError(field, shown, _ALLOWED[name]) from None
    for name in ("input_length", "output_length"):
        if name not in fields:
            raise LineError(name, "missing", _ALLOWED[name])
    return Line(**fields)


@final
class MooncakeReader:
    """Rows of Mooncake's lines; it remembers when each session's latest line arrives."""

    def __init__(self, reading: Reading) -> None:
        self._unit = UNIT_NAMES[reading.unit]
        self._has_ids: bool | None = None
        self._latest = 0.0
        self._sessions: dict[str, float] = {}
        self._requests: dict[str | int, float] = {}

    def rows(self, record: bytes) -> list[Row]:
        """One row."""
        line = read_line(record)
        ids = None if line.hash_ids is UNSET else line.hash_ids
        if self._has_ids is not None and self._has_ids != (ids is not None):
            raise LineError("hash_ids", "missing" if ids is None else "given", _MIXED[self._has_ids])
        at = self._at(line)
        row = Row(
            at=at,
            input_tokens=line.input_length,
            output_tokens=line.output_length,
            ids=ids,
            block_size_tokens=None if line.trace_block_size is UNSET else line.trace_block_size,
            session=line.session_id,
            delay=None if line.delay is UNSET else line.delay,
            request=line.request_id,
            wait_for=tuple(line.wait_for or ()),
            max_tokens=line.max_tokens,
        )
        return [row]

    def kept(self, row: Row) -> None:
        """Remember a row that was found good."""
        self._has_ids = row.ids is not None
        if row.session is not None:
            self._sessions[row.session] = row.at
        if row.request is not None:
            self._requests[row.request] = row.at

    def finish(self) -> Iterable[Row]:
        """Nothing."""
        return ()

    def _at(self, line: Line) -> float:
        """The time of arrival; a line may come neither before an earlier one nor before those that it follows.

        Raises:
            LineError: when it does, or nothing says when it comes.
        """
        if line.request_id in self._requests:
            raise LineError("request_id", repr(line.request_id), "one that no earlier line has")
        for name in line.wait_for or ():
            if name not in self._requests:
                raise LineError("wait_for", repr(name), "the request_id of an earlier line")
        follows = [self._requests[name] for name in line.wait_for or ()]
        if not follows and line.session_id in self._sessions:
            follows = [self._sessions[line.session_id]]
        if line.timestamp is UNSET:
            return self._after(line, follows)
        if line.timestamp < self._latest:
            allowed = f"at least {self._latest:.15g}, the time of an earlier line"
            raise LineError("timestamp", f"{line.timestamp:.15g}", allowed)
        if follows and line.timestamp < max(follows):
            what = (
                f"the line before it in session {line.session_id!r}" if not line.wait_for else "what it waits for"
            )
            raise LineError(
                "timestamp", f"{line.timestamp:.15g}", f"at least {max(follows):.15g}, the time of {what}"
            )
        self._latest = max(self._latest, line.timestamp)
        return line.timestamp

    def _after(self, line: Line, follows: list[float]) -> float:
        if not follows:
            if line.session_id is not None and line.delay is UNSET:
                return 0.0
            if line.delay is UNSET:
                raise LineError("timestamp", "missing", f"a finite number of {self._unit} from 0, or a 'delay'")
            allowed = "a 'delay' after an earlier line of the same 'session_id', else a 'timestamp'"
            raise LineError("delay", f"{line.delay} in session {line.session_id!r}", allowed)
        delay = 0.0 if line.delay is UNSET else line.delay
        at = max(follows) + delay
        if not math.isfinite(at):
            raise LineError("delay", repr(delay), "a delay after which the time is still finite")
        return at


_MIXED: Final = {
    True: "a list of whole numbers, as the lines before have one",
    False: "none, as the lines before have none",
}
