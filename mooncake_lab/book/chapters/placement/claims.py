"""Placement held against FAST'25 Figs. 5 and 10 and arXiv Fig. 8."""

import math
from collections.abc import Iterator
from typing import Final

import pandas as pd

from mooncake_lab.book import paper
from mooncake_lab.book.experiments import records, where

FAST_FIG_5: Final = {
    "kvcache_centric": "Global cache aware",
    "cache_aware": "Local cache aware",
    "load_balance": "Load balancing",
    "random": "Random",
}
"""Our policies and the boxes of FAST'25 Fig. 5."""
ARXIV_FIG_8: Final = {
    "kvcache_centric": "KVCache-centric",
    "cache_aware": "cache-aware",
    "load_balance": "load-balancing",
    "random": "random",
}
"""Our policies and the boxes of arXiv Fig. 8."""
WORKLOADS: Final = {"conversation": "Conversation", "toolagent": "Tool&Agent", "synthetic": "Synthetic"}
"""Our workloads and the groups of FAST'25 Figs. 10 and 11."""

_MEANS: Final = {
    "F": {"kvcache_centric": "F30", "cache_aware": "F31", "load_balance": "F32", "random": "F33"},
    "A": {"kvcache_centric": "A19", "cache_aware": "A20", "load_balance": "A21", "random": "A22"},
}
_RATIOS: Final = {
    "F": {"load_balance": "F47", "random": "F48"},
    "A": {"cache_aware": "A28", "load_balance": "A29", "random": "A30"},
}
ARXIV_TWINS: Final = (0, 1, 2)
"""Twins over which the times of arXiv Fig. 8 are averaged: its cluster is nearly full, and twins differ much."""
STATED_POLICY: Final = "longest_prefix"
"""How requests reach local caches in FAST'25 Fig. 10: to the node that holds most of it (assumption B13)."""

_FIG_10: Final = {"conversation": ("F68", "F69"), "toolagent": ("F70", "F71"), "synthetic": ("F15", "F16")}
_FIG_11: Final = {10: "F104", 100: "F105"}
"""By popularity rank, what FAST'25 Fig. 11 ends at on the conversation trace."""
_TENTH = paper.within(0.1)


def beside_papers(
    fast: pd.DataFrame, arxiv: pd.DataFrame, caches: pd.DataFrame, replicas: pd.DataFrame
) -> paper.ComparisonTable:
    """Every claim of this topic with our number."""
    in_order = (_figure("F", fast), _fig_10(caches), _fig_11(replicas), _figure("A", arxiv))
    return paper.comparison_table(row for rows in in_order for row in rows)


def means_of_twins(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `PlacementReplay` on several twins as one row a policy: means of numbers, else the first."""
    numbers = rows.select_dtypes("number").columns
    return rows.groupby("policy", sort=False, as_index=False).agg(
        {name: "mean" if name in numbers else "first" for name in rows if name != "policy"}
    )


def local_and_global(caches: pd.DataFrame) -> pd.DataFrame:
    """Rows of `PlacementReplay` over ten nodes with the column `cache`: `global`, or `local` and the policy."""
    local = "local, " + caches["policy"].astype(str)
    return caches.assign(cache=local.where(~caches["shared_cache"].astype(bool), "global"))


def _figure(letter: str, rows: pd.DataFrame) -> Iterator[paper.Compared]:
    means = rows.set_index("policy")["mean"].astype(float).to_dict()
    twin = rows["origin"].iloc[0] != "released"
    best, length = means["kvcache_centric"], min(rows["requests"].tolist())
    for policy, identifier in _MEANS[letter].items():
        yield paper.marked_if_twin(paper.claimed(identifier, means[policy], requests=length), twin)
    for policy, identifier in _RATIOS[letter].items():
        yield paper.marked_if_twin(paper.claimed(identifier, means[policy] / best, requests=length), twin)
    if letter == "F":
        saved = 100 * (1 - best / means["cache_aware"])
        yield paper.marked_if_twin(paper.claimed("F29", saved, requests=length), twin)


def _fig_10(caches: pd.DataFrame) -> Iterator[paper.Compared]:
    """The global bars by value; the gain over local caches behind the stated policy, and behind two others."""
    for workload, series in WORKLOADS.items():
        rows = where(caches, workload=workload)
        origin, shared = str(rows["origin"].iloc[0]), where(rows, shared_cache=True).iloc[0]
        for words, name, ours in (
            ("hit rate", "fast_fig10_hit_rate", 100 * float(shared["token_hit_rate"])),
            ("prefill GPU time", "fast_fig10_gpu_time", float(shared["prefill_gpu_s"])),
        ):  # both follow from lengths and sharing, which a twin is made to have
            printed = paper.fact(name, series="Global cache", x=series)
            words_said = f"{series}: {words}, global cache"
            row = paper.compared(words_said, printed, ours, _TENTH, evidence="simulated")
            yield paper.unless_twin(row, origin)
    for workload in _FIG_10:
        rows = where(caches, workload=workload)
        others = sorted(set(where(caches, shared_cache=False)["policy"]) - {STATED_POLICY})
        for policy in (STATED_POLICY, *others):
            for row in _gains_of_global(rows, workload, policy):
                behind = f"local caches behind {policy}"
                told = row if policy == STATED_POLICY else paper.detail(row, behind)
                yield paper.unless_twin(told, str(rows["origin"].iloc[0]))


def _fig_11(replicas: pd.DataFrame) -> Iterator[paper.Compared]:
    """Nodes that hold a block at the last sample, and at most, on the conversation trace under LRU."""
    for rank, identifier in _FIG_11.items():
        rows = where(replicas, workload="conversation", eviction="lru", rank=rank)
        requests, twin = min(rows["requests"].tolist()), any(rows["origin"] != "released")
        counts = rows.sort_values("at_s")["replicas"].astype(float).tolist()
        yield paper.marked_if_twin(paper.claimed(identifier, counts[-1], requests=requests), twin)
        most = paper.detail(paper.claimed(identifier, max(counts), requests=requests), "at most, at any time")
        yield paper.marked_if_twin(most, twin)


def _gains_of_global(caches: pd.DataFrame, workload: str, policy: str) -> Iterator[paper.Compared]:
    """What a global cache gains on a workload over local caches behind one policy: hit rate and prefill time."""
    (shared,) = records(caches, shared_cache=True)
    (local,) = records(caches, shared_cache=False, policy=policy)
    hit = float(local["token_hit_rate"])
    more = float(shared["token_hit_rate"]) / hit if hit else math.inf  # a few requests of a twin may hit nothing
    share = float(shared["prefill_gpu_s"]) / float(local["prefill_gpu_s"])
    requests = min(caches["requests"].tolist())
    hits, gpu_time = (paper.claim(identifier) for identifier in _FIG_10[workload])
    yield paper.claimed(hits, more, requests=requests)
    saved = gpu_time.fact.unit == "percent"
    yield paper.claimed(gpu_time, 100 * (1 - share) if saved else share, requests=requests)
