"""The formats of trace files, one module for each family; which one a file has is known from how it begins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from mooncake_lab.workload.formats.bailian import BailianReader
from mooncake_lab.workload.formats.files import TraceError, TraceFile
from mooncake_lab.workload.formats.lengths import AZURE, BURSTGPT, SPLITWISE, VIDUR, Columns, TableReader
from mooncake_lab.workload.formats.mooncake import MooncakeReader
from mooncake_lab.workload.formats.rows import DEFAULT_BLOCK_SIZE_TOKENS, Reading, RowReader, Unit
from mooncake_lab.workload.formats.text import KEYS, TextReader
from mooncake_lab.workload.formats.tracelab import TraceLabReader
from mooncake_lab.workload.formats.weka import WekaReader
from mooncake_lab.workload.trace import IdOrigin

__all__ = ["FORMATS", "TraceError", "TraceFormat", "format_of", "named_format"]

Records: TypeAlias = Literal["lines", "objects", "table"]
"""One JSON object a line; JSON objects anyhow, also over several lines or in an array; rows of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """A format of trace files."""

    name: str
    title: str
    records: Records
    reader: Callable[[Reading], RowReader] | Columns
    """Makes a reader; a table's depends on its header."""
    keys: Sequence[frozenset[str]] = ()
    """A file whose first object has all fields of one of these sets has this format."""
    block_size_tokens: int | None = None
    """Where the file does not say so."""
    says_block_size: bool = False
    """Whether the file may say it."""
    unit: Unit = "ms"
    scope: Literal["file", "session"] = "file"
    ids: IdOrigin = "recorded"
    in_order: bool = False
    """Whether times that go back are wrong; else rows are put in order."""

    def fits(self, file: TraceFile) -> bool:
        """Whether a file begins like one of this format."""
        if isinstance(self.reader, Columns):
            return file.is_table and self.reader.found(file.columns)
        return not file.is_table and any(keys <= file.keys for keys in self.keys)

    def rows_of(self, file: TraceFile, reading: Reading) -> RowReader:
        """A reader of its records.

        Raises:
            TraceError: when a table has other columns, or what its records need is missing.
        """
        if not isinstance(self.reader, Columns):
            try:
                return self.reader(reading)
            except ValueError as error:
                raise TraceError(f"{file.path}: {error}") from None
        header = file.columns
        if not self.reader.found(header):
            needed = (self.reader.time, self.reader.input_tokens, self.reader.output_tokens)
            raise TraceError(
                f"{file.path}:1: the columns are {', '.join(header)[:200]}; a trace of {self.title}"
                f" has {', '.join(needed)}"
            )
        return TableReader(self.reader, header, reading)


def _table(name: str, title: str, columns: Columns, unit: Unit) -> TraceFormat:
    return TraceFormat(
        name=name,
        title=title,
        records="table",
        reader=columns,
        block_size_tokens=DEFAULT_BLOCK_SIZE_TOKENS,
        unit=unit,
        ids="none",
    )


_KNOWN: Final = (
    TraceFormat(
        name="weka",
        title="Weka and AgentX",
        records="objects",
        reader=WekaReader,
        keys=(frozenset({"hash_id_scope", "requests"}), frozenset({"block_size", "requests", "in", "out"})),
        says_block_size=True,
        unit="s",
        scope="session",
    ),
    TraceFormat(
        name="tracelab",
        title="TraceLab",
        records="lines",
        reader=TraceLabReader,
        keys=(frozenset({"prefix_tokens", "input_tokens_total"}),),
        block_size_tokens=64,
        unit="date",
        scope="session",
        ids="minted",
    ),
    TraceFormat(
        name="bailian",
        title="Qwen-Bailian",
        records="lines",
        reader=BailianReader,
        keys=(frozenset({"chat_id", "hash_ids"}),),
        block_size_tokens=16,
        unit="s",
    ),
    _table("azure", "Azure", AZURE, "date"),
    _table("burstgpt", "BurstGPT", BURSTGPT, "s"),
    _table("splitwise", "Splitwise", SPLITWISE, "s"),
    _table("vidur", "Vidur", VIDUR, "s"),
    TraceFormat(
        name="mooncake",
        title="Mooncake",
        records="lines",
        reader=MooncakeReader,
        keys=(frozenset({"hash_ids"}), frozenset({"input_length"}), frozenset({"input_tokens", "output_tokens"})),
        block_size_tokens=DEFAULT_BLOCK_SIZE_TOKENS,
        says_block_size=True,
        in_order=True,
    ),
    TraceFormat(
        name="text",
        title="texts",
        records="objects",
        reader=TextReader,
        keys=tuple(frozenset({key}) for key in sorted(KEYS)),
        block_size_tokens=DEFAULT_BLOCK_SIZE_TOKENS,
        ids="hashed",
    ),
)
FORMATS: Final[Mapping[str, TraceFormat]] = MappingProxyType({each.name: each for each in _KNOWN})
"""By name; a file has the first of them that fits."""


def named_format(name: str) -> TraceFormat:
    """The format with this name.

    Raises:
        ValueError: when there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; allowed are {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(file: TraceFile) -> TraceFormat:
    """The format of a file, from how it begins; Mooncake's where lines say nothing else.

    Raises:
        TraceError: when it is a table or an array of an unknown kind.
    """
    for each in _KNOWN:
        if each.fits(file):
            if file.is_array and each.records == "lines":
                break
            return each
    if file.is_table:
        known = "; ".join(
            f"{each.reader.time}, {each.reader.input_tokens} and {each.reader.output_tokens}"
            for each in _KNOWN
            if isinstance(each.reader, Columns)
        )
        raise TraceError(
            f"{file.path} is a table with columns, such as CSV, but of none that is known; allowed are those with"
            f" {known}"
        )
    if file.is_array:
        raise TraceError(
            f"{file.path} holds a JSON array; allowed is one JSON object a line, without brackets and commas"
        )
    return FORMATS["mooncake"]
