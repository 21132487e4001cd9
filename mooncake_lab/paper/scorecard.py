"""The scorecard: every claim, beside the verdict that its chapter computed.

A chapter puts its table of verdicts on record (`beside_papers` in `out_dir/topic.json`), each row about a claim
with the claim's id. One row decides a claim (`decides`), so that each claim counts once; others are details of it.
The scorecard joins those rows with the list of claims; it judges nothing itself, so that page, README and chapter
cannot disagree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mooncake_lab.paper.claims import Claim, claims
from mooncake_lab.paper.comparison import Cell, band_text, html_table, judged_cells, shown
from mooncake_lab.paper.numbering import chapter_number
from mooncake_lab.paper.verdicts import Bound, Verdict

if TYPE_CHECKING:
    import pandas as pd

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


@dataclass(frozen=True, slots=True)
class Scorecard:
    """All claims in their order, each once; shows itself as HTML in a notebook."""

    rows: tuple[Scored, ...]

    def frame(self) -> "pd.DataFrame":
        """One row a claim.

        Columns: claim, chapter, edition, place, sentence, grade, band, evidence, stated, unit, paper, ours, bound,
        verdict.
        """
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
                "stated": [row.claim.stated for row in self.rows],
                "unit": [row.claim.fact.unit for row in self.rows],
                "paper": [row.claim.fact.value for row in self.rows],
                "ours": [math.nan if row.ours is None else row.ours for row in self.rows],
                "bound": [row.bound for row in self.rows],
                "verdict": [row.verdict for row in self.rows],
            }
        )

    def totals(self) -> "pd.DataFrame":
        """Claims by edition (rows) and verdict (columns), with sums; verdicts that no claim got are left out."""
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
        return html_table("comparison scorecard", [_cells(row) for row in self.rows])

    def _repr_html_(self) -> str:
        return self.html()


def scorecard(records: str | Path) -> Scorecard:
    """Every claim with the verdicts on record below a folder.

    Args:
        records: where the chapters wrote `topic.json`; a chapter without one counts as not executed.

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
    content: Any = msgspec.json.decode(path.read_bytes())
    if not isinstance(content, dict) or "topic" not in content:
        return "", []  # another file of the folder, such as the build's provenance
    try:
        made = msgspec.convert(content, _Record)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is not a chapter's record: {error}") from error
    return made.topic, [row for row in made.numbers.beside_papers if row.claim]


def _cells(row: Scored) -> list[Cell]:
    claim = row.claim
    said = row.quantity or claim.sentence
    place = f"{escape(claim.fact.cited)}, {claim.fact.source}; {escape(claim.conditions)}"
    return [
        Cell(column="claim", html=claim.id),
        Cell(column="statement", html=f'{escape(said)}<br><small class="place">{place}</small>'),
        Cell(column="paper", html=shown(claim.fact.value, claim.fact.unit)),
        *judged_cells(row.ours, claim.fact, claim.yardstick, claim.evidence, row.verdict, row.bound),
        Cell(column="chapter", html=f'<a href="{claim.chapter}.html">{chapter_number(claim.chapter)}</a>'),
    ]
