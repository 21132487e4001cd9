"""The table that closes every chapter: quantity, paper, ours, band, evidence, verdict."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from mooncake_lab.book.paper.claims import (
    BASIS,
    CONDITIONED,
    Bound,
    Claim,
    Evidence,
    Reach,
    Verdict,
    Yardstick,
    agreement,
    claim,
    judge,
)
from mooncake_lab.book.paper.evidence import Grounds
from mooncake_lab.book.paper.facts import Fact
from mooncake_lab.core.extras import naming_extra

if TYPE_CHECKING:
    import pandas as pd

VERDICT_CLASSES: Final = MappingProxyType(
    dict.fromkeys(Verdict, "verdict-out")
    | {
        Verdict.REPRODUCED: "verdict-reproduced",
        Verdict.CONDITIONAL: "verdict-conditional",
        Verdict.DIRECTION_ONLY: "verdict-direction",
        Verdict.NOT_REPRODUCED: "verdict-not",
    }
)
"""The CSS class of a verdict; the book's style sheet gives each a colour, the word stays readable without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One quantity, the paper's number and ours.

    Raises:
        ValueError: when the band reaches to where there is no effect.
    """

    quantity: str
    paper: Fact
    ours: float | None
    yardstick: Yardstick
    evidence: Evidence
    """How our number is made."""
    grounds: Grounds | None = None
    """What agreement rests on; None where the evidence says it all."""
    reach: Reach = "here"
    claim: str = ""
    """The id of the claim that it is about, where it is about one."""
    decides: bool = False
    """Whether it decides that claim. One row in the book does; others about the same claim are details."""
    elsewhere: float | None = None
    """What the paper's other numbers give for the same quantity, where they disagree with this one."""
    bound: Bound = "exact"
    """Whether our number is only a lower bound, because the experiment's grid ended there."""
    interval: tuple[float, float] | None = None
    """Its 95 % interval, where several replays give one. An order then has to hold at both ends."""
    too_short: bool = False
    """Whether it comes from a run of fewer requests than the claim needs."""
    on_twin: bool = False
    """Whether it is a property of a trace that is not here, which the twin in its place is made to have."""

    def __post_init__(self) -> None:
        self.yardstick.check_band(self.paper.value)

    @property
    def condition(self) -> str:
        """What decides a verdict that has a condition; empty for others."""
        return self.grounds.condition if self.grounds and self.verdict in CONDITIONED else ""

    @property
    def verdict(self) -> Verdict:
        """What became of it."""
        if self.on_twin and self.reach != "scope":
            return Verdict.TRACE_NOT_HERE
        if self.too_short and self.reach == "here":
            return Verdict.TOO_SHORT
        if self.interval and self.yardstick.grade == "order" and not self._order_holds_at_both_ends():
            return Verdict.NOT_REPRODUCED
        return judge(
            self.paper.value,
            self.ours,
            self.yardstick,
            agrees=agreement(self.grounds or Grounds(basis=BASIS[self.evidence])),
            reach=self.reach,
            elsewhere=self.elsewhere,
            bound=self.bound,
        )

    def _order_holds_at_both_ends(self) -> bool:
        return all(map(self.yardstick.has_direction, self.interval or ()))


def compared(
    quantity: str,
    paper: Fact,
    ours: float | None,
    yardstick: Yardstick,
    *,
    evidence: Evidence,
    reach: Reach = "here",
) -> Compared:
    """A row about no claim, e.g. `compared("requests", fact(...), 12031, within(0), evidence="measured")`."""
    return Compared(quantity=quantity, paper=paper, ours=ours, yardstick=yardstick, evidence=evidence, reach=reach)


def claimed(
    about: Claim | str, ours: float | None, *, requests: int | None = None, bound: Bound = "exact"
) -> Compared:
    """The row that decides a claim, by the claim's own yardstick.

    Args:
        about: the claim, or its id.
        ours: our number in its unit; None where it was not measured.
        requests: of the run that our number comes from, where the claim depends on their count.
        bound: whether our number is only a lower bound.

    Raises:
        ValueError: when no claim has that id, or it depends on the length of the run, which is not given.
    """
    judged = claim(about) if isinstance(about, str) else about
    return Compared(
        quantity=judged.sentence,
        paper=judged.fact,
        ours=ours,
        yardstick=judged.yardstick,
        evidence=judged.evidence,
        grounds=judged.grounds,
        reach=judged.reach,
        claim=judged.id,
        decides=True,
        elsewhere=judged.elsewhere,
        bound=bound,
        too_short=ours is not None and judged.is_too_short(requests),
    )


def noted(row: Compared, words: str) -> Compared:
    """The row with a remark in brackets behind its quantity, such as its workload."""
    return replace(row, quantity=f"{row.quantity} ({words})")


def detail(row: Compared, words: str) -> Compared:
    """A row about a claim that does not decide it: the words say in what it differs from the one that does."""
    return replace(noted(row, words), decides=False)


def unless_twin(row: Compared, origin: str) -> Compared:
    """The row as it is when a released trace decided it; a twin is made to match, so it judges nothing.

    For lengths and sharing, which a twin copies. What a cluster does with them, such as latencies, is judged on a
    twin, too; those rows say so in their words.
    """
    if origin == "released":
        return row
    return replace(noted(row, f"{origin}, made to match"), on_twin=True)


def marked_if_twin(row: Compared, twin: object) -> Compared:
    """The row, marked if it comes from a twin, which matches a trace in lengths and sharing, not in latencies."""
    return noted(row, "on the twin") if twin else row


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """The rows of a chapter's last table; shows itself as HTML in a notebook."""

    rows: tuple[Compared, ...]

    def frame(self) -> "pd.DataFrame":
        """The table as data, one row a quantity.

        Columns: quantity, unit, paper, ours, band, evidence, verdict, condition, place, source, claim, decides,
        bound.
        """
        with naming_extra("stats"):
            import pandas as pd  # not above: it takes a second, and `mooncake-lab simulate` does without

        return pd.DataFrame(
            {
                "quantity": [row.quantity for row in self.rows],
                "unit": [row.paper.unit for row in self.rows],
                "paper": [row.paper.value for row in self.rows],
                "ours": [math.nan if row.ours is None else float(row.ours) for row in self.rows],
                "band": [band_text(row.yardstick, row.paper) for row in self.rows],
                "evidence": [row.evidence for row in self.rows],
                "verdict": [row.verdict.value for row in self.rows],
                "condition": [row.condition for row in self.rows],
                "place": [row.paper.cited for row in self.rows],
                "source": [row.paper.source for row in self.rows],
                "claim": [row.claim for row in self.rows],
                "decides": [row.decides for row in self.rows],
                "bound": [row.bound for row in self.rows],
            }
        )

    def _repr_html_(self) -> str:
        return html_table("comparison", [_cells(row) for row in self.rows])

    def __str__(self) -> str:
        return self.frame().to_string(index=False)


def comparison_table(rows: Iterable[Compared]) -> ComparisonTable:
    """The standard table quantity / paper / ours / band / evidence / verdict.

    Raises:
        ValueError: when there is no row, a claim is decided twice, or a number of ours is missing that can be
            measured here.
    """
    table = ComparisonTable(tuple(rows))
    if not table.rows:
        raise ValueError("a comparison table has no rows; at least one quantity is needed")
    decided: set[str] = set()
    for row in table.rows:
        _ = row.verdict
        if row.decides and row.claim in decided:
            raise ValueError(f"two rows decide the claim {row.claim!r}; one does, the others are details of it")
        decided |= {row.claim} if row.decides else set()
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """One cell of a table of verdicts."""

    column: str
    """The column's name: its heading, its CSS class, and the label that a narrow screen shows."""
    html: str
    classes: str = ""


def html_table(classes: str, rows: Iterable[Iterable[TableCell]]) -> str:
    """Rows of cells as an HTML table; each cell carries its column, so that a style sheet can stack rows."""
    lines = [list(row) for row in rows]
    heads = "".join(f'<th scope="col" class="{cell.column}">{cell.column}</th>' for cell in lines[0])
    body = "".join(f"<tr>{''.join(map(_td, line))}</tr>" for line in lines)
    return f'<table class="{classes}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def judged_cells(
    ours: float | None, fact: Fact, yardstick: Yardstick, evidence: str, verdict: str, bound: str = "exact"
) -> list[TableCell]:
    """The cells ours, band, evidence and verdict."""
    number = "–" if ours is None else ("≥ " if bound == "at least" else "") + shown(ours, fact.unit)
    css = {each.value: name for each, name in VERDICT_CLASSES.items()}.get(verdict, "verdict-out")
    return [
        TableCell(column="ours", html=number),
        TableCell(column="band", html=escape(band_text(yardstick, fact))),
        TableCell(column="evidence", html=evidence),
        TableCell(column="verdict", html=verdict, classes=css),
    ]


def condition_html(condition: str) -> str:
    """The condition of a verdict as a line of its own, or nothing."""
    return f'<br><small class="place">condition: {escape(condition)}</small>' if condition else ""


def band_text(yardstick: Yardstick, fact: Fact) -> str:
    """The numbers that agree with the paper's, as text, e.g. `332 to 747 %` or `> 1×`."""
    low, high = yardstick.limits(fact.value)
    if yardstick.grade == "order" and yardstick.sense is not None:
        sign = {"above": ">", "at_least": "≥", "below": "<", "at_most": "≤"}[yardstick.sense]
        return f"{sign} {number_text(low if math.isfinite(low) else high, fact.unit)}"
    if low == high:
        return f"exactly {number_text(low, fact.unit)}"
    return f"{number_text(low, '')} to {number_text(high, fact.unit)}"


def shown(value: float, unit: str) -> str:
    """`number_text` in HTML."""
    return escape(number_text(value, unit), quote=False)


def number_text(value: float, unit: str) -> str:
    """A number as a reader wants it: whole counts in full, the rest to four digits, with its unit."""
    whole = float(value).is_integer() and abs(value) < 1e7
    number = f"{value:,.0f}" if whole else f"{value:,.4g}"
    if not whole and 1000 <= abs(value) < 1e7:
        number = f"{value:,.0f}"
    symbol = {"percent": " %", "ratio": "×", "fraction": "", "": ""}.get(unit, f" {unit}")
    return number.replace("-", "−", 1) + symbol if "e" not in number else number + symbol


def _cells(row: Compared) -> list[TableCell]:
    place = f'<small class="place">{escape(row.paper.cited)}, {row.paper.source}</small>'
    return [
        TableCell(column="quantity", html=escape(row.quantity) + condition_html(row.condition)),
        TableCell(column="paper", html=f"{shown(row.paper.value, row.paper.unit)}<br>{place}"),
        *judged_cells(row.ours, row.paper, row.yardstick, row.evidence, row.verdict.value, row.bound),
    ]


def _td(cell: TableCell) -> str:
    classes = f"{cell.column} {cell.classes}".strip()
    return f'<td class="{classes}" data-label="{cell.column}">{cell.html}</td>'
