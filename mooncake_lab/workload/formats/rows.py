"""What every reader of a format gives: rows, or what is wrong with a line."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

import msgspec

from mooncake_lab.core import blocks_for

DEFAULT_BLOCK_SIZE_TOKENS: Final = 512
"""Tokens per block of the released traces (arXiv §4)."""
LARGEST_ID: Final = 2**64 - 1
"""Block ids are unsigned 64-bit hashes at most."""
LARGEST_LENGTH: Final = 2**53
"""Up to here whole numbers are exact as floats and in JSON."""
LENGTH: Final = f"a whole number from 1 to {LARGEST_LENGTH}"
TIME: Final = "a finite number of {unit} from 0"

Unit: TypeAlias = Literal["s", "ms", "us", "ns", "date"]
"""Of the times in a file; a date is one as in ISO 8601."""
UNITS_PER_S: Final[Mapping[Unit, float]] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9, "date": 1e7}
"""How many make a second; dates are counted in ticks of 100 ns, which the Azure traces have."""
UNIT_NAMES: Final[Mapping[Unit, str]] = {
    "s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "date": "ticks of 100 ns",
}  # fmt: skip


class LineError(ValueError):
    """What is wrong with a line: the field, its value, and what is allowed there."""

    def __init__(self, field: str | None, value: str, allowed: str) -> None:
        self.field = field
        self.value = value if len(value) <= 80 else value[:77] + "..."
        self.allowed = allowed
        where = "the line" if field is None else f"field {field!r}"
        super().__init__(f"{where} is {self.value}; allowed is {allowed}")


class Row(msgspec.Struct, gc=False, kw_only=True):
    """A request as its file has it; times are in the unit of the file, from any origin."""

    at: float
    input_tokens: int
    output_tokens: int
    ids: list[int] | None = None
    """One for each block of the prompt, the last possibly partial; None where the file has none."""
    block_size_tokens: int | None = None
    """Where the row says so."""
    session: str | None = None
    delay: float | None = None
    """From what it waits for to its arrival."""
    request: str | int | None = None
    """Its name in the file, which other rows may wait for."""
    wait_for: tuple[str | int, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a file is to be read."""

    block_size_tokens: int | None
    """What the caller says; None for what the file says, or else what its format has."""
    unit: Unit
    scope: Literal["file", "session"]
    """Within what an id stands for one block."""
    tokenizer: str | None = None
    """A file of Hugging Face's tokenizers, for formats that hold texts."""
    output_tokens: int | None = None
    """The length of answers that a file with texts does not state."""


class RowReader(Protocol):
    """Makes rows of the records of a file, in their order. It may remember earlier records."""

    def rows(self, record: Any, /) -> list[Row]:
        """The rows of a record; all or none.

        Raises:
            LineError: saying what is wrong with it.
        """
        ...

    def kept(self, row: Row, /) -> None:
        """Remember a row that was found good, where later rows depend on it."""
        ...

    def finish(self) -> Iterable[Row]:
        """Rows that only the whole file decides."""
        ...


Record = TypeVar("Record")
_PATH: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_STEP: Final = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_TYPES: Final[Mapping[str, str]] = {
    "int": "a whole number", "float": "a number", "str": "a string", "array": "a list", "object": "an object",
    "bool": "true or false",
}  # fmt: skip


class JsonRecord(Generic[Record]):
    """Decodes one JSON object after another; what is wrong with one is said with the path of the field.

    Args:
        kind: a msgspec structure with ranges.
        allowed: what the fields may be in words, by name; the types say it otherwise.
    """

    def __init__(self, kind: type[Record], allowed: Mapping[str, str]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._allowed = allowed

    def decode(self, raw: bytes) -> Record:
        """The record.

        Raises:
            LineError: naming the field.
        """
        try:
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._explained(raw, error) from None

    def _explained(self, raw: bytes, error: Exception) -> LineError:
        content = json_object(raw, error)
        message = str(error)
        found = _PATH.search(message)
        path = found["path"] if found else ""
        said = message[: found.start()] if found else message
        if missing := _MISSING.match(said):
            path = f"{path}.{missing['name']}".lstrip(".")
            return LineError(path, "missing", self._words(missing["name"], "given"))
        name = re.sub(r"\[.*?\]", "", path).rpartition(".")[2]
        return LineError(path or None, repr(_value_at(content, path)), self._words(name, said))

    def _words(self, name: str, said: str) -> str:
        if name in self._allowed:
            return self._allowed[name]
        wanted = re.sub(r"^Expected (.*?)(, got .*)?$", r"\1", said)
        return re.sub(
            r"`([^`]*)`",
            lambda found: " or ".join(_TYPES.get(kind, kind) for kind in found[1].split(" | ")),
            wanted,
        )


def _value_at(content: Any, path: str) -> Any:
    """What stands at the path of an error message, as far as it can be followed."""
    for name, number in _STEP.findall(path):
        try:
            content = content[name] if name else content[int(number)]
        except (KeyError, IndexError, TypeError, ValueError):
            return content
    return content


def json_object(raw: bytes, error: Exception) -> dict[str, Any]:
    """What a typed decoding refused, untyped.

    Raises:
        LineError: when it is no JSON object at all.
    """
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        shown = f"no UTF-8: its byte {wrong.start + 1} is 0x{raw[wrong.start]:02x}"
        raise LineError(None, shown, "one JSON object in UTF-8; a file in Latin-1 has to be saved anew") from None
    try:
        content = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise LineError(None, f"{raw!r} ({error})", "one JSON object with finite numbers") from None
    if not isinstance(content, dict):
        raise LineError(None, repr(content), "one JSON object")
    return cast("dict[str, Any]", content)


def check_blocks(ids: list[int], tokens: int, block_size_tokens: int) -> None:
    """Check that a prompt has one block id for each block, the last one possibly partial.

    Raises:
        LineError: when it has more or fewer, or an id is not an unsigned 64-bit number.
    """
    expected = blocks_for(tokens, block_size_tokens)
    if len(ids) != expected:
        allowed = f"{expected} ids, one for each block of {block_size_tokens} tokens of input_length {tokens}"
        raise LineError("hash_ids", f"a list of {len(ids)} ids", allowed + _other_sizes(len(ids), tokens))
    if min(ids) < 0 or max(ids) > LARGEST_ID:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise LineError("hash_ids", f"a list with {wrong}", f"a list of whole numbers from 0 to {LARGEST_ID}")


def _other_sizes(blocks: int, tokens: int) -> str:
    """For which powers of two as a block size the number of ids would be right."""
    fitting = [str(size) for size in (2**power for power in range(20)) if blocks_for(tokens, size) == blocks]
    return f" (with a block size of {' or '.join(fitting)} it would be right)" if fitting else ""


def ticks(text: str) -> int:
    """A date of ISO 8601 in ticks of 100 ns since 1970; without a zone it is UTC. Finer digits are cut off.

    Raises:
        ValueError: when it is no such date.
    """
    whole, point, rest = text.strip().partition(".")
    fraction = re.match(r"\d*", rest)
    digits = fraction[0] if fraction else ""
    if point and not digits:
        raise ValueError(f"{text!r} ends with a point")
    return _whole_seconds(whole + rest[len(digits) :]) * 10_000_000 + int(digits[:7].ljust(7, "0"))


@lru_cache(maxsize=1024)
def _whole_seconds(text: str) -> int:
    at = datetime.fromisoformat(text)
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())


class FreshIds:
    """Numbers for blocks, each given out once. Mutable: it counts."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count: int) -> list[int]:
        """The next numbers."""
        first, self.next = self.next, self.next + count
        return list(range(first, self.next))
