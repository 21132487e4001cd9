"""Placement held against FAST'25 Figs. 5 and 10 and arXiv Fig. 8."""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd

from mooncake_lab.experiments import records
from mooncake_lab.paper import (
    Compared,
    ComparisonTable,
    claim,
    claimed,
    compared,
    comparison_table,
    detail,
    fact,
    marked_if_twin,
    unless_twin,
    within,
)

FAST_FIG_5: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kvcache_centric": "Global cache aware",
        "cache_aware": "Local cache aware",
        "load_balance": "Load balancing",
        "random": "Random",
    }
)
"""Our policies and the boxes of FAST'25 Fig. 5."""
ARXIV_FIG_8: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kvcache_centric": "KVCache-centric",
        "cache_aware": "cache-aware",
        "load_balance": "load-balancing",
        "random": "random",
    }
)
"""Our policies and the boxes of arXiv Fig. 8."""
WORKLOADS: Final[Mapping[str, str]] = MappingProxyType(
    {"conversation": "Conversation", "toolagent": "Tool&Agent", "synthetic": "Synthetic"}
)
"""Our workloads and the groups of FAST'25 Figs. 10 and 11."""

_MEANS = MappingProxyType(
    {
        "F": {"kvcache_centric": "F30", "cache_aware": "F31", "load_balance": "F32", "random": "F33"},
        "A": {"kvcache_centric": "A19", "cache_aware": "A20", "load_balance": "A21", "random": "A22"},
    }
)
_RATIOS = MappingProxyType(
    {
        "F": {"load_balance": "F47", "random": "F48"},
        "A": {"cache_aware": "A28", "load_balance": "A29", "random": "A30"},
    }
)
ARXIV_SPEEDS: Final = (1.6, 1.7, 1.8, 1.9, 2.0)
"""Among which the unpublished load of arXiv Fig. 8 is looked for."""
STATED_POLICY: Final = "longest_prefix"
"""How requests reach local caches in FAST'25 Fig. 10: to the node that holds most of it (assumption B13)."""

_FIG_10 = MappingProxyType(
    {"conversation": ("F68", "F69"), "toolagent": ("F70", "F71"), "synthetic": ("F15", "F16")}
)
_TENTH = within(0.1)


def beside_papers(fast: pd.DataFrame, arxiv: pd.DataFrame, caches: pd.DataFrame) -> ComparisonTable:
    """Every claim of this topic with our number.

    Args:
        fast: rows of `PlacementReplay` on the conversation trace, one a policy of FAST'25 Fig. 5.
        arxiv: rows of `PlacementReplay` on the arXiv trace, one a policy.
        caches: rows of `PlacementReplay` as `local_and_global` labels them.
    """
    return comparison_table([*_figure("F", fast), *_fig_10(caches), *_figure("A", arxiv)])


def closest_speed(rows: pd.DataFrame, mean_s: float) -> float:
    """The replay speed at which the mean TTFT comes closest to a printed one, as a ratio.

    Args:
        rows: rows of `PlacementReplay` under one policy, one per speed.
        mean_s: the printed mean TTFT.
    """
    distance = np.abs(np.log(rows["mean"].to_numpy(dtype=np.float64) / mean_s))
    return float(rows["speed"].to_numpy(dtype=np.float64)[int(distance.argmin())])


def local_and_global(caches: pd.DataFrame) -> pd.DataFrame:
    """Rows of `PlacementReplay` over ten nodes with the column `cache`: `global`, or `local` and the policy."""
    local = "local, " + caches["policy"].astype(str)
    return caches.assign(cache=local.where(~caches["shared_cache"].astype(bool), "global"))


def bracket(caches: pd.DataFrame, workload: str, quantity: str) -> tuple[float, float, float]:
    """The least and the most that local policies reach, and the global cache's.

    Args:
        caches: rows of `PlacementReplay` over ten nodes.
        workload: which.
        quantity: `token_hit_rate` or `prefill_gpu_s`.
    """
    rows = records(caches, workload=workload)
    local = [float(row[quantity]) for row in rows if not row["shared_cache"]]
    (shared,) = (float(row[quantity]) for row in rows if row["shared_cache"])
    return min(local), max(local), shared


def _figure(letter: str, rows: pd.DataFrame) -> Iterator[Compared]:
    means = rows.set_index("policy")["mean"].astype(float).to_dict()
    twin = rows["origin"].iloc[0] != "released"
    best, length = means["kvcache_centric"], min(rows["requests"].tolist())
    for policy, identifier in _MEANS[letter].items():
        yield marked_if_twin(claimed(identifier, means[policy], requests=length), twin)
    for policy, identifier in _RATIOS[letter].items():
        yield marked_if_twin(claimed(identifier, means[policy] / best, requests=length), twin)
    if letter == "F":
        saved = 100 * (1 - best / means["cache_aware"])
        yield marked_if_twin(claimed("F29", saved, requests=length), twin)


def _fig_10(caches: pd.DataFrame) -> Iterator[Compared]:
    """The global bars by value; the gain over local caches behind the stated policy, and behind two others."""
    origins = {str(row["workload"]): str(row["origin"]) for row in caches.to_dict(orient="records")}
    for workload, series in WORKLOADS.items():
        hit, gpu_s = (bracket(caches, workload, q) for q in ("token_hit_rate", "prefill_gpu_s"))
        printed = fact("fast_fig10_hit_rate", series="Global cache", x=series)
        row = compared(f"{series}: hit rate, global cache", printed, 100 * hit[2], _TENTH, evidence="simulated")
        yield unless_twin(row, origins[workload])
        printed = fact("fast_fig10_gpu_time", series="Global cache", x=series)
        row = compared(
            f"{series}: prefill GPU time, global cache", printed, gpu_s[2], _TENTH, evidence="simulated"
        )
        yield unless_twin(row, origins[workload])  # it follows from lengths and sharing, too
    for workload in _FIG_10:
        origin = origins[workload]
        yield from (unless_twin(row, origin) for row in _gains_of_global(caches, workload, STATED_POLICY))
        for policy in sorted(set(caches["policy"][~caches["shared_cache"].astype(bool)]) - {STATED_POLICY}):
            for row in _gains_of_global(caches, workload, policy):
                yield unless_twin(detail(row, f"local caches behind {policy}"), origin)


def _gains_of_global(caches: pd.DataFrame, workload: str, policy: str) -> Iterator[Compared]:
    """What a global cache gains on a workload over local caches behind one policy: hit rate and prefill time."""
    rows = records(caches, workload=workload)
    (shared,) = (row for row in rows if row["shared_cache"])
    (local,) = (row for row in rows if not row["shared_cache"] and row["policy"] == policy)
    hit = float(local["token_hit_rate"])
    more = float(shared["token_hit_rate"]) / hit if hit else math.inf  # a few requests of a twin may hit nothing
    share = float(shared["prefill_gpu_s"]) / float(local["prefill_gpu_s"])
    requests = min(int(row["requests"]) for row in rows)
    hits, gpu_time = (claim(identifier) for identifier in _FIG_10[workload])
    yield claimed(hits, more, requests=requests)
    saved = gpu_time.fact.unit == "percent"
    yield claimed(gpu_time, 100 * (1 - share) if saved else share, requests=requests)
