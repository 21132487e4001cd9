"""The scorecard: every claim, beside the verdict that its chapter computed.

A chapter puts its table of verdicts on record (`beside_papers` in `out_dir/topic.json`), each row about a claim
with the claim's id. One row decides a claim (`decides`), so that each claim counts once; others are details of it.
The scorecard joins those rows with the list of claims; it judges nothing itself, so that page, README and chapter
cannot disagree.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mooncake_lab.book.paper.claims import CONDITIONED, Bound, Claim, Verdict, claim, claims
from mooncake_lab.book.paper.comparison import (
    VERDICT_CLASSES,
    TableCell,
    band_text,
    condition_html,
    html_table,
    judged_cells,
    number_text,
    shown,
)
from mooncake_lab.book.paper.evidence import RULES, Rule
from mooncake_lab.book.paper.facts import read_rows
from mooncake_lab.core.extras import naming_extra

if TYPE_CHECKING:
    import pandas as pd


APPENDICES: Final = {"14_compression": "A"}
"""Chapters behind the last one, by their stems."""


def chapter_number(stem: str) -> str:
    """The number of a chapter, such as 9 for `09_placement`, or the letter of an appendix.

    Raises:
        ValueError: when the stem does not begin with a number.
    """
    number, _, _ = stem.partition("_")
    if not number.isdigit():
        raise ValueError(f"{stem!r} is not a chapter; chapters are called NN_topic")
    return APPENDICES.get(stem, str(int(number)))


NOT_EXECUTED: Final = "not executed"
"""What the scorecard says of a claim whose chapter has not been run."""

ALWAYS_SHOWN: Final = (Verdict.REPRODUCED, Verdict.DIRECTION_ONLY, Verdict.NOT_REPRODUCED)
"""The verdicts that have a column in the totals even when no claim got them."""

TABLE: Final = "beside_papers"
"""The name under which a chapter records its verdicts."""


class _Row(msgspec.Struct, frozen=True):
    """A row of a chapter's table as it was put on record; a number that was not measured is null."""

    verdict: str
    ours: float | None = None
    claim: str = ""
    quantity: str = ""
    decides: bool = False
    bound: Bound = "exact"


class _Numbers(msgspec.Struct, frozen=True):
    beside_papers: list[_Row] = []


class _Record(msgspec.Struct, frozen=True):
    topic: str
    numbers: _Numbers
    twin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """Another number about a claim that does not decide it: another workload, policy or reading."""

    quantity: str
    ours: float | None
    verdict: str
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One claim and what its chapter found."""

    claim: Claim
    verdict: str
    """A verdict's value, or `not executed`."""
    ours: float | None = None
    bound: Bound = "exact"
    quantity: str = ""
    """The chapter's own words, where they say more than the claim's."""
    topic: str = ""
    """The record whose row decides; empty where none does."""
    details: tuple[Detail, ...] = ()

    @property
    def condition(self) -> str:
        """What decides a verdict that has a condition; empty for others."""
        shown = {each.value for each in CONDITIONED}
        return self.claim.grounds.condition if self.verdict in shown else ""


@dataclass(frozen=True, slots=True)
class Scorecard:
    """All claims in their order, each once; shows itself as HTML in a notebook."""

    rows: tuple[Scored, ...]

    def frame(self) -> "pd.DataFrame":
        """One row a claim.

        Columns: claim, chapter, edition, place, sentence, grade, band, evidence, basis, stated, unit, paper, ours,
        bound, verdict, condition.
        """
        with naming_extra("stats"):
            import pandas as pd  # not above: it takes a second, and `mooncake-lab simulate` does without

        return pd.DataFrame(
            {
                "claim": [row.claim.id for row in self.rows],
                "chapter": [row.claim.chapter for row in self.rows],
                "edition": [row.claim.fact.edition for row in self.rows],
                "place": [row.claim.fact.place for row in self.rows],
                "sentence": [row.claim.sentence for row in self.rows],
                "grade": [row.claim.yardstick.grade for row in self.rows],
                "band": [band_text(row.claim.yardstick, row.claim.fact) for row in self.rows],
                "evidence": [row.claim.evidence for row in self.rows],
                "basis": [row.claim.grounds.basis.value for row in self.rows],
                "stated": [row.claim.stated for row in self.rows],
                "unit": [row.claim.fact.unit for row in self.rows],
                "paper": [row.claim.fact.value for row in self.rows],
                "ours": [math.nan if row.ours is None else row.ours for row in self.rows],
                "bound": [row.bound for row in self.rows],
                "verdict": [row.verdict for row in self.rows],
                "condition": [row.condition for row in self.rows],
            }
        )

    def totals(self) -> "pd.DataFrame":
        """Claims by edition (rows) and verdict (columns), with sums; verdicts that no claim got are left out."""
        with naming_extra("stats"):
            import pandas as pd

        names = [*(verdict.value for verdict in Verdict), NOT_EXECUTED]
        frame = self.frame()
        counts = pd.crosstab(frame["edition"], frame["verdict"]).reindex(columns=names, fill_value=0)
        always = counts.columns.isin([verdict.value for verdict in ALWAYS_SHOWN])
        counts = counts.loc[:, (counts.sum() > 0) | always]
        counts.loc["all"] = counts.sum()
        counts["claims"] = counts.sum(axis=1)
        return counts.rename_axis(columns=None)

    def of(self, *editions: str) -> "Scorecard":
        """The rows of some editions only."""
        return Scorecard(tuple(row for row in self.rows if row.claim.fact.edition in editions))

    def html(self) -> str:
        """The rows as a table of verdicts."""
        return html_table("comparison scorecard", [_scored_cells(row) for row in self.rows])

    def _repr_html_(self) -> str:
        return self.html()


def scorecard(records: str | Path) -> Scorecard:
    """Every claim with the verdicts on record below a folder; a chapter without a record counts as not executed.

    Raises:
        ValueError: when a record cannot be read, or judges a claim that does not exist, or when two
            rows decide one claim; it names them.
    """
    known = {claim.id: claim for claim in claims()}
    found: dict[str, list[tuple[str, _Row]]] = {identifier: [] for identifier in known}
    for path in sorted(Path(records).glob("*.json")):
        topic, rows = _verdicts(path)
        for row in rows:
            if row.claim not in known:
                raise ValueError(f"{path} judges the claim {row.claim!r}, which is not in claims.csv")
            found[row.claim].append((topic, row))
    return Scorecard(tuple(_scored(claim, found[claim.id]) for claim in known.values()))


def _scored(claim: Claim, rows: Sequence[tuple[str, _Row]]) -> Scored:
    details = tuple(
        Detail(quantity=row.quantity, ours=row.ours, verdict=row.verdict, topic=topic)
        for topic, row in rows
        if not row.decides
    )
    deciding = [(topic, row) for topic, row in rows if row.decides]
    if len(deciding) > 1:
        where = ", ".join(topic for topic, _ in deciding)
        raise ValueError(
            f"the claim {claim.id!r} is decided {len(deciding)} times, in {where}; one row decides it"
        )
    for topic, row in deciding:
        return Scored(
            claim=claim,
            verdict=row.verdict,
            ours=row.ours,
            bound=row.bound,
            quantity=row.quantity,
            topic=topic,
            details=details,
        )
    missing = {
        "scope": Verdict.OUT_OF_SCOPE,
        "hardware": Verdict.NEEDS_HARDWARE,
        "model": Verdict.NEEDS_MODEL,
    }.get(claim.reach)
    return Scored(claim=claim, verdict=missing.value if missing else NOT_EXECUTED, details=details)


def _verdicts(path: Path) -> tuple[str, list[_Row]]:
    try:
        content: Any = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}; run the chapter again, or remove the file") from error
    if not isinstance(content, dict) or "topic" not in content:
        return "", []  # another file of the folder, such as the build's provenance
    try:
        made = msgspec.convert(content, _Record)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is not a chapter's record: {error}") from error
    return made.topic, [row for row in made.numbers.beside_papers if row.claim]


def _scored_cells(row: Scored) -> list[TableCell]:
    claim = row.claim
    said = row.quantity or claim.sentence
    place = f"{escape(claim.fact.cited)}, {claim.fact.source}; {escape(claim.conditions)}"
    return [
        TableCell(column="claim", html=claim.id),
        TableCell(
            column="statement",
            html=f'{escape(said)}<br><small class="place">{place}</small>{condition_html(row.condition)}',
        ),
        TableCell(column="paper", html=shown(claim.fact.value, claim.fact.unit)),
        *judged_cells(row.ours, claim.fact, claim.yardstick, claim.evidence, row.verdict, row.bound),
        TableCell(column="chapter", html=f'<a href="{claim.chapter}.html">{chapter_number(claim.chapter)}</a>'),
    ]


def rule_rows() -> list[dict[str, str]]:
    """The kinds of agreement: what the verdict is called, the rule, and an example."""
    return [
        {"verdict": each.agreement, "our number agrees, and": each.rule, "example": _example(each)}
        for each in RULES
    ]


def _example(rule: Rule) -> str:
    return f"{rule.example}, {claim(rule.example).sentence}: {rule.why}."


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
        return html_table("comparison headlines", [_headline_cells(row) for row in self.rows])


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
    explained, reasons = (tuple(filter(None, row[name].split(";"))) for name in ("when", "why"))
    if unknown := set(explained) - {verdict.value for verdict in Verdict}:
        raise ValueError(f"headline {title!r} of headlines.csv explains {min(unknown)!r}, which is no verdict")
    if len(explained) != len(reasons):
        raise ValueError(
            f"headline {title!r} of headlines.csv has {len(reasons)} reasons for {len(explained)} verdicts;"
            " each verdict under 'when' has one under 'why', separated by semicolons"
        )
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
        why="; ".join(reason for verdict, reason in zip(explained, reasons, strict=True) if verdict in verdicts),
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


def _headline_cells(row: Headline) -> list[TableCell]:
    css = {verdict.value: name for verdict, name in VERDICT_CLASSES.items()}
    marks = " ".join(
        f'<span class="{css.get(verdict, "verdict-out")}">{escape(text)}</span>'
        for (verdict, _), text in zip(row.verdicts, row.results, strict=True)
    )
    why = f' <small class="place">{escape(row.why)}</small>' if row.why else ""
    return [
        TableCell(column="headline", html=escape(row.title)),
        TableCell(column="paper", html=escape(row.paper)),
        TableCell(column="ours", html=escape(row.ours)),
        TableCell(column="verdict", html=marks + why),
    ]
