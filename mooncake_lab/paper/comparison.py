"""The table that closes every chapter: quantity, paper, ours, verdict."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from mooncake_lab.paper.claims import Claim
from mooncake_lab.paper.facts import Fact
from mooncake_lab.paper.verdicts import Reach, Verdict, Yardstick, judge

if TYPE_CHECKING:
    import pandas as pd

VERDICT_CLASSES: Final = MappingProxyType(
    {
        Verdict.REPRODUCED: "verdict-reproduced",
        Verdict.DIRECTION_ONLY: "verdict-direction",
        Verdict.NOT_REPRODUCED: "verdict-not",
        Verdict.OUT_OF_SCOPE: "verdict-out",
        Verdict.NEEDS_HARDWARE: "verdict-out",
        Verdict.TRACE_NOT_HERE: "verdict-out",
        Verdict.TOO_SHORT: "verdict-out",
    }
)
"""The CSS class of a verdict; the book's style sheet gives each a colour, the word stays readable without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One quantity, the paper's number and ours."""

    quantity: str
    paper: Fact
    ours: float | None
    yardstick: Yardstick
    reach: Reach = "here"
    claim: str = ""
    """The id of the claim that it judges, where it is one."""
    too_short: bool = False
    """Whether it comes from a run of fewer requests than the claim needs."""
    on_twin: bool = False
    """Whether it is a property of a trace that is not here, which the twin in its place is made to have."""

    @property
    def verdict(self) -> Verdict:
        """What became of it."""
        if self.on_twin and self.reach != "scope":
            return Verdict.TRACE_NOT_HERE
        if self.too_short and self.reach == "here":
            return Verdict.TOO_SHORT
        return judge(self.paper.value, self.ours, self.yardstick, reach=self.reach)


def compared(
    quantity: str, paper: Fact, ours: float | None, yardstick: Yardstick, *, reach: Reach = "here"
) -> Compared:
    """A row of a comparison table, e.g. `compared("mean input", fact(...), 12035.1, within(0.01))`."""
    return Compared(quantity=quantity, paper=paper, ours=ours, yardstick=yardstick, reach=reach)


def claimed(claim: Claim, ours: float | None, *, requests: int | None = None) -> Compared:
    """A row of a comparison table that holds our number against a claim, by the claim's own yardstick.

    Args:
        claim: the claim.
        ours: our number in its unit; None where it was not measured.
        requests: of the run that it comes from, where the claim hangs on them.

    Raises:
        ValueError: when the claim hangs on the length of the run, and that is not given.
    """
    return Compared(
        quantity=claim.sentence,
        paper=claim.fact,
        ours=ours,
        yardstick=claim.yardstick,
        reach=claim.reach,
        claim=claim.id,
        too_short=ours is not None and claim.is_too_short(requests),
    )


def unless_twin(row: Compared, origin: str) -> Compared:
    """The row as it is when a released trace decided it; a twin is made to match, so it judges nothing.

    For lengths and sharing, which a twin copies. What a cluster does with them, such as latencies, is judged on a
    twin, too; those rows say so in their words.
    """
    if origin == "released":
        return row
    return replace(row, quantity=f"{row.quantity} ({origin}, made to match)", on_twin=True)


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """The rows of a chapter's last table; shows itself as HTML in a notebook."""

    rows: tuple[Compared, ...]

    def frame(self) -> "pd.DataFrame":
        """The table as data: quantity, unit, paper, ours, verdict, place, source, claim (one row a quantity)."""
        import pandas as pd  # not above: it takes a second, and `mooncake-lab simulate` does without

        return pd.DataFrame(
            {
                "quantity": [row.quantity for row in self.rows],
                "unit": [row.paper.unit for row in self.rows],
                "paper": [row.paper.value for row in self.rows],
                "ours": [math.nan if row.ours is None else float(row.ours) for row in self.rows],
                "verdict": [row.verdict.value for row in self.rows],
                "place": [row.paper.cited for row in self.rows],
                "source": [row.paper.source for row in self.rows],
                "claim": [row.claim for row in self.rows],
            }
        )

    def _repr_html_(self) -> str:
        heads = "".join(f'<th scope="col">{head}</th>' for head in ("quantity", "paper", "ours", "verdict"))
        body = "".join(_html_row(row) for row in self.rows)
        return f'<table class="comparison"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'

    def __str__(self) -> str:
        return self.frame().to_string(index=False)


def comparison_table(rows: Iterable[Compared]) -> ComparisonTable:
    """The standard table quantity / paper / ours / verdict.

    Raises:
        ValueError: when there is no row, or a number of ours is missing that can be measured here.
    """
    table = ComparisonTable(tuple(rows))
    if not table.rows:
        raise ValueError("a comparison table has no rows; at least one quantity is needed")
    for row in table.rows:
        _ = row.verdict
    return table


def _html_row(row: Compared) -> str:
    verdict = row.verdict
    place = f'<small class="place">{escape(row.paper.cited)}, {row.paper.source}</small>'
    ours = "–" if row.ours is None else shown(row.ours, row.paper.unit)
    return (
        f"<tr><td>{escape(row.quantity)}</td><td>{shown(row.paper.value, row.paper.unit)}<br>{place}</td>"
        f'<td>{ours}</td><td class="{VERDICT_CLASSES[verdict]}">{verdict.value}</td></tr>'
    )


def shown(value: float, unit: str) -> str:
    """A number as a reader wants it, in HTML: whole counts in full, the rest to four digits, with its unit."""
    whole = float(value).is_integer() and abs(value) < 1e7
    number = f"{value:,.0f}" if whole else f"{value:,.4g}"
    if not whole and 1000 <= abs(value) < 1e7:
        number = f"{value:,.0f}"
    symbol = {"percent": " %", "ratio": "×", "fraction": "", "": ""}.get(unit, f" {escape(unit)}")
    return number.replace("-", "−", 1) + symbol if "e" not in number else number + symbol
