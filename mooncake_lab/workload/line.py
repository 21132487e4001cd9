"""One line of a trace file: its fields, the names other tools give them, and what is wrong with a bad one.

A good line costs one typed decoding. Only a bad one is looked at again, field by field, to say why.
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
_Length = Annotated[int, Meta(ge=0, le=_LARGEST_LENGTH)]


class Line(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A line as written in the file; which of the optional names may occur together, `read_line` says."""

    hash_ids: list[int]
    timestamp: _Milliseconds | UnsetType = UNSET
    input_length: _Length | UnsetType = UNSET
    output_length: _Length | UnsetType = UNSET
    created_time: _Milliseconds | UnsetType = UNSET
    input_tokens: _Length | UnsetType = UNSET
    output_tokens: _Length | UnsetType = UNSET
    session_id: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=_LARGEST_LENGTH)] | None = None
    delay: _Milliseconds | UnsetType = UNSET
    delay_ms: _Milliseconds | UnsetType = UNSET
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
        raise _fault_in(raw, error) from None
    if line.timestamp is UNSET or line.input_length is UNSET or line.output_length is UNSET:
        _adopt_aliases(line)
    elif not (
        line.created_time is line.input_tokens is line.output_tokens is line.delay is line.delay_ms is UNSET
    ):
        raise _fault_in(raw, ValueError("a field is given twice"))
    if line.input_length == 0:
        raise LineError("input_length", "0", "a whole number from 1")
    if line.max_tokens is not None and line.max_tokens < cast("int", line.output_length):
        raise LineError("max_tokens", str(line.max_tokens), f"at least the output_length, {line.output_length}")
    return line


def check_blocks(line: Line, block_size_tokens: int) -> None:
    """Check that the line has one block id for each block of its prompt, the last one possibly partial.

    Raises:
        LineError: when it has more or fewer, or an id is not an unsigned 64-bit number.
    """
    ids, tokens = line.hash_ids, cast("int", line.input_length)
    expected = blocks_for(tokens, block_size_tokens)
    if len(ids) != expected:
        allowed = f"{expected} ids, one for each block of {block_size_tokens} tokens of input_length {tokens}"
        raise LineError("hash_ids", f"a list of {len(ids)} ids", allowed)
    if min(ids) < 0 or max(ids) > LARGEST_ID:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise LineError("hash_ids", f"a list with {wrong}", f"a list of whole numbers from 0 to {LARGEST_ID}")


def _adopt_aliases(line: Line) -> None:
    for alias, name in ALIASES.items():
        value = getattr(line, alias)
        if value is UNSET:
            continue
        if getattr(line, name) is not UNSET:
            raise LineError(alias, repr(value), f"either {alias!r} or {name!r}, not both")
        setattr(line, name, value)
    for name in ("input_length", "output_length"):
        if getattr(line, name) is UNSET:
            raise LineError(name, "missing", _CHECKS[name][1])
    if (line.timestamp is UNSET) == (line.delay is UNSET):
        value = "missing" if line.timestamp is UNSET else repr(line.timestamp)
        raise LineError("timestamp", value, "milliseconds from 0, or a 'delay' instead of it, not both")


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


def _fault_in(raw: bytes, error: Exception) -> LineError:
    """Find the first thing wrong with a line that could not be read."""
    try:
        content = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return LineError(None, f"{raw!r} ({error})", "one JSON object with finite numbers")
    if not isinstance(content, dict):
        return LineError(None, repr(content), "one JSON object")
    fields = cast("dict[str, Any]", content)
    for field in fields:
        if (fault := _field_fault(fields, field)) is not None:
            return fault
    if "hash_ids" not in fields:
        return LineError("hash_ids", "missing", _CHECKS["hash_ids"][1])
    if "timestamp" in fields:
        return LineError("timestamp", repr(fields["timestamp"]), "either 'timestamp' or 'delay', not both")
    return LineError(None, f"{raw!r} ({error})", "a line of a trace")


def _field_fault(fields: Mapping[str, Any], field: str) -> LineError | None:
    value = fields[field]
    name = ALIASES.get(field, field)
    if name not in _CHECKS:
        return LineError(field, repr(value), f"one of the fields {', '.join((*_CHECKS, *ALIASES))}")
    if name != field and name in fields:
        return LineError(field, repr(value), f"either {field!r} or {name!r}, not both")
    check, allowed = _CHECKS[name]
    return None if check(value) else LineError(field, _shown(value, check), allowed)


def _shown(value: Any, check: Callable[[Any], bool]) -> str:
    """The value, or for a list the first item that is wrong."""
    if isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            if not check([item]):
                return f"a list with {item!r} at {index}"
    return repr(value)
