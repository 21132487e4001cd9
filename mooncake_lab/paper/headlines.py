"""The eight results that a visitor asks for first, each from claims of the scorecard.

`data/paper/headlines.csv` says which claims make up a headline; numbers and verdicts are the scorecard's. A reason
(`why`) is shown only while one of the claims has the verdict that it explains (`when`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Final

from mooncake_lab.paper.comparison import VERDICT_CLASSES, Cell, html_table, number_text
from mooncake_lab.paper.scorecard import Scorecard, Scored
from mooncake_lab.paper.tables import read_rows
from mooncake_lab.paper.verdicts import Verdict

_SYMBOLS: Final = {"percent": " %", "ratio": "×"}
"""The units of headlines and how they are written after the last number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One result: what it is about, the papers' numbers, ours, and what became of the claims behind it."""

    title: str
    claims: tuple[str, ...]
    paper: str
    ours: str
    verdicts: tuple[tuple[str, int], ...]
    """Each verdict with the number of claims that got it, in the order of the claims."""
    evidence: tuple[str, ...]
    """The kinds of evidence of our numbers; empty without any number."""
    why: str = ""

    @property
    def results(self) -> tuple[str, ...]:
        """The verdicts as text, counted where there is more than one, e.g. `2 reproduced`."""
        if len(self.verdicts) == 1:
            return (self.verdicts[0][0],)
        return tuple(f"{count} {verdict}" for verdict, count in self.verdicts)

    @property
    def result(self) -> str:
        """All of them, and the reason where one is known."""
        return ", ".join(self.results) + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class Headlines:
    """The rows in their order; shows itself as HTML in a notebook."""

    rows: tuple[Headline, ...]

    def markdown(self) -> str:
        """The rows as a Markdown table."""
        lines = [("headline", "paper", "ours", "result"), ("---",) * 4]
        lines += [(row.title, row.paper, row.ours, row.result) for row in self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def evidence(self) -> str:
        """What our numbers are, in a sentence."""
        kinds = dict.fromkeys(kind for row in self.rows for kind in row.evidence)
        return f"Our numbers in this table are {' or '.join(kinds)}."

    def _repr_html_(self) -> str:
        return html_table("comparison headlines", [_cells(row) for row in self.rows])


def headlines(card: Scorecard) -> Headlines:
    """The headlines of a scorecard.

    Raises:
        ValueError: when a headline names a claim that does not exist or a verdict that does not, or its claims
            have different units; it names the headline.
    """
    found = {row.claim.id: row for row in card.rows}
    return Headlines(tuple(_headline(row, found) for row in read_rows("headlines.csv")))


def _headline(row: dict[str, str], found: dict[str, Scored]) -> Headline:
    title, names = row["headline"], tuple(row["claims"].split(";"))
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"headline {title!r} of headlines.csv rests on {unknown[0]!r}, which is no claim")
    if row["when"] and row["when"] not in {verdict.value for verdict in Verdict}:
        raise ValueError(f"headline {title!r} of headlines.csv explains {row['when']!r}, which is no verdict")
    scored = [found[name] for name in names]
    units = {each.claim.fact.unit for each in scored}
    if len(units) != 1 or not units <= _SYMBOLS.keys():
        raise ValueError(
            f"headline {title!r} of headlines.csv has the units {', '.join(sorted(units))};"
            f" its claims need one of {', '.join(_SYMBOLS)}"
        )
    (unit,) = units
    signed = any(each.claim.fact.value < 0 for each in scored)
    verdicts = Counter(each.verdict for each in scored)
    ours = [("≥ " if each.bound == "at least" else "", each.ours) for each in scored]
    return Headline(
        title=title,
        claims=names,
        paper=_joined([("", each.claim.fact.value) for each in scored], unit, signed=signed),
        ours=_joined(ours, unit, signed=signed),
        verdicts=tuple(verdicts.items()),
        evidence=tuple(dict.fromkeys(each.claim.evidence for each in scored if each.ours is not None)),
        why=row["why"] if row["when"] in verdicts else "",
    )


def _joined(numbers: Iterable[tuple[str, float | None]], unit: str, *, signed: bool) -> str:
    """Numbers of one unit as `59 / 157 / 498 %`; a dash where nothing was measured."""
    texts = [mark + _rounded(value, unit, signed=signed) for mark, value in numbers]
    return "–" if set(texts) == {"–"} else " / ".join(texts) + _SYMBOLS[unit]


def _rounded(value: float | None, unit: str, *, signed: bool) -> str:
    """Whole percents, ratios to three digits."""
    if value is None:
        return "–"
    number = float(f"{value:.0f}") if unit == "percent" else float(f"{value:.3g}")
    return ("+" if signed and number > 0 else "") + number_text(number, "")


def _cells(row: Headline) -> list[Cell]:
    css = {verdict.value: name for verdict, name in VERDICT_CLASSES.items()}
    marks = " ".join(
        f'<span class="{css.get(verdict, "verdict-out")}">{escape(text)}</span>'
        for (verdict, _), text in zip(row.verdicts, row.results, strict=True)
    )
    why = f' <small class="place">{escape(row.why)}</small>' if row.why else ""
    return [
        Cell(column="headline", html=escape(row.title)),
        Cell(column="paper", html=escape(row.paper)),
        Cell(column="ours", html=escape(row.ours)),
        Cell(column="verdict", html=marks + why),
    ]
