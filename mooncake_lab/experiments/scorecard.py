"""The scorecard: what the chapters found, gathered, counted, and put in the order of disagreement."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mooncake_lab.paper import Scorecard, Verdict, scorecard

CHECKED = (Verdict.REPRODUCED.value, Verdict.DIRECTION_ONLY.value, Verdict.NOT_REPRODUCED.value)
"""The verdicts that rest on a prediction of ours: neither fitted to the paper's number nor computed from it."""


def gathered(out_dir: str | Path) -> Scorecard:
    """The scorecard over everything the chapters put on record in a folder.

    Raises:
        ValueError: as `mooncake_lab.paper.scorecard` does.
    """
    return scorecard(out_dir)


def by_chapter(card: Scorecard) -> pd.DataFrame:
    """How many claims of each verdict a chapter holds: chapters by verdicts."""
    frame = card.frame()
    return pd.crosstab(frame["chapter"], frame["verdict"]).rename_axis(columns=None)


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
