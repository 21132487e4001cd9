"""The scorecard: every claim, beside the verdict that its chapter computed.

A chapter puts its table of verdicts on record (`beside_papers` in `out_dir/topic.json`), each row that judges a
claim with the claim's id. The scorecard joins those rows with the list of claims; it judges nothing itself, so
that page, README and chapter cannot disagree.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mooncake_lab.paper.claims import Claim, claims
from mooncake_lab.paper.comparison import VERDICT_CLASSES, shown
from mooncake_lab.paper.verdicts import Verdict

if TYPE_CHECKING:
    import pandas as pd

NOT_EXECUTED: Final = "not executed"
"""What the scorecard says of a claim whose chapter has not been run."""

TABLE: Final = "beside_papers"
"""The name under which a chapter records its verdicts."""


class _Row(msgspec.Struct, frozen=True):
    """A row of a chapter's table as it was put on record; a number that was not measured is null."""

    verdict: str
    ours: float | None = None
    claim: str = ""
    quantity: str = ""


class _Numbers(msgspec.Struct, frozen=True):
    beside_papers: list[_Row] = []


class _Record(msgspec.Struct, frozen=True):
    topic: str
    numbers: _Numbers
    twin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One claim and what its chapter found; a claim may have been judged on several workloads."""

    claim: Claim
    verdict: str
    """A verdict's value, or `not executed`."""
    ours: float | None = None
    quantity: str = ""
    """The chapter's own words, where they say more than the claim's."""


@dataclass(frozen=True, slots=True)
class Scorecard:
    """All claims in their order; shows itself as HTML in a notebook."""

    rows: tuple[Scored, ...]

    def frame(self) -> "pd.DataFrame":
        """One row a judgement: claim, chapter, edition, place, sentence, grade, unit, paper, ours, verdict."""
        import pandas as pd  # not above: it takes a second, and `mooncake-lab simulate` does without

        return pd.DataFrame(
            {
                "claim": [row.claim.id for row in self.rows],
                "chapter": [row.claim.chapter for row in self.rows],
                "edition": [row.claim.fact.edition for row in self.rows],
                "place": [row.claim.fact.place for row in self.rows],
                "sentence": [row.claim.sentence for row in self.rows],
                "grade": [row.claim.yardstick.grade for row in self.rows],
                "unit": [row.claim.fact.unit for row in self.rows],
                "paper": [row.claim.fact.value for row in self.rows],
                "ours": [math.nan if row.ours is None else row.ours for row in self.rows],
                "verdict": [row.verdict for row in self.rows],
            }
        )

    def totals(self) -> "pd.DataFrame":
        """Judgements by edition (rows) and verdict (columns), with sums."""
        import pandas as pd

        names = [*(verdict.value for verdict in Verdict), NOT_EXECUTED]
        frame = self.frame()
        counts = pd.crosstab(frame["edition"], frame["verdict"]).reindex(columns=names, fill_value=0)
        rare = counts.columns.isin([NOT_EXECUTED, Verdict.TRACE_NOT_HERE.value, Verdict.TOO_SHORT.value])
        counts = counts.loc[:, (counts.sum() > 0) | ~rare]
        counts.loc["all"] = counts.sum()
        counts["judgements"] = counts.sum(axis=1)
        return counts.rename_axis(columns=None)

    def of(self, *editions: str) -> "Scorecard":
        """The rows of some editions only."""
        return Scorecard(tuple(row for row in self.rows if row.claim.fact.edition in editions))

    def _repr_html_(self) -> str:
        heads = "".join(
            f'<th scope="col">{head}</th>'
            for head in ("claim", "statement", "paper", "ours", "verdict", "chapter")
        )
        body = "".join(_html_row(row) for row in self.rows)
        return f'<table class="comparison scorecard"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def scorecard(records: str | Path) -> Scorecard:
    """Every claim with the verdicts on record below a folder.

    Args:
        records: where the chapters wrote `topic.json`; a chapter without one counts as not executed.

    Raises:
        ValueError: when a record cannot be read, or judges a claim that does not exist; it names both.
    """
    found: dict[str, list[_Row]] = {}
    known = claims()
    ids = {claim.id for claim in known}
    for path in sorted(Path(records).glob("*.json")):
        for row in _verdicts(path):
            if row.claim not in ids:
                raise ValueError(f"{path} judges the claim {row.claim!r}, which is not in claims.csv")
            found.setdefault(row.claim, []).append(row)
    return Scorecard(tuple(scored for claim in known for scored in _scored(claim, found.get(claim.id, []))))


def _scored(claim: Claim, rows: Iterable[_Row]) -> Iterator[Scored]:
    judged = list(rows)
    for row in judged:
        yield Scored(claim=claim, verdict=row.verdict, ours=row.ours, quantity=row.quantity)
    if not judged:
        reach = {"scope": Verdict.OUT_OF_SCOPE.value, "hardware": Verdict.NEEDS_HARDWARE.value}
        yield Scored(claim=claim, verdict=reach.get(claim.reach, NOT_EXECUTED))


def _verdicts(path: Path) -> list[_Row]:
    content: Any = msgspec.json.decode(path.read_bytes())
    if not isinstance(content, dict) or "topic" not in content:
        return []  # another file of the folder, such as the build's provenance
    try:
        return [row for row in msgspec.convert(content, _Record).numbers.beside_papers if row.claim]
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is not a chapter's record: {error}") from error


def _html_row(row: Scored) -> str:
    claim = row.claim
    said = row.quantity or claim.sentence
    ours = "–" if row.ours is None else shown(row.ours, claim.fact.unit)
    css = {verdict.value: name for verdict, name in VERDICT_CLASSES.items()}.get(row.verdict, "verdict-out")
    place = f"{escape(claim.fact.cited)}, {claim.fact.source}; {escape(claim.conditions)}"
    link = f'<a href="{claim.chapter}.html">{claim.chapter[:2]}</a>'
    return (
        f'<tr><td>{claim.id}</td><td>{escape(said)}<br><small class="place">{place}</small></td>'
        f"<td>{shown(claim.fact.value, claim.fact.unit)}</td>"
        f'<td>{ours}</td><td class="{css}">{row.verdict}</td><td>{link}</td></tr>'
    )
