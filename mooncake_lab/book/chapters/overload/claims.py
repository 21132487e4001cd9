"""Overload held against arXiv Table 3 and Fig. 9."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.book.chapters.overload.experiment import TABLE_3
from mooncake_lab.book.experiments import where
from mooncake_lab.book.paper import Compared, ComparisonTable, claimed, comparison_table, curve, fact, noted
from mooncake_lab.metrics import lagged_correlation

_COUNTS: Mapping[str, str] = {"after_prefill": "A16", "early": "A17", "predictive": "A18"}
_TABLE_3_REQUESTS: Final = 23_000
"""How many requests the paper replayed; our counts are scaled to as many."""
_CHANGES: Mapping[str, str] = {"early": "A31", "predictive": "A32"}
_LOADS: Mapping[str, str] = {
    "A24": "correlation",
    "A35": "decode_swing",
    "A36": "peak_lag_s",
    "A124": "prefill_load",
    "A125": "decode_load",
}


PRINTED_TTFT_LIMIT_S: Final = 30.0
"""That of arXiv Figs. 8 and 13; Table 3 prints none."""


def beside_papers(
    judged: pd.DataFrame, others: Mapping[str, pd.DataFrame], ttft_limit_s: float = PRINTED_TTFT_LIMIT_S
) -> ComparisonTable:
    """Every claim of this topic with our number.

    Args:
        judged: rows of `Overload` at the fitted testbed, the three policies of Table 3 on several twins at each
            TTFT limit. Those at one limit decide; the order is judged at all.
        others: rows at other settings, by name; they are shown and decide nothing.
        ttft_limit_s: the limit on TTFT that decides (assumption B45).
    """
    printed = where(judged, ttft_limit_s=ttft_limit_s)
    many = f"fitted testbed, TTFT limit {ttft_limit_s:.0f} s, mean of {printed['twin'].nunique()} twins"
    rows: list[Compared] = [*_counts(printed, many), *_changes(printed, many), *_loads(printed, many, _LOADS)]
    rows.append(_order(judged))
    for name, table in others.items():
        rows += [replace(row, decides=False) for row in (*_counts(table, name), *_changes(table, name))]
    return comparison_table(rows)


MOST: Final = 1e6
"""What stands for a ratio to nothing, since a verdict needs a finite number."""


def _order(judged: pd.DataFrame) -> Compared:
    """The claim on the order, judged by the ratio to the baseline whose 95 % interval ends highest."""
    limit_s, policy, (ratio, low, high) = highest_ratio(judged)
    words = (
        f"fitted testbed; {_CALLED[policy]} at a TTFT limit of {limit_s:.0f} s, with a 95 % interval from"
        f" {low:.3g} to {high:.3g} over the twins, which has to lie below 1"
    )
    return noted(replace(claimed("A123", ratio), interval=(low, high)), words)


def highest_ratio(judged: pd.DataFrame) -> tuple[float, str, tuple[float, float, float]]:
    """The TTFT limit and policy whose interval ends highest, with the ratio to the baseline and both ends."""
    found: list[tuple[float, str, tuple[float, float, float]]] = []
    for limit_s, policy in product(sorted(set(judged["ttft_limit_s"])), _CHANGES):
        rows = where(judged, ttft_limit_s=limit_s)
        ratio, low, high = ratio_with_interval(rows, "rejected_share", policy, "after_prefill", "twin")
        found.append((limit_s, policy, (min(MOST, ratio), min(MOST, low), min(MOST, high))))
    return max(found, key=lambda each: each[2][2])


_CALLED: Final = {"early": "early rejection", "predictive": "prediction"}


def paper_stages(panel: str) -> pd.DataFrame:
    """The sketch of arXiv Fig. 10, panel `a` or `b`: columns stage, decode and prefill."""
    read = curve("arxiv_fig10_conceptual_load")
    after = {
        name: read[read["series"] == f"{panel}/{series}"].set_index("x")["y"]
        for name, series in (("decode", "decoding"), ("prefill", "prefill"))
    }
    return pd.DataFrame(after).reset_index(names="stage")


def paper_series() -> pd.DataFrame:
    """The two loads of arXiv Fig. 9: at_s, prefill and decode, as shares of full."""
    read = curve("arxiv_fig09_load_fluctuation")
    wide = read.pivot_table(index="x", columns="series", values="y").reset_index()
    (decode,) = set(read["series"]) - {"Prefill"}
    return pd.DataFrame({"at_s": wide["x"], "prefill": wide["Prefill"] / 100, "decode": wide[decode] / 100})


def paper_movement() -> dict[str, float]:
    """How the two loads of arXiv Fig. 9 move: correlation, its peak and the lag of the peak (s), swing."""
    loads = paper_series()
    prefill, decode = loads[["prefill", "decode"]].to_numpy(dtype=np.float64).T
    together = lagged_correlation(prefill, decode, 6)
    every_s = float(loads["at_s"].iloc[1] - loads["at_s"].iloc[0])
    low, high = np.percentile(decode, [10, 90])
    return {
        "correlation": float(together[0]),
        "peak_correlation": float(together.max()),
        "peak_lag_s": float(together.argmax() * every_s),
        "decode_swing": float(high - low),
    }


def table_3() -> dict[str, float]:
    """The counts that arXiv Table 3 prints, by our policies."""
    return {
        ours: fact("arxiv_table3_rejections", series=row, x="rejected_requests").value
        for ours, row in TABLE_3.items()
    }


def rejected_percent(policy: str) -> float:
    """What arXiv Table 3 prints for one of our policies, in percent of its requests."""
    found = fact("arxiv_table3_rejections", series=TABLE_3[policy], x="rejected_percent_of_23000")
    return float(found)


def ratio_with_interval(
    rows: pd.DataFrame, quantity: str, policy: str, to: str, by: str = "seed"
) -> tuple[float, float, float]:
    """The ratio of two policies' means over the same requests, with its 95 % interval by resampling replays.

    Args:
        rows: rows of `Overload`, a policy and seed each.
        quantity: a column.
        policy: above the line.
        to: below the line.
        by: the column that tells replays of the same requests from others.
    """
    wide = rows.pivot_table(index=by, columns="policy", values=quantity)
    above, below = wide[policy].to_numpy(dtype=np.float64), wide[to].to_numpy(dtype=np.float64)
    if not below.any():
        ratio = np.inf if above.any() else 1.0  # where neither has any, nothing is gained
        return ratio, ratio, ratio
    picked = np.random.default_rng(0).integers(0, len(above), (2000, len(above)))
    with np.errstate(divide="ignore", invalid="ignore"):  # a draw may have nothing below the line
        ratios = above[picked].mean(axis=1) / below[picked].mean(axis=1)
    low, high = np.percentile(np.nan_to_num(ratios, nan=1.0, posinf=np.inf), [2.5, 97.5])
    return float(above.mean() / below.mean()), float(low), float(high)


def _counts(rows: pd.DataFrame, shown: str) -> Iterator[Compared]:
    shares = _by_policy(rows, "rejected_share")
    for policy, identifier in _COUNTS.items():
        yield noted(claimed(identifier, float(round(shares[policy] * _TABLE_3_REQUESTS))), shown)


def _changes(rows: pd.DataFrame, shown: str) -> Iterator[Compared]:
    shares = _by_policy(rows, "rejected_share")
    for policy, identifier in _CHANGES.items():
        baseline = shares["after_prefill"]
        change = 100 * (shares[policy] / baseline - 1) if baseline else 100.0 * bool(shares[policy])
        yield noted(claimed(identifier, change), shown)


def _loads(rows: pd.DataFrame, shown: str, identifiers: Iterable[str]) -> Iterator[Compared]:
    """How the two loads move, as means over the replays that have samples enough for a correlation."""
    enough = rows.dropna(subset=["correlation"])
    for identifier in identifiers:
        mean = _by_policy(enough, _LOADS[identifier]).get("early")
        yield replace(noted(claimed(identifier, mean), shown), too_short=mean is None)


def _by_policy(rows: pd.DataFrame, quantity: str) -> dict[Any, float]:
    means = rows.pivot_table(quantity, "policy", sort=False)
    return means[quantity].to_dict() if len(means) else {}
