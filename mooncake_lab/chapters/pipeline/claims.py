"""Chapter 06's numbers held against SARATHI, Sarathi-Serve and KV-Runahead."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import pandas as pd

from mooncake_lab.chapters.pipeline.stalls import BUDGETS, VARIANTS, chunk_overhead, layouts
from mooncake_lab.paper import Bound, ComparisonTable, claim, claimed, comparison_table, detail, fact
from mooncake_lab.testbeds.sarathi_serve import TESTBEDS

CAPTION_BUDGET, SHIPPED_BUDGET = BUDGETS
_SWEPT: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"S18": ("strict", "Sarathi-Serve 512"), "S20": ("relaxed", "Sarathi-Serve 2048")}
)
"""Claims on capacities that a grid of rates gives: limit and policy."""


def beside_papers(
    ratios: pd.DataFrame, capacities: pd.DataFrame, ahead: pd.DataFrame, apart: pd.DataFrame, gained: pd.DataFrame
) -> ComparisonTable:
    """Claims S13 to S15, S17, S18, S20 to S27, S37, S38 and K01.

    Args:
        ratios: rows of `sensitivity` of the three schemes; the one without any change to the roofline is judged.
        capacities: rows of `capacity`.
        ahead: rows of `runahead_sweep` for LLaMA-7B; the best gain on the fast network is judged.
        apart: rows of `ablation`; the token budget of the authors' scripts is judged, that of the caption shown.
        gained: rows of `over_vllm`; the strict limit on openchat_sharegpt4 is judged.
    """
    plain = (ratios["decode_attention"] == 1.0) & (ratios["overhead_ms_a_layer"] == 0.0)
    ours = ratios[plain].iloc[0]
    fast = ahead["gb_per_s"] == max(ahead["gb_per_s"])
    strict = gained[(gained["limit"] == "strict") & (gained["workload"] == "openchat_sharegpt4")]
    over: dict[str, float] = strict.set_index("testbed")["over_vllm"].to_dict()
    schemes, swept = int(ours["requests"]), int(min(capacities["requests"]))
    searched, ablated = int(min(strict["requests"])), int(min(apart["requests"]))
    lengths: dict[str, int] = {"S13": schemes, "S14": schemes, "S15": schemes, "S18": swept, "S20": swept}
    lengths |= {
        "S21": searched,
        "S22": searched,
        "S23": searched,
        **dict.fromkeys(("S26", "S27", "S37", "S38"), ablated),
    }
    found = {
        "S13": ours["bubbles_orca_over_sarathi"],
        "S14": ours["orca_over_sarathi"],
        "S15": ours["replicas_over_sarathi"],
        **{name: gain_at(capacities, limit, budget) for name, (limit, budget) in _SWEPT.items()},
        "S21": over["Mistral-7B"],
        "S22": over["LLaMA2-70B"],
        "S23": over["Falcon-180B"],
        "S24": layouts((TESTBEDS["Falcon-180B, TP8"].sum_ms,))["over"].iloc[0],
        "S25": chunk_overhead().set_index(["chunk_tokens", "prompt_tokens"])["model"].to_dict()[512, 2048],
        **_ablated(apart, SHIPPED_BUDGET),
        "K01": max(ahead[fast]["gain"].tolist()),
    }
    bounds: dict[str, Bound] = {
        name: bound_at(capacities, limit, budget) for name, (limit, budget) in _SWEPT.items()
    }
    rows = [
        claimed(claim(name), float(value), requests=lengths.get(name), bound=bounds.get(name, "exact"))
        for name, value in found.items()
    ]
    for name, value in _ablated(apart, CAPTION_BUDGET).items():
        row = claimed(claim(name), value, requests=lengths.get(name))
        rows.append(detail(row, f"token budget {CAPTION_BUDGET} of the caption"))
    return comparison_table(rows)


def _ablated(apart: pd.DataFrame, budget_tokens: int) -> Mapping[str, float]:
    """S17, S26, S27, S37 and S38: what each idea of Table 4 does to the tail of TBT and to TTFT."""
    found: dict[str, float] = {}
    names = {"openchat_sharegpt4": ("S26", "S27"), "arxiv_summarization": ("S37", "S38")}
    for workload, (tail, first_token) in names.items():
        here = apart[(apart["workload"] == workload) & apart["budget_tokens"].isin([0, budget_tokens])]
        tbt: dict[str, float] = here.set_index("variant")["tbt_s"].to_dict()
        ttft: dict[str, float] = here.set_index("variant")["ttft_s"].to_dict()
        whole, chunks, both = VARIANTS
        found |= {tail: tbt[whole] / tbt[both], first_token: ttft[both] / ttft[whole]}
        if workload == "openchat_sharegpt4":
            found["S17"] = tbt[chunks] / tbt[both]
    return found


def gain_at(capacities: pd.DataFrame, limit: str, budget: str) -> float:
    """Capacity of Sarathi-Serve over vLLM at a limit for Yi-34B.

    Raises:
        ValueError: when vLLM meets the limit at none of the rates.
    """
    at = {row["policy"]: float(row["requests_per_s"]) for row in _at_limit(capacities, limit)}
    if not at["vLLM"]:
        raise ValueError(f"vLLM meets the {limit} limit at none of the rates tried; begin with a lower one")
    return at[budget] / at["vLLM"]


def bound_at(capacities: pd.DataFrame, limit: str, budget: str) -> Bound:
    """Whether `gain_at` is only a lower bound: the policy passed the highest rate tried."""
    (row,) = (row for row in _at_limit(capacities, limit) if row["policy"] == budget)
    return "at least" if row["requests_per_s"] == row["highest_tested"] else "exact"


def _at_limit(capacities: pd.DataFrame, limit: str) -> list[dict[Any, Any]]:
    slo_s = fact("sarathi_serve_slo", series="Yi-34B", x=limit).value
    return [row for row in capacities.to_dict(orient="records") if row["slo_s"] == slo_s]
