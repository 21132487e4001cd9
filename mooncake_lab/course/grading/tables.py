"""CSV tables that teachers, learning platforms and spreadsheets read and write.

A cell that a spreadsheet would compute is written with an apostrophe before it, and read without it.
"""

import codecs
import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from mooncake_lab.course.grading.collect import printable

_FORMULA: Final = ("=", "+", "-", "@", "|", "%")
"""With these a cell begins that a spreadsheet computes."""
_MOST_BYTES: Final = 20_000_000


class TableRow(dict[str, str]):
    """Cells by the names of their columns, and where the row is; mutable because a dict is."""

    def __init__(self, cells: Mapping[str, str], where: str) -> None:
        super().__init__(cells)
        self.where = where


def written_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in which no cell is a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([head, *([as_text(cell) for cell in row] for row in rows)])
    return text.getvalue()


def as_text(cell: object) -> object:
    """A cell that no spreadsheet takes for a formula, without control characters."""
    if not isinstance(cell, str):
        return cell
    shown = printable(cell)
    return f"'{shown}" if _computed(shown) else shown


def as_read(cell: str) -> str:
    """A cell as it was before `as_text`, without blanks around it."""
    shown = cell.strip()
    return shown[1:].strip() if shown.startswith("'") and _computed(shown[1:]) else shown


def _computed(cell: str) -> bool:
    """Whether a spreadsheet would compute it, also once it has taken an apostrophe away."""
    return cell.lstrip("' ").startswith(_FORMULA)


def read_csv(path: Path, needed: Iterable[str] = ()) -> list[TableRow]:
    """The rows of a table, with `,` or `;` between the cells; rows without any text are left out.

    Raises:
        ValueError: when it is no UTF-8 text, or lacks a column; it says which file and what is allowed.
    """
    raw = path.read_bytes()
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"{path.name} has {len(raw):,} bytes; allowed are {_MOST_BYTES:,}")
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path.name} is not UTF-8 text ({error.reason} at byte {error.start}); save it so"
        ) from error
    if "\0" in text:
        raise ValueError(f"{path.name} holds a zero byte; a table in UTF-8 has none")
    first = text.partition("\n")[0]
    lines = csv.reader(
        io.StringIO(text, newline=""), delimiter=";" if first.count(";") > first.count(",") else ","
    )
    try:
        table = [[*map(as_read, line)] for line in lines]
    except csv.Error as error:
        raise ValueError(f"{path.name}, line {lines.line_num}: {error}") from error
    head = table[0] if table else []
    missing = [name for name in needed if name not in head]
    if missing:
        raise ValueError(
            f"{path.name} has no column {', '.join(map(repr, missing))}; it has"
            f" {', '.join(map(repr, head)) or 'none'}"
        )
    twice = sorted({name for name in head if name and head.count(name) > 1})
    if twice:
        raise ValueError(f"{path.name} has the column {twice[0]!r} twice; each is allowed once")
    for number, line in enumerate(table[1:], start=2):
        if any(line[len(head) :]):
            raise ValueError(
                f"{path.name}, row {number} has {len(line)} cells; allowed are {len(head)}, and a cell with a"
                " comma needs quotes around it"
            )
    return [
        TableRow(dict(zip(head, line, strict=False)), f"{path.name}, row {number}")
        for number, line in enumerate(table[1:], start=2)
        if any(line)
    ]


def number(cell: str) -> float:
    """A number of a cell, with a point or a comma before its decimals.

    Raises:
        ValueError: when it is none.
    """
    return float(cell.replace(",", "."))


def number_in(row: TableRow, column: str, least: float, most: float) -> float:
    """A number in a row.

    Raises:
        ValueError: when it is none, or out of range; it names the file, the row and the column.
    """
    cell = row.get(column, "")
    try:
        found = number(cell)
    except ValueError:
        found = math.nan
    if not least <= found <= most:
        raise ValueError(f"{row.where}: {column} is {cell!r}; allowed are numbers from {least:g} to {most:g}")
    return found
