"""What of the papers is redrawn where, and what they leave open: the two ledgers behind the book's tables."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from mooncake_lab.paper.tables import read_rows

Status: TypeAlias = Literal["redrawn", "explained", "not possible"]
"""Whether a figure or table of a paper is in this book."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeItem:
    """One figure, table, equation or listing of a paper."""

    edition: str
    item: str
    shows: str
    status: Status
    chapter: str
    """Stem of the chapter that redraws it; empty where none does."""
    remark: str
    """Why not, or what to bear in mind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One point that the papers leave open, and what this book assumes."""

    id: str
    topic: str
    missing: str
    assumption: str
    value: float | None
    """The assumed number, where the assumption is one."""
    unit: str
    sensitivity: str
    """How much the results depend on it, or why that was not measured."""
    chapter: str


def scope() -> tuple[ScopeItem, ...]:
    """Every figure and table of the four papers, and what is redrawn of their companions, in their order.

    Raises:
        ValueError: naming the item whose status is not allowed, or whose chapter does not fit the status.
    """
    return tuple(_item(row) for row in read_rows("scope.csv"))


def assumptions() -> tuple[Assumption, ...]:
    """Every assumption, in the order of `data/paper/assumptions.csv`."""
    return tuple(_assumption(row) for row in read_rows("assumptions.csv"))


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


def _item(row: dict[str, str]) -> ScopeItem:
    name = f"{row['edition']} {row['item']} of scope.csv"
    if row["status"] not in get_args(Status):
        raise ValueError(f"{name} has status {row['status']!r}; allowed are {', '.join(get_args(Status))}")
    if bool(row["chapter"]) != (row["status"] == "redrawn"):
        raise ValueError(
            f"{name} is {row['status']} in chapter {row['chapter']!r}; what is redrawn has one, nothing else does"
        )
    return ScopeItem(
        edition=row["edition"],
        item=row["item"],
        shows=row["shows"],
        status=cast("Status", row["status"]),
        chapter=row["chapter"],
        remark=row["remark"],
    )


def _assumption(row: dict[str, str]) -> Assumption:
    return Assumption(
        id=row["id"],
        topic=row["topic"],
        missing=row["missing"],
        assumption=row["assumption"],
        value=float(row["value"]) if row["value"] else None,
        unit=row["unit"],
        sensitivity=row["sensitivity"],
        chapter=row["chapter"],
    )
