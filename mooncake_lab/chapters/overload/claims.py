"""Overload held against arXiv Table 3 and Fig. 9."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.chapters.overload.experiment import TABLE_3
from mooncake_lab.experiments import tabulated
from mooncake_lab.metrics import lagged_correlation
from mooncake_lab.paper import Compared, ComparisonTable, claimed, comparison_table, curve, fact, noted

_COUNTS: Mapping[str, str] = {"after_prefill": "A16", "early": "A17", "predictive": "A18"}
_TABLE_3_REQUESTS: Final = 23_000
"""How many requests the paper replayed; our counts are scaled to as many."""
_CHANGES: Mapping[str, str] = {"early": "A31", "predictive": "A32"}
_LOADS: Mapping[str, str] = {"A24": "correlation", "A35": "decode_swing", "A36": "peak_lag_s"}


def beside_papers(published: pd.DataFrame, tight: pd.DataFrame, windows: pd.DataFrame) -> ComparisonTable:
    """Every claim of this topic with our number; the released trace decides, others stand beside it.

    Args:
        published: rows of `Overload` at the paper's setting, the three policies of Table 3, some workloads.
        tight: the same where the decode pool is full.
        windows: likewise over many stretches of the conversation trace, which decide the changes and the
            correlation: one replay may be luck.
    """
    rows: list[Compared] = []
    for workload, of_workload in published.groupby("workload", sort=False):
        judged = _counts(of_workload, f"{workload}, as published")
        rows += [replace(row, decides=workload == "conversation") for row in judged]
    for workload, of_workload in tight.groupby("workload", sort=False):
        where = f"{workload}, decode pool full"
        shown = [*_counts(of_workload, where), *_changes(of_workload, f"{where}, one replay")]
        if bool(of_workload["correlation"].notna().all()):  # a short replay may have none
            shown += _loads(of_workload, f"{where}, one replay", ["A24"])
        rows += [replace(row, decides=False) for row in shown]
    many = f"conversation, decode pool full, mean of {windows['seed'].nunique()} stretches"
    return comparison_table([*rows, *_loads(windows, many, _LOADS), *_changes(windows, many)])


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


def rejected_percent(policy: str) -> float:
    """What arXiv Table 3 prints for one of our policies, in percent of its requests."""
    found = fact("arxiv_table3_rejections", series=TABLE_3[policy], x="rejected_percent_of_23000")
    return float(found)


def ratio_with_interval(rows: pd.DataFrame, quantity: str, policy: str, to: str) -> tuple[float, float, float]:
    """The ratio of two policies' means over the same seeds, with its 95 % interval by resampling seeds.

    Args:
        rows: rows of `Overload`, a policy and seed each.
        quantity: a column.
        policy: above the line.
        to: below the line.
    """
    wide = rows.pivot_table(index="seed", columns="policy", values=quantity)
    above, below = wide[policy].to_numpy(dtype=np.float64), wide[to].to_numpy(dtype=np.float64)
    picked = np.random.default_rng(0).integers(0, len(above), (2000, len(above)))
    ratios = above[picked].mean(axis=1) / below[picked].mean(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(above.mean() / below.mean()), float(low), float(high)


@tabulated
def who_is_rejected(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Per policy and stretch: how many requests are rejected when, and how long their prompts are."""
    for policy, found in rows.groupby("policy", sort=False):
        counts = {
            "on_arrival": (found["rejected"] - found["rejected_late"], found["arrival_rejected_tokens"]),
            "after_prefill": (found["rejected_late"], found["late_rejected_tokens"]),
            "kept": (found["requests"] - found["rejected"], found["kept_tokens"]),
        }
        said: dict[str, Any] = {"policy": policy}
        for name, (count, tokens) in counts.items():
            counted = np.asarray(count, dtype=np.float64)
            weighed = np.nan_to_num(np.asarray(tokens, dtype=np.float64)) * counted
            mean = float(weighed.sum() / counted.sum()) if counted.sum() else float("nan")
            said |= {name: float(counted.mean()), f"{name}_tokens": mean}
        yield said


def _counts(rows: pd.DataFrame, where: str) -> Iterator[Compared]:
    shares = _by_policy(rows, "rejected_share")
    for policy, identifier in _COUNTS.items():
        yield noted(claimed(identifier, float(round(shares[policy] * _TABLE_3_REQUESTS))), where)


def _changes(rows: pd.DataFrame, where: str) -> Iterator[Compared]:
    shares = _by_policy(rows, "rejected_share")
    for policy, identifier in _CHANGES.items():
        yield noted(claimed(identifier, 100 * (shares[policy] / shares["after_prefill"] - 1)), where)


def _loads(rows: pd.DataFrame, where: str, identifiers: Iterable[str]) -> Iterator[Compared]:
    """How the two loads move, as means over the replays that have samples enough for a correlation."""
    enough = rows.dropna(subset=["correlation"])
    for identifier in identifiers:
        mean = _by_policy(enough, _LOADS[identifier]).get("early")
        yield replace(noted(claimed(identifier, mean), where), too_short=mean is None)


def _by_policy(rows: pd.DataFrame, quantity: str) -> dict[Any, float]:
    means = rows.pivot_table(quantity, "policy", sort=False)
    return means[quantity].to_dict() if len(means) else {}
