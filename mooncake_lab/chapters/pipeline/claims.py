"""Chapter 06: stalls by hand, what each idea of Sarathi-Serve costs and spares, and the verdicts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.chapters.pipeline.serving import Serving
from mooncake_lab.experiments import records
from mooncake_lab.paper import Compared, ComparisonTable, claimed, comparison_table, curve, detail, fact
from mooncake_lab.perf import IterationCost
from mooncake_lab.testbeds.sarathi_serve import TESTBEDS, TEXT, testbed, yi_34b_on_two_a100s

OVERHEADS, ABLATION = "sarathi_serve_artifact_chunk_overhead", "sarathi_serve_table4_ablation"
WAYS: Final = ("whole prompt", "chunk 2048", "chunk 512")
RATES: Final = {"openchat_sharegpt4": 0.5, "arxiv_summarization": 0.2}
"""Requests per second of the ablation, which the paper does not print (assumption B49)."""
VARIANTS: Final = ("hybrid batching only", "chunked prefill only", "both")
"""Rows of Table 4. Alone, hybrid batches hold whole prompts, and chunks take turns with decodes."""
BUDGETS: Final = (1024, 512)
"""Token budgets of the table's caption, and of the scripts that the authors ship for it."""
ABLATION_SEEDS: Final = 3
"""Seeds over which the ablation is averaged: the 99th percentile of 128 requests depends on very few of them."""
FALCON, FALCON_TP8 = "Falcon-180B", "Falcon-180B, TP8"


def stalls() -> pd.DataFrame:
    """How much longer an iteration takes for its decodes when a prompt joins, whole or by the chunk (Fig. 9).

    The decodes have contexts of 1,024 tokens.

    Returns:
        Rows of way, prompt_tokens, decodes, over_decode: the longest iteration over one of the decodes alone.
    """
    cost, rows = yi_34b_on_two_a100s(), list[dict[str, Any]]()
    for count in (8, 32):
        alone_s = cost.step_s(0, 0, count, count * 1024)
        for prompt in (512, 1024, 2048, 4096, 8192, 16_384):
            for way in WAYS:
                chunk = prompt if way == WAYS[0] else min(prompt, int(way.split()[1]))
                tokens = chunk if chunk == prompt else chunk - count  # a budget holds the decodes too
                longest_s = cost.step_s(tokens, prompt - tokens, count, count * 1024)
                row = {"way": way, "prompt_tokens": prompt, "decodes": count, "over_decode": longest_s / alone_s}
                rows.append(row)
    return pd.DataFrame(rows)


def chunk_overhead() -> pd.DataFrame:
    """Time of a prefill in chunks over a whole one, beside what the artifact measured (Fig. 14).

    Returns:
        Rows of chunk_tokens, prompt_tokens, paper, model, miss_percent.
    """
    cost, table = yi_34b_on_two_a100s(), curve(OVERHEADS)
    rows: list[dict[str, float]] = []
    for series, prompt, printed in zip(table["series"], table["x"], table["y"], strict=True):
        chunk, tokens = int(str(series).split()[1]), int(prompt)
        ours = chunked_s(cost, tokens, chunk) / cost.step_s(tokens, 0)
        rows.append({"chunk_tokens": chunk, "prompt_tokens": tokens, "paper": float(printed), "model": ours})
    found = pd.DataFrame(rows)
    return found.assign(miss_percent=100 * (found["model"] / found["paper"] - 1))


def chunked_s(cost: IterationCost, tokens: int, chunk: int) -> float:
    """Seconds of a prefill in chunks."""
    return sum(cost.step_s(min(chunk, tokens - start), start) for start in range(0, tokens, chunk))


def ablation_points(scale: str, *, seed: int = 0) -> tuple[Serving, ...]:
    """Table 4: each idea alone and both, on both workloads, with 128 requests (24 at smoke) per seed."""
    requests, seeds = (24, 1) if scale == "smoke" else (128, ABLATION_SEEDS)
    return tuple(
        point for each in range(seed, seed + seeds) for point in _ablated(Serving(requests=requests, seed=each))
    )


def _ablated(base: Serving) -> tuple[Serving, ...]:
    found: list[Serving] = []
    for workload, rate in RATES.items():
        here = replace(base, workload=workload, rate=rate)
        found.append(replace(here, policy="whole prompts beside decodes"))
        for budget in BUDGETS:
            chunked = replace(here, policy=f"Sarathi-Serve {budget}")
            found += [replace(chunked, apart=True), chunked]
    return tuple(found)


def ablation(served: pd.DataFrame) -> pd.DataFrame:
    """Runs of `ablation_points` beside the printed table.

    Returns:
        Rows of workload, variant, budget_tokens (0: none), requests, ttft_s and tbt_s (ours; median and 99th
        percentile, means over seeds), paper_ttft_s, paper_tbt_s.
    """
    rows: list[dict[str, Any]] = []
    for row in _over_seeds(served).to_dict("records"):
        workload, policy = str(row["workload"]), str(row["policy"])
        budget = int(policy.rsplit(maxsplit=1)[-1]) if policy.startswith("Sarathi") else 0
        variant = VARIANTS[0 if not budget else 1 if row["apart"] else 2]
        short = workload.split("_", maxsplit=1)[0]
        printed = {
            f"paper_{name}_s": fact(ABLATION, series=variant, x=f"{short}_{column}").value
            for name, column in (("ttft", "ttft_p50"), ("tbt", "tbt_p99"))
        }
        named = {"workload": workload, "variant": variant, "budget_tokens": budget}
        named |= {"requests": row["requests"]}
        ours = named | {"ttft_s": row["p50_ttft_s"], "tbt_s": row["p99_tbt_s"]}
        rows.append(ours | printed)
    return pd.DataFrame(rows)


def _over_seeds(served: pd.DataFrame) -> pd.DataFrame:
    """One row per workload, policy and way of sharing: the fewest requests, and means of what users saw."""
    named = served.groupby(["workload", "policy", "apart"], sort=False)
    return named.agg(
        requests=("requests", "min"), p50_ttft_s=("p50_ttft_s", "mean"), p99_tbt_s=("p99_tbt_s", "mean")
    ).reset_index()


def layouts(
    sums_ms: Sequence[float] = (0.0, 0.03, 0.1, 0.3, 1.0, 2.0), decodes: int = 32, context_tokens: int = 4096
) -> pd.DataFrame:
    """A decode iteration of Falcon over eight GPUs of two nodes: every layer on all, or half of them on each node.

    Args:
        sums_ms: latencies of an all-reduce between nodes, which the paper does not print.
        decodes: in the batch.
        context_tokens: of each.

    Returns:
        Rows of sum_ms, tensor_ms (TP8), pipeline_ms (TP4-PP2, both stages), over (the first over the second).
    """
    pipeline, tensor = testbed(FALCON), testbed(FALCON_TP8)
    clock = pipeline.clock()
    halves_s = clock.cost.step_s(0, 0, decodes, decodes * context_tokens)
    halves_s += (clock.stages - 1) * clock.link.seconds(clock.hop_bytes_per_token * decodes)
    rows: list[dict[str, float]] = []
    for sum_ms in sums_ms:
        whole = tensor.clock(sum_ms / 1000)
        whole_s = whole.cost.step_s(0, 0, decodes, decodes * context_tokens)
        whole_s += whole.overhead_s + whole.collective_s_per_token * decodes
        rows.append({"sum_ms": sum_ms, "tensor_ms": 1000 * whole_s, "pipeline_ms": 1000 * halves_s})
    found = pd.DataFrame(rows)
    return found.assign(over=found["tensor_ms"] / found["pipeline_ms"])


def sum_ms_for_twice() -> float:
    """Milliseconds of an all-reduce at which TP8 takes as many times as long as TP4-PP2 as the paper reports."""
    ratio = fact(TEXT, series=FALCON, x="tbt_tp8_over_tp4_pp2").value
    table = layouts((0.0, 1.0))
    slope = float(np.diff(table["tensor_ms"])[0])
    pipeline_ms, tensor_ms = (float(table[column].iloc[0]) for column in ("pipeline_ms", "tensor_ms"))
    return max(0.0, (ratio * pipeline_ms - tensor_ms) / slope)


def bubble_beside_paper() -> pd.DataFrame:
    """A prompt of 4K behind 32 decodes in Falcon's pipeline: what a stage waits, beside the printed times.

    Returns:
        Rows of what, paper_ms, iteration_ms (both stages), stage_ms (one).
    """
    bed = TESTBEDS[FALCON]
    cost = bed.clock().cost
    prompt = 1000 * cost.step_s(4096, 0)
    decode = 1000 * cost.step_s(0, 0, 32, 32 * 4096)
    ours = {"prompt_4k_ms": prompt, "decode_32_ms": decode, "bubble_ms": prompt - decode}
    return pd.DataFrame(
        [
            {"what": name, "paper_ms": fact(TEXT, series=FALCON, x=name).value, "iteration_ms": ms}
            | {"stage_ms": ms / bed.stages}
            for name, ms in ours.items()
        ]
    )


CAPTION_BUDGET, SHIPPED_BUDGET = BUDGETS


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
    (schemes,) = records(ratios, decode_attention=1.0, overhead_ms_a_layer=0.0)
    strict = gained[(gained["limit"] == "strict") & (gained["workload"] == "openchat_sharegpt4")]
    over: dict[str, float] = strict.set_index("testbed")["over_vllm"].to_dict()
    searched = min(strict["requests"])
    overheads: dict[tuple[int, int], float]
    overheads = chunk_overhead().set_index(["chunk_tokens", "prompt_tokens"])["model"].to_dict()
    fast = ahead[ahead["gb_per_s"] == ahead["gb_per_s"].max()]
    rows = [
        claimed("S13", schemes["bubbles_orca_over_sarathi"], requests=schemes["requests"]),
        claimed("S14", schemes["orca_over_sarathi"], requests=schemes["requests"]),
        claimed("S15", schemes["replicas_over_sarathi"], requests=schemes["requests"]),
        _gain("S18", capacities, "strict", "Sarathi-Serve 512"),
        _gain("S20", capacities, "relaxed", "Sarathi-Serve 2048"),
        claimed("S21", over["Mistral-7B"], requests=searched),
        claimed("S22", over["LLaMA2-70B"], requests=searched),
        claimed("S23", over["Falcon-180B"], requests=searched),
        claimed("S24", layouts((TESTBEDS["Falcon-180B, TP8"].sum_ms,))["over"].iloc[0]),
        claimed("S25", overheads[512, 2048]),
        *_ablated_claims(apart, SHIPPED_BUDGET),
        claimed("K01", max(fast["gain"].tolist())),
    ]
    caption = _ablated_claims(apart, CAPTION_BUDGET)
    return comparison_table(
        [*rows, *(detail(row, f"token budget {CAPTION_BUDGET} of the caption") for row in caption)]
    )


def _ablated_claims(apart: pd.DataFrame, budget_tokens: int) -> list[Compared]:
    """What each idea of Table 4 does to the tail of TBT and to TTFT."""
    chosen = apart[apart["budget_tokens"].isin([0, budget_tokens])].set_index(["workload", "variant"])
    tbt: dict[tuple[str, str], float] = chosen["tbt_s"].to_dict()
    ttft: dict[tuple[str, str], float] = chosen["ttft_s"].to_dict()
    requests = min(apart["requests"])
    whole, chunks, both = VARIANTS
    chat, arxiv = RATES
    return [
        claimed("S26", tbt[chat, whole] / tbt[chat, both], requests=requests),
        claimed("S27", ttft[chat, both] / ttft[chat, whole], requests=requests),
        claimed("S17", tbt[chat, chunks] / tbt[chat, both], requests=requests),
        claimed("S37", tbt[arxiv, whole] / tbt[arxiv, both], requests=requests),
        claimed("S38", ttft[arxiv, both] / ttft[arxiv, whole], requests=requests),
    ]


def _gain(identifier: str, capacities: pd.DataFrame, limit: str, policy: str) -> Compared:
    """Capacity of Sarathi-Serve over vLLM at a limit for Yi-34B; a lower bound if the highest rate passed.

    Raises:
        ValueError: when vLLM meets the limit at none of the rates.
    """
    ours, vllm = (_at_limit(capacities, limit, name) for name in (policy, "vLLM"))
    if not vllm["requests_per_s"]:
        raise ValueError(f"vLLM meets the {limit} limit at none of the rates tried; begin with a lower one")
    return claimed(
        identifier,
        ours["requests_per_s"] / vllm["requests_per_s"],
        requests=min(capacities["requests"]),
        bound="at least" if ours["requests_per_s"] == ours["highest_tested"] else "exact",
    )


def _at_limit(capacities: pd.DataFrame, limit: str, policy: str) -> dict[str, Any]:
    slo_s = fact("sarathi_serve_slo", series="Yi-34B", x=limit).value
    (row,) = records(capacities, slo_s=slo_s, policy=policy)
    return row
