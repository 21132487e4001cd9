"""Reading a trace file of any known format, every record checked; `formats` says which there are.

Times of a trace count from its first request. What contradicts an earlier record is refused, but for an id that
stands for another block than before, which counts as a block of its own (`prefixes`).
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from mooncake_lab.core import blocks_for
from mooncake_lab.workload.formats import TraceFormat, format_of, named_format
from mooncake_lab.workload.formats.files import Progress, TraceError, TraceFile, opened
from mooncake_lab.workload.formats.rows import (
    DEFAULT_BLOCK_SIZE_TOKENS,
    UNITS_PER_S,
    LineError,
    Reading,
    Row,
    RowReader,
    Unit,
    check_blocks,
)
from mooncake_lab.workload.prefixes import unambiguous
from mooncake_lab.workload.trace import Trace

__all__ = ["DEFAULT_BLOCK_SIZE_TOKENS", "TraceError", "read_trace"]

_REASONS_KEPT: Final = 5
_MOST_BLOCKS: Final = 2**24
"""Of one prompt without ids; more is a length in another unit."""


def read_trace(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002  # the name of the option
    lenient: bool = False,
    block_size_tokens: int | None = None,
    time_unit: Unit | None = None,
    id_scope: Literal["file", "session"] | None = None,
    tokenizer: str | None = None,
    output_tokens: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace file, plain, gzipped or packed with Zstandard, and check every record of it.

    A request without a time of its own arrives when its file says that it follows others; how long their answers
    took is not in the file, so replay is open-loop. Arrivals count from the first request that is kept, whatever
    the origin of the file's times.

    Args:
        path: the file; how it is packed is recognised by content.
        format: one of `formats.FORMATS`; by default that of the file's first record.
        lenient: leave bad records out, count them in `Trace.skipped` and keep the first few reasons.
        block_size_tokens: tokens per block, where the file does not say; otherwise those of the format.
        time_unit: of the times in the file; otherwise that of the format.
        id_scope: within what an id stands for one block; otherwise as the format has it.
        tokenizer: a file of Hugging Face's tokenizers, for a file with texts.
        output_tokens: the length of answers that a file with texts does not state.
        progress: called with the bytes read and the bytes of the file.

    Raises:
        TraceError: naming file, line, field, value and what is allowed; or that no request is left.
        ValueError: when an option is not allowed, or not for this format.
        OSError: when the file cannot be read.
    """
    path = Path(path)
    if block_size_tokens is not None and block_size_tokens < 1:
        raise ValueError(f"block_size_tokens is {block_size_tokens}; at least 1 is needed")
    chosen = None if format is None else named_format(format)
    with opened(path, progress) as file:
        found = chosen or format_of(file)
        reading = Reading(
            block_size_tokens=block_size_tokens or (None if found.says_block_size else found.block_size_tokens),
            unit=_unit(found, time_unit),
            scope=_scope(found, id_scope),
            tokenizer=tokenizer,
            output_tokens=output_tokens,
        )
        collected = _Collected(path, found, reading, lenient=lenient)
        rows = found.rows_of(file, reading)
        for number, record in _records(found, file):
            try:
                collected.add(rows.rows(record), rows)
            except LineError as fault:
                collected.refuse(number, fault)
        for row in rows.finish():
            collected.keep(row)
    return collected.trace()


def _unit(found: TraceFormat, unit: Unit | None) -> Unit:
    if unit is not None and (unit == "date") != (found.unit == "date"):
        what = "dates, which have no unit" if found.unit == "date" else "numbers, so their unit is no date"
        raise ValueError(f"time_unit is {unit!r}, but the times of the format {found.name} are {what}")
    return unit or found.unit


def _scope(found: TraceFormat, scope: Literal["file", "session"] | None) -> Literal["file", "session"]:
    if scope is not None and found.ids != "recorded":
        raise ValueError(f"id_scope is {scope!r}, but files of the format {found.name} have no ids")
    return scope or found.scope


def _records(found: TraceFormat, file: TraceFile) -> Iterator[tuple[int, Any]]:
    if found.records == "table":
        if not file.is_table:
            raise TraceError(f"{file.path} is no table; allowed in the format {found.name} is CSV with a header")
        return file.table()
    return file.objects() if found.records == "objects" and not file.has_a_record_a_line else file.lines()


class _Collected:
    """The columns of a trace being read; they grow with every row."""

    def __init__(self, path: Path, found: TraceFormat, reading: Reading, *, lenient: bool) -> None:
        self.path = path
        self.format = found
        self.reading = reading
        self.lenient = lenient
        self.block_size_tokens = reading.block_size_tokens
        self.at = array("d")
        self.origin: float | None = None
        self.input_tokens, self.output_tokens, self.max_tokens = array("q"), array("q"), array("q")
        self.block_ids, self.block_counts = array("Q"), array("q")
        self.has_ids = False
        self.delays = array("d")
        self.sessions: list[str | None] = []
        self.session_names: dict[str, str] = {}
        self.local_ids: dict[tuple[str | None, int], int] = {}
        self.requests: dict[str | int, int] = {}
        self.wait_for: dict[int, tuple[int, ...]] = {}
        self.in_order = True
        self.skipped = 0
        self.reasons: list[str] = []

    def add(self, rows: Sequence[Row], reader: RowReader) -> None:
        """Check the rows of one record and keep them, or none.

        Raises:
            LineError: saying what is wrong.
        """
        for row in rows:
            self._check(row)
        for row in rows:
            self.keep(row)
            reader.kept(row)

    def _check(self, row: Row) -> None:
        size = self._block_size(row)
        if row.ids is not None:
            check_blocks(row.ids, row.input_tokens, size)
        elif blocks_for(row.input_tokens, size) > _MOST_BLOCKS:
            allowed = f"at most {_MOST_BLOCKS} blocks of {size} tokens in one prompt"
            raise LineError("input_length", str(row.input_tokens), allowed)
        if not math.isfinite(row.at):
            raise LineError("timestamp", repr(row.at), "a finite number")
        for name in row.wait_for:
            known = self.requests.get(name)  # none of those of the same record, which its reader puts in order
            if known is not None and self.at[known] + (self.origin or 0) > row.at:
                allowed = f"at least {self.at[known] + (self.origin or 0):.15g}, the time of what it waits for"
                raise LineError("timestamp", f"{row.at:.15g}", allowed)

    def _block_size(self, row: Row) -> int:
        known = self.block_size_tokens
        if row.block_size_tokens is None:
            return known or self.format.block_size_tokens or DEFAULT_BLOCK_SIZE_TOKENS
        if known is not None and row.block_size_tokens != known:
            allowed = f"{known}, the block size of this trace"
            raise LineError("trace_block_size", str(row.block_size_tokens), allowed)
        return row.block_size_tokens

    def keep(self, row: Row) -> None:
        """Keep a good row."""
        number, size = len(self.at), self._block_size(row)
        self.block_size_tokens = size
        if self.origin is None:
            # of dates, whole numbers of ticks are too many digits for a float
            self.origin = row.at if self.reading.unit == "date" else 0
        at = row.at - self.origin
        self.in_order = self.in_order and (number == 0 or at >= self.at[-1])
        self.at.append(at)
        self.input_tokens.append(row.input_tokens)
        self.output_tokens.append(row.output_tokens)
        self.max_tokens.append(row.max_tokens or 0)
        self.delays.append(math.nan if row.delay is None else row.delay)
        session = None if row.session is None else self.session_names.setdefault(row.session, row.session)
        self.sessions.append(session)
        if row.ids is not None:
            self.has_ids = True
            self.block_ids.extend(self._scoped(row.ids, session))
            self.block_counts.append(len(row.ids))
        else:
            self.block_counts.append(blocks_for(row.input_tokens, size))
        if row.wait_for:
            self.wait_for[number] = tuple(sorted({self.requests[name] for name in row.wait_for}))
        if row.request is not None:
            self.requests[row.request] = number

    def _scoped(self, ids: list[int], session: str | None) -> list[int]:
        """Ids that stand for one block in the whole file."""
        if self.reading.scope == "file" or self.format.scope == "session":
            return ids  # readers of formats with local ids have done so
        known = self.local_ids
        return [known.setdefault((session, each), len(known)) for each in ids]

    def refuse(self, number: int, fault: LineError) -> None:
        """Count a bad record, or stop at it.

        Raises:
            TraceError: naming it.
        """
        reason = f"{self.path}:{number}: {fault}"
        if not self.lenient:
            raise TraceError(reason) from None
        self.skipped += 1
        if len(self.reasons) < _REASONS_KEPT:
            self.reasons.append(reason)

    def trace(self) -> Trace:
        """The columns of everything kept, in order of arrival.

        Raises:
            TraceError: when nothing was kept.
        """
        if not self.at:
            why = "it is empty"
            if self.skipped:
                why = f"all {self.skipped} lines are bad, the first: {self.reasons[0]}"
            raise TraceError(f"{self.path} holds no request ({why}); allowed is at least one line")
        size = self.block_size_tokens or DEFAULT_BLOCK_SIZE_TOKENS
        starts = array("q", accumulate(self.block_counts, initial=0))
        renamed = 0
        if self.has_ids:
            renamed = unambiguous(self.block_ids, starts, self.input_tokens, size)
        order = None if self.in_order else sorted(range(len(self.at)), key=self.at.__getitem__)
        if order is not None:
            starts = self._reorder(order, starts)
        if not self.has_ids:
            self.block_ids = array("Q", range(starts[-1]))
        scale, first = UNITS_PER_S[self.reading.unit], self.at[0]
        stated = any(not math.isnan(delay) for delay in self.delays)
        return Trace(
            name=self.path.name.split(".")[0].removesuffix("_trace"),
            origin="file",
            block_size_tokens=size,
            arrival_s=array("d", ((at - first) / scale for at in self.at)),
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            block_ids=self.block_ids,
            block_starts=starts,
            sessions=tuple(self.sessions) if self.session_names else None,
            wait_for=self._waits(order) if self.wait_for else None,
            delay_s=array("d", (delay / scale for delay in self.delays)) if stated else None,
            ids=self.format.ids if self.has_ids else "none",
            max_tokens=self.max_tokens if any(self.max_tokens) else None,
            skipped=self.skipped,
            skipped_reasons=tuple(self.reasons),
            renamed_blocks=renamed,
            format=self.format.name,
            source=f"file {self.path.name}" + (f", bad lines skipped: {self.skipped}" if self.skipped else ""),
        )

    def _reorder(self, order: list[int], starts: "array[int]") -> "array[int]":
        """Put all columns in order of arrival; where the blocks of each request begin then."""
        if self.has_ids:
            blocks = array("Q")
            for i in order:
                blocks.extend(self.block_ids[starts[i] : starts[i + 1]])
            self.block_ids = blocks
        self.at = _permuted(self.at, order)
        self.delays = _permuted(self.delays, order)
        self.input_tokens, self.output_tokens = (
            _permuted(self.input_tokens, order),
            _permuted(self.output_tokens, order),
        )
        self.max_tokens = _permuted(self.max_tokens, order)
        self.sessions = [self.sessions[i] for i in order]
        return array("q", accumulate((self.block_counts[i] for i in order), initial=0))

    def _waits(self, order: list[int] | None) -> tuple[tuple[int, ...], ...]:
        if order is None:
            return tuple(self.wait_for.get(i, ()) for i in range(len(self.at)))
        place = array("q", bytes(8 * len(order)))
        for new, old in enumerate(order):
            place[old] = new
        return tuple(tuple(sorted(place[j] for j in self.wait_for.get(i, ()))) for i in order)


Number = TypeVar("Number", int, float)


def _permuted(column: "array[Number]", order: Iterable[int]) -> "array[Number]":
    return array(column.typecode, (column[i] for i in order))
