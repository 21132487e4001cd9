"""The hit rates of the chapter on the store held against what both editions print."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import pandas as pd

from mooncake_lab.book.experiments import tabulated
from mooncake_lab.book.paper import (
    Compared,
    ComparisonTable,
    claimed,
    compared,
    comparison_table,
    curve,
    detail,
    fact,
    noted,
    unless_twin,
    within,
)
from mooncake_lab.core import TERA
from mooncake_lab.perf import model_shape

_Row: TypeAlias = Mapping[Any, Any]

FAST_FIG_9: Final = {
    "Conversation": "conversation",
    "Tool&Agent": "toolagent",
    "Synthetic": "synthetic",
    "All": "all",
}
"""The curves of FAST'25 Fig. 9 and our names for their workloads."""
ARXIV_TABLE_1: Final = {"LRUCache": "lru", "LFUCache": "lfu", "LengthAwareCache": "length_aware"}
"""The rows of arXiv Table 1 and our names for their policies."""
_TABLE_1: Final[Mapping[str, Mapping[int | None, str]]] = {
    "lru": {1_000: "A09", 10_000: "A106", 30_000: "A105", 50_000: "A10", 100_000: "A104", None: "A103"},
    "lfu": {1_000: "A111", 10_000: "A110", 30_000: "A109", 50_000: "A108", 100_000: "A107"},
    "length_aware": {1_000: "A116", 10_000: "A115", 30_000: "A114", 50_000: "A113", 100_000: "A112"},
}
"""The claims on the cells of arXiv Table 1, by policy and capacity in blocks; without a limit all are alike."""
NODE_TOKENS: Final = 3_000_000
"""Where FAST'25 Fig. 9 draws its dashed line: the DRAM of one node. Claim F27 holds it against our own count."""
_DRAWN_BETWEEN: Final = (2_000_000, 4_000_000)
_POOLED_TOKENS: Final = 50_000_000


def capacities_of_fig_9() -> tuple[int, ...]:
    """The capacities at which FAST'25 Fig. 9 has points, and the one of its dashed line (tokens)."""
    drawn = {int(x) for x in curve("fast_fig09_hit_rate_vs_capacity")["x"]}
    return tuple(sorted(drawn | {NODE_TOKENS}))


def capacities_of_table_1() -> tuple[int | None, ...]:
    """The capacities of arXiv Table 1, upwards (blocks); None is unlimited."""
    printed = sorted(set(curve("arxiv_table1_cache_policies")["x"]))
    return tuple(None if math.isinf(x) else int(x) for x in printed)


def beside_fig_9(capacities: pd.DataFrame) -> pd.DataFrame:
    """Our hit rates next to the points of FAST'25 Fig. 9, one row a point, and both differences."""
    paper = curve("fast_fig09_hit_rate_vs_capacity")
    names = [FAST_FIG_9[series] for series in paper["series"].tolist()]
    paper = paper.assign(workload=names, capacity_tokens=paper["x"], paper=paper["y"])
    both = capacities.merge(paper[["workload", "capacity_tokens", "paper"]], on=["workload", "capacity_tokens"])
    return both.assign(
        difference=both["hit_rate"] - both["paper"],
        whole_blocks_difference=both["whole_blocks_hit_rate"] - both["paper"],
    )


@tabulated
def largest_differences(points: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Of `beside_fig_9`, per workload: the largest differences from the paper, with and without the remainder."""
    for workload, table in points.groupby("workload", sort=False):
        yield {
            "workload": workload,
            "origin": table["origin"].iloc[0],
            "with_remainder": table["difference"].abs().max(),
            "whole_blocks": table["whole_blocks_difference"].abs().max(),
        }


def shares_of_maximum(capacities: pd.DataFrame) -> pd.DataFrame:
    """One row a workload: hit rates at one node's and at pooled capacity, in percent of the largest capacity's.

    `as_drawn` is what the printed labels are: the mean of the neighbouring points, for no point is at 3M tokens.
    `whole_blocks` is the same without the remainders that assumptions B11 and B12 add to whole blocks.
    """
    rates, whole = (
        capacities.pivot_table(index="workload", columns="capacity_tokens", values=column, sort=False)
        for column in ("hit_rate", "whole_blocks_hit_rate")
    )
    best, drawn = rates.max(axis="columns"), list(_DRAWN_BETWEEN)
    shares = pd.DataFrame(
        {
            "simulated": 100 * rates[NODE_TOKENS] / best,
            "as_drawn": 100 * rates[drawn].mean(axis="columns") / best,
            "whole_blocks": 100 * whole[drawn].mean(axis="columns") / whole.max(axis="columns"),
            "pooled": 100 * rates[_POOLED_TOKENS] / best,
            "origin": capacities.groupby("workload")["origin"].first(),
        }
    )
    return shares.rename_axis("workload").reset_index()


def beside_papers(capacities: pd.DataFrame, policies: pd.DataFrame) -> ComparisonTable:
    """The claims of both editions on the store beside ours; what a twin decides is shown but never judged."""
    shares = {row["workload"]: row for row in shares_of_maximum(capacities).to_dict(orient="records")}
    table_1 = policies.to_dict(orient="records")
    return comparison_table([*_fast_fig_9(shares), *_arxiv_table_1(table_1)])


def _fast_fig_9(shares: Mapping[str, _Row]) -> Iterator[Compared]:
    labels = {"conversation": "F21", "toolagent": "F22", "synthetic": "F23", "all": "F24"}
    for workload, identifier in labels.items():
        share = shares[workload]
        yield unless_twin(claimed(identifier, share["as_drawn"]), share["origin"])
        whole = detail(claimed(identifier, share["whole_blocks"]), "whole blocks of 512 tokens only")
        yield unless_twin(whole, share["origin"])
    for series in ("Conversation", "Synthetic"):
        share = shares[FAST_FIG_9[series]]
        printed = fact("fast_fig09_fraction_of_max_at_3m", series=series, x=NODE_TOKENS)
        words, ours = f"{series}: the same, simulated at 3M itself", share["simulated"]
        yield unless_twin(compared(words, printed, ours, within(0.05), evidence="simulated"), share["origin"])
    yield from _pooled([shares[workload] for workload in ("conversation", "synthetic")])
    tokens_per_node = TERA / model_shape("llama3-70b").kv_bytes_per_token  # a node with 1 TB of DRAM
    yield claimed("F27", tokens_per_node)
    yield claimed("F26", math.ceil(_POOLED_TOKENS / tokens_per_node))


def _pooled(shares: Iterable[_Row]) -> Iterator[Compared]:
    """F25 speaks of all workloads, so the one farthest from its maximum decides; the others are details."""
    for rank, share in enumerate(sorted(shares, key=lambda share: share["pooled"])):
        row = claimed("F25", share["pooled"])
        yield unless_twin((detail if rank else noted)(row, share["workload"]), share["origin"])


def _arxiv_table_1(policies: Iterable[_Row]) -> Iterator[Compared]:
    found = {(row["workload"], row["policy"], _blocks(row["capacity_blocks"])): row for row in policies}
    ours = {
        identifier: found["toolagent", policy, blocks]["prefix_hit_rate"]
        for policy, cells in _TABLE_1.items()
        for blocks, identifier in cells.items()
    }
    ours["A11"] = _lead_of_lru(found, "toolagent")
    for identifier, value in ours.items():
        row = claimed(identifier, value)
        row = replace(row, quantity=f"tool&agent: {row.quantity}")
        yield unless_twin(row, found["toolagent", "lru", 1_000]["origin"])
    other = detail(claimed("A11", _lead_of_lru(found, "conversation")), "conversation trace instead")
    yield unless_twin(other, found["conversation", "lru", 1_000]["origin"])
    yield from (claimed(identifier, None) for identifier in ("A14", "A15"))


def _lead_of_lru(found: Mapping[tuple[Any, Any, Any], _Row], workload: str) -> float:
    """LRU's hit rate less that of the better rival, at the finite capacity where it is smallest."""
    rates = {key[1:]: row["prefix_hit_rate"] for key, row in found.items() if key[0] == workload}
    rivals = sorted({policy for policy, _ in rates} - {"lru"})
    return min(
        rate - max(rates[rival, blocks] for rival in rivals)
        for (policy, blocks), rate in rates.items()
        if policy == "lru" and blocks is not None
    )


def _blocks(capacity: float | None) -> int | None:
    """A capacity of a table: no limit is None, or NaN beside other numbers."""
    return None if capacity is None or not math.isfinite(capacity) else int(capacity)
