"""Reading a trace file, every line checked (FAST'25 Appendix A).

A file holds one JSON object a line: `timestamp` (ms from any origin), `input_length`, `output_length` (tokens)
and `hash_ids` (one a block). Times of a trace count from its first request. Both lengths are at least 1: prefill
produces the first token of every answer, and the shortest answers of the released traces have one token.
`max_tokens`, the most tokens that the client allows for the answer, may be stated too; a line with a longer answer
contradicts itself and is refused. So may fields and names that other tools add.

What contradicts an earlier line is refused (times that go back, another block size), but for an id that stands for
another block than before, which `PrefixIds` counts as a block of its own.

A good line under the released traces' names costs one typed decoding. Any other is looked at field by field, to
adopt the names of other tools or to say what is wrong.
"""

import gzip
import math
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, BinaryIO, Final, cast, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mooncake_lab.core import blocks_for, complete_file
from mooncake_lab.workload.prefixes import PrefixIds
from mooncake_lab.workload.trace import Trace

DEFAULT_BLOCK_SIZE_TOKENS: Final = 512
"""Tokens per block of the released traces (arXiv §4)."""
_GZIP_MAGIC: Final = b"\x1f\x8b"
_FOREIGN: Final[Mapping[bytes, str]] = MappingProxyType(
    {
        b"\xef\xbb\xbf": "begins with a byte order mark (BOM); save it as UTF-8 without one",
        b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
        b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
        b"version https://git-lfs": "is a Git LFS pointer, not the file that it stands for; run `git lfs pull`",
        b"\x28\xb5\x2f\xfd": "is compressed with Zstandard; allowed are plain text and gzip",
        b"\xfd7zXZ": "is compressed with xz; allowed are plain text and gzip",
        b"BZh": "is compressed with bzip2; allowed are plain text and gzip",
        b"PK\x03\x04": "is a zip archive; unpack it, or use gzip",
        b"PAR1": "is a Parquet file; allowed is one JSON object a line",
        b"<!DOCTYPE": "is a page of HTML, as a failed download leaves it; allowed is one JSON object a line",
        b"<html": "is a page of HTML, as a failed download leaves it; allowed is one JSON object a line",
    }
)
"""What other files begin with, and what to do about each."""
_CSV_HEADER: Final = re.compile(rb"""\s*['"]?[A-Za-z_][\w .()/-]*+['"]?[ ]*[,;\t|]""")
"""Tables begin with the name of a column and what separates it from the next; no JSON begins with a letter."""
_OBJECT: Final = re.compile(rb"^\s*\{", re.MULTILINE)
_REASONS_KEPT: Final = 5

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
    output_length: Annotated[int, Meta(ge=1, le=_LARGEST_LENGTH)]
    timestamp: _Milliseconds | UnsetType = UNSET
    delay: _Milliseconds | UnsetType = UNSET
    session_id: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=_LARGEST_LENGTH)] | None = None
    trace_block_size: Annotated[int, Meta(ge=1, le=_LARGEST_LENGTH)] | UnsetType = UNSET


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
        raise LineError("hash_ids", f"a list of {len(ids)} ids", allowed + _other_sizes(len(ids), tokens))
    if min(ids) < 0 or max(ids) > LARGEST_ID:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise LineError("hash_ids", f"a list with {wrong}", f"a list of whole numbers from 0 to {LARGEST_ID}")


def _other_sizes(blocks: int, tokens: int) -> str:
    """For which powers of two as a block size the number of ids would be right."""
    fitting = [str(size) for size in (2**power for power in range(20)) if blocks_for(tokens, size) == blocks]
    return f" (with a block size of {' or '.join(fitting)} it would be right)" if fitting else ""


_LENGTH: Final = f"a whole number from 1 to {_LARGEST_LENGTH}"
_ALLOWED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "timestamp": "a finite number of milliseconds from 0",
        "input_length": _LENGTH,
        "output_length": _LENGTH,
        "hash_ids": "a list of whole numbers",
        "session_id": "a string or null",
        "max_tokens": f"{_LENGTH}, or null",
        "delay": "a finite number of milliseconds from 0",
        "trace_block_size": _LENGTH,
    }
)
"""What each field of `Line` may be, in words."""
_TYPES: Final = get_type_hints(Line, include_extras=True)


def _examined(raw: bytes, error: Exception) -> Line:
    """A line that has other names than the released traces; else the first thing that is wrong with it.

    Raises:
        LineError: naming that.
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
    fields: dict[str, Any] = {}
    for field, value in cast("dict[str, Any]", content).items():
        name = ALIASES.get(field, field)
        if name not in _ALLOWED:
            raise LineError(field, repr(value), f"one of the fields {', '.join((*_ALLOWED, *ALIASES))}")
        if name != field and name in content:
            raise LineError(field, repr(value), f"either {field!r} or {name!r}, not both")
        try:
            fields[name] = msgspec.convert(value, _TYPES[name])
        except msgspec.ValidationError as wrong:
            item = re.search(r"\$\[(\d+)\]", str(wrong))
            shown = f"a list with {value[int(item[1])]!r} at {item[1]}" if item else repr(value)
            raise LineError(field, shown, _ALLOWED[name]) from None
    for name in ("input_length", "output_length", "hash_ids"):
        if name not in fields:
            raise LineError(name, "missing", _ALLOWED[name])
    return Line(**fields)


class TraceError(ValueError):
    """A trace file that cannot be used; the message names file, line, field, value and what is allowed."""


def read_trace(path: str | Path, *, lenient: bool = False, block_size_tokens: int | None = None) -> Trace:
    """Read a trace file, plain or gzipped, and check every line of it.

    A line with a `delay` in place of a `timestamp` arrives that long after the line before it in its
    session; how long the answer took in between is not in the file, so replay is open-loop. A trace with
    delays is put in order of arrival. Arrivals count from the first request that is kept, whatever the origin of
    the file's times.

    Args:
        path: the file; gzip is recognised by content.
        lenient: leave bad lines out, count them in `Trace.skipped` and keep the first few reasons.
        block_size_tokens: tokens per block, where the file does not say; otherwise its `trace_block_size`, or 512.

    Raises:
        TraceError: naming file, line, field, value and what is allowed; or that no request is left.
        OSError: when the file cannot be read.
    """
    path = Path(path)
    reading = _Reading(path, lenient=lenient, block_size_tokens=block_size_tokens)
    for number, raw in _numbered_lines(path):
        try:
            reading.add(raw)
        except LineError as fault:
            reading.refuse(number, fault)
    return reading.trace()


class _Reading:
    """A trace being read; it changes with every line."""

    def __init__(self, path: Path, *, lenient: bool, block_size_tokens: int | None) -> None:
        if block_size_tokens is not None and block_size_tokens < 1:
            raise ValueError(f"block_size_tokens is {block_size_tokens}; at least 1 is needed")
        self.path = path
        self.lenient = lenient
        self.block_size_tokens = block_size_tokens
        self.lines: list[Line] = []
        self.arrival_ms: list[float] = []
        self.prefixes = PrefixIds()
        self.block_ids: list[list[int]] = []
        self.latest_ms = 0.0
        self.has_delays = False
        self.session_ms: dict[str | None, float] = {}
        self.skipped = 0
        self.reasons: list[str] = []

    def add(self, raw: bytes) -> None:
        """Check one line and keep it."""
        line = read_line(raw)
        block_size = self._block_size(line)
        check_blocks(line, block_size)
        arrival_ms = self._arrival_ms(line)
        self.block_size_tokens = block_size
        self.arrival_ms.append(arrival_ms)
        self.lines.append(line)
        last_tokens = line.input_length - (len(line.hash_ids) - 1) * block_size
        self.block_ids.append(self.prefixes.of(line.hash_ids, last_tokens, block_size))
        if line.session_id is not None:
            self.session_ms[line.session_id] = arrival_ms

    def refuse(self, number: int, fault: LineError) -> None:
        """Count a bad line, or stop at it."""
        reason = f"{self.path}:{number}: {fault}"
        if not self.lenient:
            raise TraceError(reason) from None
        self.skipped += 1
        if len(self.reasons) < _REASONS_KEPT:
            self.reasons.append(reason)

    def trace(self) -> Trace:
        """The columns of everything kept."""
        if not self.lines:
            why = (
                f"all {self.skipped} lines are bad, the first: {self.reasons[0]}"
                if self.skipped
                else "it is empty"
            )
            raise TraceError(f"{self.path} holds no request ({why}); allowed is at least one line")
        arrival_ms, lines, block_ids = self.arrival_ms, self.lines, self.block_ids
        if self.has_delays:
            order = sorted(range(len(lines)), key=arrival_ms.__getitem__)
            arrival_ms, lines = [arrival_ms[i] for i in order], [lines[i] for i in order]
            block_ids = [block_ids[i] for i in order]
        return Trace(
            name=self.path.name.split(".")[0].removesuffix("_trace"),
            origin="file",
            block_size_tokens=self.block_size_tokens or DEFAULT_BLOCK_SIZE_TOKENS,
            arrival_s=array("d", ((at_ms - arrival_ms[0]) / 1000 for at_ms in arrival_ms)),
            input_tokens=array("q", (line.input_length for line in lines)),
            output_tokens=array("q", (line.output_length for line in lines)),
            block_ids=array("Q", chain.from_iterable(block_ids)),
            block_starts=array("q", accumulate(map(len, block_ids), initial=0)),
            sessions=tuple(line.session_id for line in lines) if self.session_ms else None,
            max_tokens=_limits(lines),
            skipped=self.skipped,
            skipped_reasons=tuple(self.reasons),
            renamed_blocks=self.prefixes.renamed,
            source=f"file {self.path.name}" + (f", bad lines skipped: {self.skipped}" if self.skipped else ""),
        )

    def _block_size(self, line: Line) -> int:
        written = line.trace_block_size
        known = self.block_size_tokens
        if written is UNSET:
            return known or DEFAULT_BLOCK_SIZE_TOKENS
        if known is not None and written != known:
            raise LineError("trace_block_size", str(written), f"{known}, the block size of this trace")
        return written

    def _arrival_ms(self, line: Line) -> float:
        if line.timestamp is UNSET:
            if line.session_id not in self.session_ms:
                allowed = "a 'delay' after an earlier line of the same 'session_id', else a 'timestamp'"
                raise LineError("delay", f"{line.delay} in session {line.session_id!r}", allowed)
            self.has_delays = True
            arrival_ms = self.session_ms[line.session_id] + cast("float", line.delay)
            if not math.isfinite(arrival_ms):
                raise LineError("delay", repr(line.delay), "a delay after which the time is still finite")
            return arrival_ms
        if line.timestamp < self.latest_ms:
            allowed = f"at least {self.latest_ms:.15g}, the time of an earlier line"
            raise LineError("timestamp", f"{line.timestamp:.15g}", allowed)
        if line.timestamp < (before_ms := self.session_ms.get(line.session_id, 0.0)):
            allowed = f"at least {before_ms:.15g}, the time of the line before it in session {line.session_id!r}"
            raise LineError("timestamp", f"{line.timestamp:.15g}", allowed)
        self.latest_ms = line.timestamp
        return line.timestamp


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    data = path.read_bytes()
    if data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path} is a damaged gzip file: {error}; allowed is a complete one") from error
    for beginning, sentence in _FOREIGN.items():
        if data.startswith(beginning):
            raise TraceError(f"{path} {sentence}")
    if data.lstrip().startswith(b"[") and data.rstrip().endswith(b"]"):
        raise TraceError(
            f"{path} holds a JSON array; allowed is one JSON object a line, without brackets and commas"
        )
    if _CSV_HEADER.match(data) and not _OBJECT.search(data):
        raise TraceError(f"{path} is a table with columns, such as CSV; allowed is one JSON object a line")
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if raw and not raw.isspace():
            yield number, raw


def _limits(lines: list[Line]) -> "array[int] | None":
    """The max_tokens of each line, 0 where it has none; None where no line has one."""
    if all(line.max_tokens is None for line in lines):
        return None
    return array("q", (line.max_tokens or 0 for line in lines))


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a trace as a file that `read_trace` gives back; the file appears complete or not at all.

    A name that ends in `.gz` is written compressed; equal traces give equal bytes, as the file holds no time.
    Times are written in milliseconds. A time that was read from a file, or is a whole number of
    milliseconds, comes back bit for bit; any other within one rounding of a float.
    """
    encoder = msgspec.json.Encoder()
    with ExitStack() as opened:
        file: BinaryIO | gzip.GzipFile = opened.enter_context(complete_file(Path(path)))
        if Path(path).suffix == ".gz":
            file = opened.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        for line in _lines_of(trace):
            file.write(encoder.encode(line) + b"\n")


def _lines_of(trace: Trace) -> Iterator[dict[str, Any]]:
    for traced in trace.requests():
        request = traced.request
        line: dict[str, Any] = {
            "timestamp": _milliseconds(request.arrival_s),
            "input_length": request.input_tokens,
            "output_length": traced.output_tokens,
            "hash_ids": request.block_keys,
        }
        if trace.sessions is not None:
            line["session_id"] = request.session
        if request.max_tokens is not None:
            line["max_tokens"] = request.max_tokens
        if trace.block_size_tokens != DEFAULT_BLOCK_SIZE_TOKENS:
            line["trace_block_size"] = trace.block_size_tokens
        yield line


def _milliseconds(arrival_s: float) -> int | float:
    """A number of ms that divided by 1000 gives the time again, where one does; a whole number if possible."""
    product = arrival_s * 1000
    near = (float(round(product)), product, math.nextafter(product, -math.inf), math.nextafter(product, math.inf))
    found = next((value for value in near if value / 1000 == arrival_s), product)
    return int(found) if found.is_integer() else found
