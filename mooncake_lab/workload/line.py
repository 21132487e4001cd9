"""One line of a trace file: its fields, the names other tools give them, and what is wrong with a bad one.

A good line under the released traces' names costs one typed decoding. Any other is looked at field by field, to
adopt the names of other tools or to say what is wrong.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mooncake_lab.core import blocks_for

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "created_time": "timestamp",
        "input_tokens": "input_length",
        "output_tokens": "output_length",
        "delay_ms": "delay",
    }
)
"""Names that other tools write, and the field of the released traces each stands for."""

LARGEST_ID: Final = 2**64 - 1
"""Block ids are unsigned 64-bit hashes at most."""
_LARGEST_LENGTH: Final = 2**53
_Milliseconds = Annotated[float, Meta(ge=0)]


class Line(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A line of a trace under the names of the released traces."""

    hash_ids: list[int]
    input_length: Annotated[int, Meta(ge=1, le=_LARGEST_LENGTH)]
    output_length: Annotated[int, Meta(ge=0, le=_LARGEST_LENGTH)]
    timestamp: _Milliseconds | UnsetType = UNSET
    delay: _Milliseconds | UnsetType = UNSET
    session_id: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=_LARGEST_LENGTH)] | None = None
    trace_block_size: Annotated[int, Meta(ge=1)] | UnsetType = UNSET


class LineError(ValueError):
    """What is wrong with a line: the field, its value, and what is allowed there."""

    def __init__(self, field: str | None, value: str, allowed: str) -> None:
        self.field = field
        self.value = value if len(value) <= 80 else value[:77] + "..."
        self.allowed = allowed
        where = "the line" if field is None else f"field {field!r}"
        super().__init__(f"{where} is {self.value}; allowed is {allowed}")


_DECODER: Final = msgspec.json.Decoder(Line)


def read_line(raw: bytes) -> Line:
    """A line with its fields under the released traces' names, each value in its range.

    Raises:
        LineError: when the line is not a JSON object of known fields with allowed values.
    """
    try:
        line = _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        line = _examined(raw, error)
    if (line.timestamp is UNSET) == (line.delay is UNSET):
        value = "missing" if line.timestamp is UNSET else repr(line.timestamp)
        raise LineError("timestamp", value, "either 'timestamp' or 'delay', not both; milliseconds from 0")
    if line.max_tokens is not None and line.max_tokens < line.output_length:
        raise LineError("max_tokens", str(line.max_tokens), f"at least the output_length, {line.output_length}")
    return line


def check_blocks(line: Line, block_size_tokens: int) -> None:
    """Check that the line has one block id for each block of its prompt, the last one possibly partial.

    Raises:
        LineError: when it has more or fewer, or an id is not an unsigned 64-bit number.
    """
    ids, tokens = line.hash_ids, line.input_length
    expected = blocks_for(tokens, block_size_tokens)
    if len(ids) != expected:
        allowed = f"{expected} ids, one for each block of {block_size_tokens} tokens of input_length {tokens}"
        raise LineError("hash_ids", f"a list of {len(ids)} ids", allowed)
    if min(ids) < 0 or max(ids) > LARGEST_ID:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise LineError("hash_ids", f"a list with {wrong}", f"a list of whole numbers from 0 to {LARGEST_ID}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_LENGTH


_MILLISECONDS = (_is_number, "a finite number of milliseconds from 0")
_CHECKS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = MappingProxyType(
    {
        "timestamp": _MILLISECONDS,
        "input_length": (lambda value: _is_length(value) and value > 0, "a whole number from 1"),
        "output_length": (_is_length, "a whole number from 0"),
        "hash_ids": (
            lambda value: isinstance(value, list) and all(type(item) is int for item in cast("list[Any]", value)),
            "a list of whole numbers",
        ),
        "session_id": (lambda value: value is None or isinstance(value, str), "a string or null"),
        "max_tokens": (
            lambda value: value is None or (_is_length(value) and value > 0),
            "a whole number from 1, or null",
        ),
        "delay": _MILLISECONDS,
        "trace_block_size": (lambda value: _is_length(value) and value > 0, "a whole number from 1"),
    }
)


def _examined(raw: bytes, error: Exception) -> Line:
    """A line that has other names than the released traces; else the first thing that is wrong with it.

    Raises:
        LineError: naming that.
    """
    try:
        content = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise LineError(None, f"{raw!r} ({error})", "one JSON object with finite numbers") from None
    if not isinstance(content, dict):
        raise LineError(None, repr(content), "one JSON object")
    fields: dict[str, Any] = {}
    for field, value in cast("dict[str, Any]", content).items():
        name = ALIASES.get(field, field)
        if name not in _CHECKS:
            raise LineError(field, repr(value), f"one of the fields {', '.join((*_CHECKS, *ALIASES))}")
        if name != field and name in content:
            raise LineError(field, repr(value), f"either {field!r} or {name!r}, not both")
        check, allowed = _CHECKS[name]
        if not check(value):
            raise LineError(field, _shown(value, check), allowed)
        fields[name] = value
    for name in ("input_length", "output_length", "hash_ids"):
        if name not in fields:
            raise LineError(name, "missing", _CHECKS[name][1])
    return msgspec.convert(fields, Line)


def _shown(value: Any, check: Callable[[Any], bool]) -> str:
    """The value, or for a list the first item that is wrong."""
    if isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            if not check([item]):
                return f"a list with {item!r} at {index}"
    return repr(value)
