"""What the recorded replays of whole traces say: counts, ratios with intervals, and the map."""

from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, Final, cast

import numpy as np
import pandas as pd

from mooncake_lab.book.chapters.overload.claims import ratio_with_interval
from mooncake_lab.book.chapters.overload.experiment import Overload
from mooncake_lab.book.chapters.overload.replays import (
    ARRIVAL_THRESHOLDS,
    JUDGED_THRESHOLD,
    ONLY_DECODE_SCARCE,
    POINT_A,
    POINT_B,
    POLICIES,
    REPLAY,
    TTFT_LIMITS_S,
    fitted_points,
    judged_order,
)
from mooncake_lab.book.experiments import records, tabulated, value, where
from mooncake_lab.book.testbeds import fit_arxiv
from mooncake_lab.book.testbeds.arxiv import Slower, arxiv_fit
from mooncake_lab.core import carried_folder

JUDGED_TWINS: Final = tuple(range(7))
"""The twins of the record."""
HELD_BACK_TWINS: Final = tuple(range(7, 14))
"""Other twins, on which the record is checked; the map on the first of them."""
PLACE: Final = ("prefill_factor", "decode_factor", "decode_constant_s", "ttft_limit_s")
"""What tells one point from another."""
ORDER: Final = "baseline > early > prediction"
GAIN: Final = "early and prediction below the baseline, in the other order"
EARLY: Final = "early below the baseline, prediction not"
NONE: Final = "early not below the baseline"
KINDS: Final = (ORDER, GAIN, EARLY, NONE)
"""What a cell of the map may show."""


def recorded() -> pd.DataFrame:
    """Every recorded replay: `data/measured/overload_replays.csv`."""
    table = pd.read_csv(carried_folder("measured") / "overload_replays.csv", dtype={"commit": str})
    source = f"{len(table)} recorded replays of 23,000 requests of tool&agent twins"
    return table.assign(rejected_share=table["rejected"] / table["requests"], seed=table["twin"], source=source)


def points() -> dict[str, Overload]:
    """The four points that are replayed on several twins, by name."""
    low, high = fitted_points()
    return {"fitted, 15 s": low, "fitted, 30 s": high, "A (15 s)": POINT_A, "B (30 s)": POINT_B}


def at_point(
    table: pd.DataFrame,
    point: Overload,
    threshold: float = JUDGED_THRESHOLD,
    twins: Collection[int] = JUDGED_TWINS,
) -> pd.DataFrame:
    """The replays of one point on these twins, at one arrival threshold."""
    chosen = table["twin"].isin(list(twins))
    for name in ("workload", "decode_nodes", "tbt_limit_s", *PLACE):
        wanted = getattr(point, name)
        chosen &= table[name].isna() if wanted is None else table[name] == wanted
    chosen &= (table["arrival_threshold"] == threshold) | (table["policy"] == "after_prefill")
    return cast("pd.DataFrame", table[chosen]).sort_values(["twin", "policy"])


@tabulated
def ratios(
    table: pd.DataFrame, threshold: float = JUDGED_THRESHOLD, twins: Collection[int] = JUDGED_TWINS
) -> Iterator[dict[str, Any]]:
    """By point and policy: mean rejections over the twins, and their ratio to the baseline with its interval."""
    for name, point in points().items():
        rows = at_point(table, point, threshold, twins)
        baseline = _by_twin(rows, "after_prefill")
        for policy in POLICIES:
            own = _by_twin(rows, policy)
            if not own:
                continue
            ratio, low, high = ratio_with_interval(rows, "rejected", policy, "after_prefill")
            yield {
                "point": name,
                "policy": policy,
                "twins": len(own),
                "rejected": fmean(own.values()),
                "ratio": ratio,
                "low": low,
                "high": high,
                "lower_in": sum(own[twin] < baseline[twin] for twin in own),
            }


def _by_twin(rows: pd.DataFrame, policy: str) -> dict[int, int]:
    return {row["twin"]: row["rejected"] for row in records(rows, policy=policy)}


@tabulated
def cells(table: pd.DataFrame, threshold: float = JUDGED_THRESHOLD, twin: int = 0) -> Iterator[dict[str, Any]]:
    """The map: one row a cell that has all three policies, with both ratios to the baseline and what it shows."""
    counts: dict[tuple[float, float, float], dict[str, int]] = {}
    for row in records(at_map(table, threshold, twin)):
        cell = row["ttft_limit_s"], row["prefill_factor"], row["decode_factor"]
        counts.setdefault(cell, {})[row["policy"]] = row["rejected"]
    for (limit_s, prefill, decode), found in sorted(counts.items()):
        if not {"after_prefill", "early", "predictive"} <= set(found):
            continue
        baseline, early, predictive = (found[each] for each in ("after_prefill", "early", "predictive"))
        yield {
            "ttft_limit_s": limit_s,
            "prefill_factor": prefill,
            "decode_factor": decode,
            "rejected_share": baseline / REPLAY.first,
            "early": early / baseline,
            "predictive": predictive / baseline,
            "kind": kind_of(baseline, early, predictive),
        }


@tabulated
def shares(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """By arrival threshold, twin and limit on TTFT: the share of the map's cells that show each order."""
    maps = [(threshold, JUDGED_TWINS[0]) for threshold in ARRIVAL_THRESHOLDS]
    for threshold, twin in (*maps, (JUDGED_THRESHOLD, HELD_BACK_TWINS[0])):
        found = cells(table, threshold, twin)
        for limit_s in TTFT_LIMITS_S:
            kinds = where(found, ttft_limit_s=limit_s)["kind"].tolist()
            yield {
                "threshold": threshold,
                "twin": twin,
                "ttft_limit_s": limit_s,
                "cells": len(kinds),
                **{kind: kinds.count(kind) / len(kinds) for kind in KINDS},
            }


def held_back(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `ratios` on seven other twins, with those of the record and how far they are apart."""
    places = ["point", "policy"]
    record = ratios(table).set_index(places)["ratio"]
    others = ratios(table, twins=HELD_BACK_TWINS).set_index(places).assign(on_record=record)
    return others.assign(apart=(others["ratio"] - others["on_record"]).abs()).reset_index()


@tabulated
def only_decode(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """By trace and policy where decode alone is scarce: mean rejections, waste, goodput, ratio to the baseline."""
    means = ["wasted_prefill_s", "goodput", "prefill_load", "decode_load", "kept_tokens"]
    for name in ("toolagent", "conversation"):
        point = replace(ONLY_DECODE_SCARCE, workload=name)
        rows = at_point(table, point)
        baseline = _by_twin(rows, "after_prefill")
        for policy in POLICIES:
            own, replays = _by_twin(rows, policy), where(rows, policy=policy)
            yield {
                "trace": name,
                "policy": policy,
                "replays": len(own),
                "rejected": fmean(own.values()),
                "ratio": fmean(own.values()) / fmean(baseline.values()),
                "lower_in": sum(own[twin] < baseline[twin] for twin in own),
                **{name: fmean(replays[name]) for name in means},
                "arrival_rejected_tokens": fmean(replays["arrival_rejected_tokens"].fillna(0)),
            }


def at_map(table: pd.DataFrame, threshold: float, twin: int) -> pd.DataFrame:
    """The replays of the map's cells."""
    chosen = (table["twin"] == twin) & (table["workload"] == REPLAY.workload)
    chosen &= table["decode_constant_s"] == REPLAY.decode_constant_s
    chosen &= table["prefill_factor"].notna() & table["ttft_limit_s"].isin(TTFT_LIMITS_S)
    chosen &= (table["arrival_threshold"] == threshold) | (table["policy"] == "after_prefill")
    return cast("pd.DataFrame", table[chosen])


def kind_of(baseline: int, early: int, predictive: int) -> str:
    """What three counts of rejections show."""
    if early >= baseline:
        return NONE
    if predictive >= baseline:
        return EARLY
    return ORDER if predictive < early else GAIN


def order_verdict(table: pd.DataFrame) -> str:
    """The verdict on the order of Table 3 by the rule of `judged_order`."""
    ends = upper_ends(table)
    return judged_order(ends, bool(in_region(cells(table))["has_order"].any()))


def upper_ends(table: pd.DataFrame) -> dict[float, list[float]]:
    """By TTFT limit (s), the upper ends of the intervals of early and prediction at the fitted point."""
    found = ratios(table)
    ends: dict[float, list[float]] = {}
    for limit_s in TTFT_LIMITS_S:
        named = f"fitted, {limit_s:.0f} s"
        ends[limit_s] = [float(value(found, "high", point=named, policy=p)) for p in ("early", "predictive")]
    return ends


def in_region(map_cells: pd.DataFrame) -> pd.DataFrame:
    """Cells of the map that lie in the region of the fit, with whether they have the order.

    A cell stands for the settings within half a step of it. The constant of the fit differs from that of the map,
    so decode factors are compared that put the same pressure on decode.
    """
    region = [(each.prefill, map_factor(each)) for each in arxiv_fit().region]
    inside = [
        any(
            abs(prefill - row["prefill_factor"]) <= HALF_STEP[0]
            and abs(decode - row["decode_factor"]) <= HALF_STEP[1]
            for prefill, decode in region
        )
        for row in records(map_cells)
    ]
    found = cast("pd.DataFrame", map_cells[np.array(inside, dtype=bool)])
    return found.assign(has_order=found["kind"] == ORDER)


HALF_STEP: Final = (0.1, 0.5)
"""Half the distance of two cells: in the prefill factor, and in the decode factor."""


def map_factor(node: Slower) -> float:
    """The decode factor at which a node with the constant of the map is under the same pressure."""
    room = (REPLAY.tbt_limit_s - node.constant_s) / (REPLAY.tbt_limit_s - REPLAY.decode_constant_s)
    return node.decode / room


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """The replays that decide: the fitted testbed under both limits of TTFT."""
    return pd.concat([at_point(table, point) for point in fitted_points()])


def with_half_intervals(found: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `ratios`, with half the 95 % interval of the mean rejections in the column `half`."""
    halves = [
        1.96 * np.std(counts, ddof=1) / len(counts) ** 0.5
        for row in records(found)
        if (counts := list(_by_twin(at_point(table, points()[row["point"]]), row["policy"]).values()))
    ]
    return found.assign(half=halves)


@tabulated
def fit_choices() -> Iterator[dict[str, Any]]:
    """The fit of the testbed, what other choices would give, and the error at points A and B.

    Columns: setting, prefill, decode, constant_s, and the error, a sum of squared logarithms of ratios.
    """
    runs = fit_arxiv.recorded_runs()
    choices: tuple[tuple[str, fit_arxiv.Gap, fit_arxiv.Admission], ...] = (
        ("fitted", "longest_tenth", "all"),
        ("TBT is the mean gap", "mean", "all"),
        ("Algorithm 1 rejects", "longest_tenth", "slo"),
    )
    for setting, gap, admission in choices:
        found = fit_arxiv.fitted(runs, gap, admission)
        yield {"setting": setting, **asdict(found.optimum), "error": found.error}
    every = fit_arxiv.errors(runs)
    for setting, point in (("point A", POINT_A), ("point B", POINT_B)):
        at = Slower(point.prefill_factor or 1.0, point.decode_factor, point.decode_constant_s)
        yield {"setting": setting, **asdict(at), "error": every[at]}


@tabulated
def outcome(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Means over the twins at the fitted testbed: waste, goodput, and how both loads move."""
    means = ["wasted_prefill_s", "goodput", "prefill_load", "decode_load", "prefill_swing", "decode_swing"]
    means += ["correlation", "peak_lag_s"]
    for point in fitted_points():
        for policy in POLICIES:
            rows = where(at_point(table, point), policy=policy)
            yield {"ttft_limit_s": point.ttft_limit_s, "policy": policy} | {
                name: float(np.mean(rows[name].to_numpy(dtype=np.float64))) for name in means
            }


def on_map() -> dict[str, tuple[float, float, float]]:
    """TTFT limit (s), decode and prefill factor of the four points, at the constant of the map."""
    return {
        name: (
            point.ttft_limit_s,
            map_factor(Slower(point.prefill_factor or 1.0, point.decode_factor, point.decode_constant_s)),
            point.prefill_factor or 1.0,
        )
        for name, point in points().items()
    }


def region_on_map() -> list[tuple[float, float]]:
    """Decode and prefill factors of the region of the fit, at the constant of the map."""
    return [(map_factor(each), each.prefill) for each in arxiv_fit().region]
