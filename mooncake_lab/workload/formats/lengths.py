"""Tables of times and lengths: the Azure traces, BurstGPT, Splitwise's and Vidur's files. They have no block ids.

What prompts share is not in such a file, so each block of each prompt is one of its own, and no hit rate follows.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from mooncake_lab.workload.formats.rows import (
    LARGEST_LENGTH,
    LENGTH,
    TIME,
    UNIT_NAMES,
    LineError,
    Reading,
    Row,
    Unit,
    ticks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a table hold what."""

    time: str
    input_tokens: str
    output_tokens: str
    session: str | None = None
    """Where the table has this column."""

    def found(self, names: Sequence[str]) -> bool:
        """Whether a table has them."""
        return {self.time, self.input_tokens, self.output_tokens} <= {*names}


AZURE: Final = Columns(time="TIMESTAMP", input_tokens="ContextTokens", output_tokens="GeneratedTokens")
BURSTGPT: Final = Columns(
    time="Timestamp", input_tokens="Request tokens", output_tokens="Response tokens", session="Session ID"
)
SPLITWISE: Final = Columns(time="arrival_timestamp", input_tokens="prompt_size", output_tokens="token_size")
VIDUR: Final = Columns(time="arrived_at", input_tokens="num_prefill_tokens", output_tokens="num_decode_tokens")


@final
class TableReader:
    """Rows of a table.

    Args:
        columns: what it holds where.
        header: the names of its columns.
        reading: how its times count.
    """

    def __init__(self, columns: Columns, header: Sequence[str], reading: Reading) -> None:
        self._columns = columns
        self._width = len(header)
        place = {name: number for number, name in enumerate(header)}
        self._time, self._input, self._output = (
            place[name] for name in (columns.time, columns.input_tokens, columns.output_tokens)
        )
        self._session = place.get(columns.session) if columns.session else None
        self._unit: Unit = reading.unit

    def rows(self, record: Sequence[str]) -> list[Row]:
        """One row."""
        if len(record) != self._width:
            raise LineError(None, f"a row of {len(record)} columns", f"{self._width} columns, as the header has")
        session = record[self._session].strip() if self._session is not None else ""
        return [
            Row(
                at=self._at(record[self._time]),
                input_tokens=_length(self._columns.input_tokens, record[self._input]),
                output_tokens=_length(self._columns.output_tokens, record[self._output]),
                session=session or None,
            )
        ]

    def kept(self, row: Row) -> None:
        """Nothing."""

    def finish(self) -> Iterable[Row]:
        """Nothing."""
        return ()

    def _at(self, text: str) -> float:
        try:
            at = ticks(text) if self._unit == "date" else float(text)
        except ValueError:
            at = math.nan
        if not (math.isfinite(at) and at >= 0):
            allowed = "a date of ISO 8601" if self._unit == "date" else TIME.format(unit=UNIT_NAMES[self._unit])
            raise LineError(self._columns.time, repr(text), allowed)
        return at


def _length(name: str, text: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,20}\s*", text) or not 1 <= (tokens := int(text)) <= LARGEST_LENGTH:
        why = "; 0 is a request that failed, which lenient reading leaves out" if text.strip() == "0" else ""
        raise LineError(name, repr(text), LENGTH + why)
    return tokens
