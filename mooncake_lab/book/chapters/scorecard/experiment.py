"""The scorecard: what the chapters found, gathered, counted, and put in the order of disagreement."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from mooncake_lab.book.paper import Scorecard, Verdict, claim, headlines, scorecard
from mooncake_lab.book.paper.claims import MOONCAKE, Evidence, Stated
from mooncake_lab.book.paper.evidence import AS_ASSUMED, NOT_TRIED, Basis, sensitivity
from mooncake_lab.book.paper.scorecard import NOT_EXECUTED, rule_rows

AGREES = (Verdict.REPRODUCED.value, Verdict.CONDITIONAL.value)
"""The verdicts on predictions that agree."""
CHECKED = (*AGREES, Verdict.DIRECTION_ONLY.value, Verdict.NOT_REPRODUCED.value)
"""The verdicts on predictions; a number that was fitted or computed from printed ones may have the last two."""


RATIOS = {"ratio", "percent", "fraction", "fraction of the SLO", "correlation", "cosine"}
"""The units of numbers that have no size of their own."""


def gathered(out_dir: str | Path) -> Scorecard:
    """The scorecard over everything the chapters put on record in a folder."""
    return scorecard(out_dir)


def headline_rows(card: Scorecard) -> pd.DataFrame:
    """The headlines as data: headline, claims, paper, ours, result."""
    columns = ["headline", "claims", "paper", "ours", "result"]
    rows = [(row.title, " ".join(row.claims), row.paper, row.ours, row.result) for row in headlines(card).rows]
    return pd.DataFrame(rows, columns=columns)


def by_chapter(card: Scorecard) -> pd.DataFrame:
    """How many claims of each verdict a chapter holds: chapters by verdicts."""
    frame = card.frame()
    return pd.crosstab(frame["chapter"], frame["verdict"]).rename_axis(columns=None)


def by_evidence(card: Scorecard) -> pd.DataFrame:
    """How many claims of each verdict rest on which kind of evidence: evidence by verdicts, with sums."""
    return _by(card, "evidence", get_args(Evidence))


def by_basis(card: Scorecard) -> pd.DataFrame:
    """How many claims of each verdict rest on what: basis by verdicts, with sums."""
    return _by(card, "basis", [each.value for each in Basis])


def rules() -> pd.DataFrame:
    """The kinds of agreement, with the rule and an example of each."""
    return pd.DataFrame(rule_rows()).set_index("verdict")


def moved_by_assumptions() -> pd.DataFrame:
    """The claims whose verdict depends on an assumption, as recorded.

    Columns: claim, sentence, as assumed, assumption, alternative, verdict; a row for each other verdict.
    """
    rows = [
        (name, claim(name).sentence, tried[0].verdict, each.assumption, each.alternative, each.verdict)
        for name, tried in sensitivity().items()
        for each in tried[1:]
        if each.verdict not in {tried[0].verdict, NOT_TRIED}
    ]
    columns = ["claim", "sentence", AS_ASSUMED, "assumption", "alternative", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def by_stated(card: Scorecard) -> pd.DataFrame:
    """How many claims of each verdict were stated when: before, with or after our number; with sums."""
    return _by(card, "stated", get_args(Stated))


def _by(card: Scorecard, column: str, values: Sequence[str]) -> pd.DataFrame:
    frame = card.frame()
    counts = pd.crosstab(frame[column], frame["verdict"]).reindex(values, fill_value=0)
    order = [name for name in (*(verdict.value for verdict in Verdict), NOT_EXECUTED) if name in counts]
    counts = counts[order].assign(claims=counts.sum(axis=1))
    return counts.rename_axis(columns=None)


def by_kind(card: Scorecard) -> pd.DataFrame:
    """What carries over: claims by the kind of their number, and how many of those that we predict came out.

    Columns: reproduced, conditional, direction only, not reproduced; rows from the best share of those that agree
    to the least.
    """
    frame = card.frame()
    frame = frame[frame["verdict"].isin(CHECKED) & (frame["basis"] == Basis.PREDICTED.value)]
    columns = (frame[name].astype(str).tolist() for name in ("sentence", "unit", "edition"))
    kinds = [_kind(*row) for row in zip(*columns, strict=True)]
    counts = pd.crosstab(pd.Series(kinds, index=frame.index, dtype=str), frame["verdict"])
    counts = counts.reindex(columns=list(CHECKED), fill_value=0)
    share = pd.Series(counts[list(AGREES)].sum(axis=1) / counts.sum(axis=1))
    order = share.sort_values(ascending=False, kind="stable").index
    return counts.loc[order].rename_axis(index="kind", columns=None)


def _kind(sentence: str, unit: str, edition: str) -> str:
    """The kind of number that a claim is about."""
    if unit in {"s", "ms"}:
        return "times"
    if "vLLM" in sentence:
        return "gains over vLLM, and what vLLM does"
    if "hit rate" in sentence:
        return "hit rates"
    if unit not in RATIOS:
        return "counts, rates and sizes"
    return f"other ratios and shares, {'Mooncake' if edition in MOONCAKE else 'other systems'}"


def off_by(card: Scorecard) -> pd.DataFrame:
    """Claims by how far our number is from the paper's, the farthest first.

    Columns: claim, sentence, paper, ours, ratio (ours over the paper's), verdict. Numbers of opposite sign, and
    zeros, have no ratio and are left out.
    """
    frame = card.frame()
    frame = frame[frame["verdict"].isin(CHECKED) & (frame["ours"] * frame["paper"] > 0)]
    frame = frame.assign(ratio=frame["ours"] / frame["paper"])
    farthest = _distance(frame["ratio"]).sort_values(ascending=False, kind="stable").index
    return frame.loc[farthest, ["claim", "sentence", "paper", "ours", "ratio", "verdict"]].reset_index(drop=True)


def spread(card: Scorecard) -> pd.Series:
    """How far off the numbers are that have a ratio: their count, and the shares within 10 %, 1.5 and 2 times."""
    ratio = off_by(card)["ratio"]
    distance = _distance(ratio)
    shares = {f"within {limit:g}x": float((distance <= limit).mean()) for limit in (1.1, 1.5, 2.0)}
    return pd.Series({"numbers": float(len(ratio)), **shares, "median": float(distance.median())})


def _distance(ratio: Any) -> pd.Series:
    """The factor between two numbers, from 1."""
    return pd.Series(np.maximum(ratio, 1 / ratio))
