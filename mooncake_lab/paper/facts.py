"""Facts and curves: numbers of the papers, each with its unit, its place and how it was read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from mooncake_lab.paper.tables import read_rows

if TYPE_CHECKING:
    import pandas as pd

Source: TypeAlias = Literal["printed", "read", "derived", "assumed"]
"""How a number was got: printed in the paper, read off a figure, derived from such numbers, or assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number of a paper."""

    value: float
    unit: str
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
    return Fact(
        value=float(row["y"]),
        unit=row.get("unit", entry["y_unit"]),
        edition=entry["edition"],
        place=entry["place"],
        source=_source(row["source"], name),
        note=entry["notes"],
    )


def constant(name: str) -> Fact:
    """One of the papers' constants, or a number that follows from them (`data/paper/constants.csv`).

    Raises:
        ValueError: when no constant has that name; the message lists the constants.
    """
    rows = {row["name"]: row for row in read_rows("constants.csv")}
    if name not in rows:
        raise ValueError(f"no constant {name!r}; there are {', '.join(rows)}")
    row = rows[name]
    return Fact(
        value=float(row["value"]),
        unit=row["unit"],
        edition=row["edition"],
        place=row["place"],
        source=_source(row["source"], name),
        note=row["note"],
    )


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


def _source(text: str, name: str) -> Source:
    if text not in get_args(Source):
        raise ValueError(f"{name} has a number of source {text!r}; allowed are {', '.join(get_args(Source))}")
    return cast("Source", text)
