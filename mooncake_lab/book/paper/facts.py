"""Facts, curves and the two ledgers of the papers, each number with its unit, its place and how it was read."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec

from mooncake_lab.core import carried_folder
from mooncake_lab.core.extras import naming_extra

if TYPE_CHECKING:
    import pandas as pd

Told = TypeVar("Told")


def data_dir() -> Path:
    """The directory that holds `index.csv`, `curves/`, `constants.csv`, `claims.csv` and the rest.

    Raises:
        FileNotFoundError: naming the places searched, when none of them holds the data.
    """
    return carried_folder("paper")


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of one CSV file below `data_dir()`, as text by column.

    Raises:
        ValueError: naming file and line, when a row has more or fewer fields than the header.
    """
    return rows_of(data_dir() / name)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, as text by column.

    Raises:
        ValueError: naming file and line, when a row has more or fewer fields than the header.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = next(reader)
        rows: list[dict[str, str]] = []
        for fields in reader:
            if len(fields) != len(header):
                raise ValueError(
                    f"{path}:{reader.line_num}: {len(fields)} fields where the header names {len(header)}"
                )
            rows.append(dict(zip(header, fields, strict=True)))
    return rows


def told(row: Mapping[str, Any], kind: type[Told], what: str) -> Told:
    """A row of text as a value, its fields converted to their types; an empty field has its default.

    Args:
        row: by field; other columns are passed over.
        kind: a dataclass.
        what: of which data set the row is, for errors.

    Raises:
        ValueError: naming `what` and the field, when one is missing or is not allowed.
    """
    try:
        return msgspec.convert({name: text for name, text in row.items() if text}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{what}: {error}") from error


Source: TypeAlias = Literal["printed", "read", "derived", "assumed"]
"""How a number was got: printed in the paper, read off a figure, derived from such numbers, or assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number of a paper."""

    value: float
    unit: str = ""
    edition: str
    """Which paper: `FAST'25`, `arXiv v3`, `SARATHI` or `Sarathi-Serve`."""
    place: str
    """Figure, table or section of that edition."""
    source: Source
    note: str = ""

    def __float__(self) -> float:
        return self.value

    @property
    def cited(self) -> str:
        """Edition and place in one string, for tables and captions."""
        return f"{self.edition} {self.place}"


def curve(name: str) -> "pd.DataFrame":
    """A figure or table as data: columns series, x, y, source, and unit where every row has its own.

    `x` is numeric where every x is a number (an unlimited capacity is `inf`), and text otherwise. `index()`
    gives the meaning and units of the axes; `data/paper/README.md` describes how the curve was read.

    Raises:
        ValueError: when no curve has that name; the message lists the curves.
    """
    with naming_extra("stats"):
        import pandas as pd  # not above: it takes a second, and `mooncake-lab simulate` does without

    _entry(name)
    rows = read_rows(f"curves/{name}.csv")
    table = pd.DataFrame(rows).astype({"y": float})
    try:
        return table.astype({"x": float})
    except ValueError:
        return table


def points(name: str, series: str) -> tuple[list[float], list[float]]:
    """The x and y of one series of a curve whose x are numbers.

    Raises:
        ValueError: listing the curves or series there are, when the one asked for does not exist.
    """
    _entry(name)
    rows = _of_series(read_rows(f"curves/{name}.csv"), name, series)
    return [float(row["x"]) for row in rows], [float(row["y"]) for row in rows]


def index() -> "pd.DataFrame":
    """One row a curve: name, edition, place, title, axes with units, workload, cluster and notes."""
    with naming_extra("stats"):
        import pandas as pd  # not above: it takes a second, and `mooncake-lab simulate` does without

    return pd.DataFrame(read_rows("index.csv")).set_index("name")


def fact(name: str, *, series: str | None = None, x: float | str | None = None) -> Fact:
    """One number of a curve.

    Args:
        name: of the curve, as in `index()`.
        series: which one; may be left out when the curve has only one.
        x: where on the series, exactly as listed there; may be left out when the series has one point.

    Raises:
        ValueError: listing the curves, series or points there are, when the number asked for does not exist.
    """
    entry = _entry(name)
    row = _only(_of_series(read_rows(f"curves/{name}.csv"), name, series), name, x)
    about = {"unit": row.get("unit", entry["y_unit"]), "note": entry["notes"]}
    return told({**entry, **about, "value": row["y"], "source": row["source"]}, Fact, name)


def constant(name: str) -> Fact:
    """One of the papers' constants, or a number that follows from them (`data/paper/constants.csv`).

    Raises:
        ValueError: when no constant has that name; the message lists the constants.
    """
    rows = {row["name"]: row for row in read_rows("constants.csv")}
    if name not in rows:
        raise ValueError(f"no constant {name!r}; there are {', '.join(rows)}")
    return told(rows[name], Fact, name)


def _entry(name: str) -> dict[str, str]:
    rows = {row["name"]: row for row in read_rows("index.csv")}
    if name not in rows:
        raise ValueError(f"no curve {name!r}; there are {', '.join(sorted(rows))}")
    return rows[name]


def _of_series(rows: list[dict[str, str]], name: str, series: str | None) -> list[dict[str, str]]:
    names = list(dict.fromkeys(row["series"] for row in rows))
    if series is None and len(names) == 1:
        return rows
    found = [row for row in rows if row["series"] == series]
    if not found:
        raise ValueError(f"{name} has no series {series!r}; it has {', '.join(map(repr, names))}")
    return found


def _only(rows: list[dict[str, str]], name: str, x: float | str | None) -> dict[str, str]:
    found = rows if x is None else [row for row in rows if _same(row["x"], x)]
    if len(found) != 1:
        shown = ", ".join(row["x"] for row in rows[:40]) + (", ..." if len(rows) > 40 else "")
        raise ValueError(
            f"{name}, series {rows[0]['series']!r}, has {len(found)} points for x={x!r}; its points are {shown}"
        )
    return found[0]


def _same(text: str, x: float | str) -> bool:
    if isinstance(x, str):
        return text == x
    try:
        return float(text) == x
    except ValueError:
        return False


Status: TypeAlias = Literal["redrawn", "explained", "not possible"]
"""Whether a figure or table of a paper is in this book."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeItem:
    """One figure, table, equation or listing of a paper."""

    edition: str
    item: str
    shows: str
    status: Status
    chapter: str = ""
    """Stem of the chapter that redraws it; empty where none does."""
    remark: str = ""
    """Why not, or what to bear in mind."""

    def __post_init__(self) -> None:
        if bool(self.chapter) != (self.status == "redrawn"):
            raise ValueError(
                f"{self.status} in chapter {self.chapter!r}; what is redrawn has one, nothing else does"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One point that the papers leave open, and what this book assumes."""

    id: str
    topic: str
    missing: str
    assumption: str
    value: float | None = None
    """The assumed number, where the assumption is one."""
    unit: str = ""
    sensitivity: str
    """How much the results depend on it, or why that was not measured."""
    chapter: str


def scope() -> tuple[ScopeItem, ...]:
    """Every figure and table of the four papers, and what is redrawn of their companions, in their order.

    Raises:
        ValueError: naming the item whose status is not allowed, or whose chapter does not fit the status.
    """
    return tuple(told(row, ScopeItem, f"{row['item']} of scope.csv") for row in read_rows("scope.csv"))


def assumptions() -> tuple[Assumption, ...]:
    """Every assumption, in the order of `data/paper/assumptions.csv`."""
    return tuple(told(row, Assumption, f"{row['id']} of assumptions.csv") for row in read_rows("assumptions.csv"))


def assumption(identifier: str) -> Assumption:
    """The assumption of that id.

    Raises:
        ValueError: when no assumption has that id; the message lists the ids and topics.
    """
    found = {each.id: each for each in assumptions()}
    if identifier not in found:
        listed = ", ".join(f"{each.id} ({each.topic})" for each in found.values())
        raise ValueError(f"no assumption {identifier!r}; there are {listed}")
    return found[identifier]
