"""Chapter 06: stalls by hand, what each idea of Sarathi-Serve costs and spares, and the verdicts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.book.chapters.pipeline.long import NVLINK_BYTES_PER_S, noise_ratio, runahead_sweep
from mooncake_lab.book.chapters.pipeline.serving import Serving
from mooncake_lab.book.experiments import records, tabulated, where
from mooncake_lab.book.paper import Compared, ComparisonTable, claimed, comparison_table, curve, detail, fact
from mooncake_lab.book.testbeds.sarathi_serve import (
    CONTEXT_TOKENS,
    TESTBEDS,
    TEXT,
    DecodeRows,
    machines_beside_paper,
    slo_s,
    testbed,
    yi_34b_on_two_a100s,
)
from mooncake_lab.core import sum_in_order
from mooncake_lab.perf import IterationCost

OVERHEADS, ABLATION = "sarathi_serve_artifact_chunk_overhead", "sarathi_serve_table4_ablation"
WAYS: Final = ("whole prompt", "chunk 2048", "chunk 512")
RATES: Final = {"openchat_sharegpt4": 0.5, "arxiv_summarization": 0.2}
"""Requests per second of the ablation, which the paper does not print (assumption B49)."""
VARIANTS: Final = ("hybrid batching only", "chunked prefill only", "both")
"""Rows of Table 4. Alone, hybrid batches hold whole prompts, and chunks take turns with decodes."""
BUDGETS: Final = (1024, 512)
"""Token budgets of the table's caption, and of the scripts that the authors ship for it."""
ABLATION_SEEDS: Final = 48
"""Seeds over which the ablation is averaged: the 99th percentile of 128 requests depends on very few of them. With
48, two draws of seeds give the same verdicts; with 3 they often do not."""
FALCON, FALCON_TP8 = "Falcon-180B", "Falcon-180B, TP8"


@tabulated
def stalls(
    decode_rows: DecodeRows = "first and last", context_tokens: int = CONTEXT_TOKENS
) -> Iterator[dict[str, Any]]:
    """How much longer an iteration takes for its decodes when a prompt joins, whole or by the chunk (Fig. 9).

    The decodes have contexts of 1,024 tokens. Those of the artifact were timed at `context_tokens`.
    """
    cost = yi_34b_on_two_a100s(context_tokens, decode_rows)
    for count in (8, 32):
        alone_s = cost.step_s(0, 0, count, count * 1024)
        for prompt in (512, 1024, 2048, 4096, 8192, 16_384):
            for way in WAYS:
                chunk = prompt if way == WAYS[0] else min(prompt, int(way.split()[1]))
                tokens = chunk if chunk == prompt else chunk - count  # a budget holds the decodes too
                longest_s = cost.step_s(tokens, prompt - tokens, count, count * 1024)
                over = longest_s / alone_s
                yield {"way": way, "prompt_tokens": prompt, "decodes": count, "over_decode": over}


@tabulated
def chunk_overhead() -> Iterator[dict[str, Any]]:
    """Time of a prefill in chunks over a whole one, beside what the artifact measured (Fig. 14)."""
    cost, table = yi_34b_on_two_a100s(), curve(OVERHEADS)
    for series, prompt, printed in zip(table["series"], table["x"], table["y"], strict=True):
        chunk, tokens = int(str(series).split()[1]), int(prompt)
        ours = chunked_s(cost, tokens, chunk) / cost.step_s(tokens, 0)
        row = {"chunk_tokens": chunk, "prompt_tokens": tokens, "paper": float(printed), "model": ours}
        yield row | {"miss_percent": 100 * (ours / float(printed) - 1)}


def chunked_s(cost: IterationCost, tokens: int, chunk: int) -> float:
    """Seconds of a prefill in chunks."""
    return sum_in_order(cost.step_s(min(chunk, tokens - start), start) for start in range(0, tokens, chunk))


def ablation_points(scale: str, *, seed: int = 0) -> tuple[Serving, ...]:
    """Table 4: each idea alone and both, on both workloads, with 128 requests (24 at smoke) per seed."""
    requests, seeds = (24, 1) if scale == "smoke" else (128, ABLATION_SEEDS)
    found: list[Serving] = []
    for each in range(seed, seed + seeds):
        for workload, rate in RATES.items():
            here = Serving(requests=requests, seed=each, workload=workload, rate=rate)
            found.append(replace(here, policy="whole prompts beside decodes"))
            for budget in BUDGETS:
                chunked = replace(here, policy=f"Sarathi-Serve {budget}")
                found += [replace(chunked, apart=True), chunked]
    return tuple(found)


@tabulated
def ablation(served: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Runs of `ablation_points`, means over seeds, beside the printed table; a budget of 0 is none."""
    for _, rows in served.groupby(["workload", "policy", "apart"], sort=False):
        workload, policy, apart = rows[["workload", "policy", "apart"]].iloc[0].tolist()
        budget = int(policy.rsplit(maxsplit=1)[-1]) if policy.startswith("Sarathi") else 0
        variant = VARIANTS[0 if not budget else 1 if apart else 2]
        short = workload.split("_", maxsplit=1)[0]
        yield {
            "workload": workload,
            "variant": variant,
            "budget_tokens": budget,
            "requests": min(rows["requests"]),
            "ttft_s": rows["p50_ttft_s"].mean(),
            "tbt_s": rows["p99_tbt_s"].mean(),
            "paper_ttft_s": fact(ABLATION, series=variant, x=f"{short}_ttft_p50").value,
            "paper_tbt_s": fact(ABLATION, series=variant, x=f"{short}_tbt_p99").value,
        }


@tabulated
def layouts(
    sums_ms: Sequence[float] = (0.0, 0.03, 0.1, 0.3, 1.0, 2.0),
    decodes: int = 32,
    context_tokens: int = 4096,
    *,
    decode_rows: DecodeRows = "first and last",
    timed_at_tokens: int = CONTEXT_TOKENS,
    printed_decodes: bool = False,
) -> Iterator[dict[str, Any]]:
    """A decode iteration of Falcon on eight GPUs of two nodes: each layer on all, or half of them on each node.

    Decode times are those `decode_rows` of the artifact, timed at a context of `timed_at_tokens`. With
    `printed_decodes`, an iteration takes a fifth of the printed strict limit on either layout (assumption B48),
    and what the network adds comes on top.
    """
    read: dict[str, Any] = {"context_tokens": timed_at_tokens, "decode_rows": decode_rows}
    read["decode_s"] = slo_s(FALCON, "strict") / 5 if printed_decodes else None
    clock, tensor = testbed(FALCON).clock(**read), testbed(FALCON_TP8)
    halves_s = clock.cost.step_s(0, 0, decodes, decodes * context_tokens)
    halves_s += (clock.stages - 1) * clock.link.seconds(clock.hop_bytes_per_token * decodes)
    for sum_ms in sums_ms:
        whole = tensor.clock(sum_ms / 1000, **read)
        whole_s = whole.cost.step_s(0, 0, decodes, decodes * context_tokens)
        whole_s += whole.overhead_s + whole.collective_s_per_token * decodes
        times = {"tensor_ms": 1000 * whole_s, "pipeline_ms": 1000 * halves_s}
        yield {"sum_ms": sum_ms, **times, "over": times["tensor_ms"] / times["pipeline_ms"]}


def sum_ms_for_twice() -> float:
    """Milliseconds of an all-reduce at which TP8 takes as many times as long as TP4-PP2 as the paper reports."""
    ratio = fact(TEXT, series=FALCON, x="tbt_tp8_over_tp4_pp2").value
    table = layouts((0.0, 1.0))
    slope = float(np.diff(table["tensor_ms"])[0])
    pipeline_ms, tensor_ms = (float(table[column].iloc[0]) for column in ("pipeline_ms", "tensor_ms"))
    return max(0.0, (ratio * pipeline_ms - tensor_ms) / slope)


CAPTION_BUDGET, SHIPPED_BUDGET = BUDGETS

_CAPACITIES: Final = {
    "S21": (("Mistral-7B", "strict"), ("Mistral-7B", "strict", "vllm")),
    "S22": (("LLaMA2-70B", "strict"), ("LLaMA2-70B", "strict", "vllm")),
    "S23": ((FALCON, "strict"), (FALCON, "strict", "vllm")),
    "S50": ((FALCON, "strict"), (FALCON, "strict", "vllm")),
    "S51": ((FALCON, "relaxed"), (FALCON, "relaxed", "vllm")),
    "S49": ((FALCON, "strict"), (FALCON_TP8, "strict", "vllm")),
    "S47": (("Yi-34B", "strict"), ("Yi-34B", "strict", "orca")),
    "S48": (("LLaMA2-70B", "strict"), ("LLaMA2-70B", "strict", "orca")),
}
"""Where Sarathi-Serve is searched, and whose capacity its own is divided by."""


def beside_papers(
    ratios: pd.DataFrame,
    capacities: pd.DataFrame,
    ahead: pd.DataFrame,
    apart: pd.DataFrame,
    gained: pd.DataFrame,
    *,
    sum_ms: float | None = None,
    decode_rows: DecodeRows = "first and last",
    context_tokens: int = CONTEXT_TOKENS,
    printed_decodes: bool = False,
) -> ComparisonTable:
    """Every claim of this topic with our number.

    Args:
        ratios: rows of `sensitivity` of the three schemes; the one without any change to the roofline is judged.
        capacities: rows of `capacity`.
        ahead: rows of `runahead_sweep` for LLaMA-7B with one efficiency of attention, which is also that of gains
            with a printed setting; for gains without one, the best is judged.
        apart: rows of `ablation`; the token budget of the authors' scripts is judged, that of the caption shown.
        gained: rows of `over_vllm`; those of openchat_sharegpt4 are judged.
        sum_ms: latency of an all-reduce between two nodes; None takes that of assumption B50.
        decode_rows: which decode times of the artifact single iterations go through (assumption B59).
        context_tokens: at which those decodes were timed (assumption B41).
        printed_decodes: whether decodes of Falcon take a fifth of the printed strict limit (assumption B48).
    """
    all_reduce_ms = TESTBEDS[FALCON_TP8].sum_ms if sum_ms is None else sum_ms
    over_nodes = layouts(
        (all_reduce_ms,),
        decode_rows=decode_rows,
        timed_at_tokens=context_tokens,
        printed_decodes=printed_decodes,
    )
    (schemes,) = records(ratios, decode_attention=1.0, overhead_ms_a_layer=0.0)
    overheads: dict[tuple[int, int], float]
    overheads = chunk_overhead().set_index(["chunk_tokens", "prompt_tokens"])["model"].to_dict()
    rows = [
        claimed("S13", schemes["bubbles_orca_over_sarathi"], requests=schemes["requests"]),
        claimed("S14", schemes["orca_over_sarathi"], requests=schemes["requests"]),
        claimed("S15", schemes["replicas_over_sarathi"], requests=schemes["requests"]),
        claimed("S39", schemes["orca_over_replicas"], requests=schemes["requests"]),
        _gain("S18", capacities, "strict", "Sarathi-Serve 512"),
        _gain("S53", capacities, "strict", "Sarathi-Serve 512"),
        _gain("S20", capacities, "relaxed", "Sarathi-Serve 2048"),
        *capacity_ratios(gained),
        *_machines(decode_rows, context_tokens, printed_decodes),
        claimed("S24", over_nodes["over"].iloc[0]),
        claimed("S25", overheads[512, 2048]),
        *ideas_apart(apart, SHIPPED_BUDGET),
        *_runahead(ahead),
    ]
    caption = ideas_apart(apart, CAPTION_BUDGET)
    return comparison_table(
        [*rows, *(detail(row, f"token budget {CAPTION_BUDGET} of the caption") for row in caption)]
    )


def capacity_ratios(gained: pd.DataFrame) -> Iterator[Compared]:
    """Ratios of capacities: machine, limit and policy of either side."""
    chat = where(gained, workload="openchat_sharegpt4")
    searched = min(chat["requests"].tolist())
    found: dict[tuple[str, str], dict[str, float]] = {(row["testbed"], row["limit"]): row for row in records(chat)}
    for identifier, (above, (machine, limit, policy)) in _CAPACITIES.items():
        rate = found[machine, limit][policy]
        over = found[above]["sarathi"] / rate if rate else np.inf
        yield claimed(identifier, over, requests=searched)


def _machines(decode_rows: DecodeRows, context_tokens: int, printed_decodes: bool) -> Iterator[Compared]:
    """How long single iterations take: decodes with a long prompt, and Falcon's prompts and decodes alone."""
    waits = stalls(decode_rows, context_tokens)
    (longest,) = records(waits, way=WAYS[0], decodes=32, prompt_tokens=waits["prompt_tokens"].max())
    yield claimed("S52", longest["over_decode"])
    beside = machines_beside_paper(decode_rows, context_tokens, printed_decodes=printed_decodes)
    (falcon,) = records(beside, testbed=FALCON)
    yield claimed("S54", falcon["model_prompt_ms"])
    yield claimed("S55", falcon["model_decode_ms"])


def _runahead(ahead: pd.DataFrame) -> Iterator[Compared]:
    """KV-Runahead: the best gains on both networks, two settings, and a noisy network."""
    by_network: dict[float, float] = ahead.pivot_table("gain", "gb_per_s", aggfunc="max")["gain"].to_dict()
    (share,) = set(ahead["attention_efficiency"].astype(float))
    yield claimed("K01", by_network[max(by_network)])
    for identifier, model, tokens, processes in (("K02", "llama-7b", 12_288, 4), ("K03", "falcon-7b", 8192, 8)):
        setting = ((tokens,), (processes,), (NVLINK_BYTES_PER_S,), (share,))
        (found,) = records(runahead_sweep(*setting, model=model))
        yield claimed(identifier, found["gain"])
    yield claimed("K04", by_network[min(by_network)])
    yield claimed("K05", noise_ratio(attention_efficiency=share))


def ideas_apart(apart: pd.DataFrame, budget_tokens: int) -> list[Compared]:
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
    """Capacity of Sarathi-Serve over vLLM at a limit for Yi-34B; a lower bound if the highest rate passed."""
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
