"""Chapter 06: long prompts over several processes: chunked pipelines, KV-Runahead, and both on this machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from mooncake_lab import perf
from mooncake_lab.book.experiments import tabulated
from mooncake_lab.book.paper import assumption, constant
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.engine import PrefillEngine, load_model
from mooncake_lab.engine.pipeline import Crew, CrewSpec, Together, cpp_prefill, overlap_share, runahead_prefill
from mooncake_lab.perf.cpp import WAYS, shared_prefill
from mooncake_lab.perf.runahead import (
    Runahead,
    best_bounds,
    equal_work_bounds,
    even_bounds,
    gathered_s,
    runahead_s,
    traffic_tokens,
)
from mooncake_lab.simulation import simulate_cpp

EFFICIENCY = 0.5
"""Share of the peak that matrices and attention reach (assumption B42)."""
NVLINK_BYTES_PER_S, SLOW_BYTES_PER_S = 300e9, 10e9
"""The two networks of the paper's experiments."""
RUNAHEAD_TOKENS, RUNAHEAD_GPUS = (1024, 2048, 4096, 8192, 12_288, 16_384), (2, 4, 8)
"""Prompts and GPUs among which its best gains are looked for (assumption B61)."""
MESSAGE_S = 10e-6
"""Latency of a message (assumption B42)."""


def runahead_cost(
    shape: perf.ModelShape,
    device: perf.Hardware,
    *,
    bytes_per_s: float = NVLINK_BYTES_PER_S,
    attention_efficiency: float = EFFICIENCY,
) -> Runahead:
    """A layer of a model on a device whose attention reaches this share of its peak."""
    peak = device.flops_per_s()
    project = shape.width * (shape.query_width + 2 * shape.kv_width)
    return Runahead(
        layers=shape.layers,
        project_s_per_token=2 * project / (peak * EFFICIENCY),
        rest_s_per_token=2 * (shape.layer_parameters - project) / (peak * EFFICIENCY),
        pair_s=4 * shape.query_width / (peak * attention_efficiency),
        kv_bytes_per_token=shape.kv_bytes_per_token / shape.layers,
        link=perf.LinkLatency(bytes_per_s, MESSAGE_S),
    )


@tabulated
def runahead_sweep(
    lengths: Sequence[int] = RUNAHEAD_TOKENS,
    processes: Sequence[int] = RUNAHEAD_GPUS,
    bandwidths: Sequence[float] = (NVLINK_BYTES_PER_S, SLOW_BYTES_PER_S),
    attention_efficiencies: Sequence[float] = (EFFICIENCY,),
    *,
    model: str = "llama-7b",
) -> Iterator[dict[str, Any]]:
    """TTFT of a model by slicing, over prompt length, GPUs, network and efficiency of attention."""
    shape, device = perf.model_shape(model), perf.hardware("a100")
    for tokens in lengths:
        for count in processes:
            for bandwidth in bandwidths:
                for share in attention_efficiencies:
                    cost = runahead_cost(shape, device, bytes_per_s=bandwidth, attention_efficiency=share)
                    setting = {"tokens": tokens, "processes": count, "gb_per_s": bandwidth / 1e9}
                    yield (setting | {"attention_efficiency": share} | _runahead_row(cost, tokens, count))


def _runahead_row(cost: Runahead, tokens: int, count: int) -> dict[str, Any]:
    even, equal = even_bounds(tokens, count), equal_work_bounds(cost, tokens, count)
    grid = best_bounds(cost, tokens, count, grain_tokens=max(tokens // 64, 1))
    best = min(grid, equal, key=lambda bounds: runahead_s(cost, bounds))  # equal work is not bound to grains
    ttft_s = {
        "even": runahead_s(cost, even),
        "equal_work": runahead_s(cost, equal),
        "best": runahead_s(cost, best),
        "gathered": gathered_s(cost, tokens, count),
        "alone": runahead_s(cost, [tokens]),
    }
    return {
        **{f"{name}_ms": 1000 * seconds for name, seconds in ttft_s.items()},
        "gain": ttft_s["gathered"] / ttft_s["best"],
        "bounds": " ".join(map(str, best)),
    }


def noise_ratio(tokens: int = 12_288, processes: int = 4, *, attention_efficiency: float = EFFICIENCY) -> float:
    """How many times more, in percent, a noisy network slows the baseline of KV-Runahead than KV-Runahead.

    The noise is not published: all links lose the share of their bandwidth with which the baseline of LLaMA-7B
    gets as many percent slower as printed. The slices are those of the quiet network.
    """
    shape, device = perf.model_shape("llama-7b"), perf.hardware("a100")
    quiet = runahead_cost(shape, device, attention_efficiency=attention_efficiency)
    printed = constant("runahead_noise_baseline_percent").value
    bounds = best_bounds(quiet, tokens, processes, grain_tokens=tokens // 64)

    def slower_percent(seconds: Callable[[Runahead], float], share: float) -> float:
        noisy = replace(quiet, link=perf.LinkLatency(share * NVLINK_BYTES_PER_S, MESSAGE_S))
        return 100 * (seconds(noisy) / seconds(quiet) - 1)

    low, high = 1e-3, 1.0  # of the bandwidth; the baseline gathers nothing while it computes, so less is slower
    for _ in range(60):
        share = (low + high) / 2
        misses = slower_percent(lambda cost: gathered_s(cost, tokens, processes), share) < printed
        low, high = (low, share) if misses else (share, high)
    return printed / slower_percent(lambda cost: runahead_s(cost, bounds), (low + high) / 2)


LENGTHS = (32_768, 131_072, 262_144, 524_288, 1_048_576)
"""Tokens of a prompt. The node was measured to 131,072; beyond, the fit is extrapolated."""
NODE = "a800-node"


def group(nodes: int, *, chunk_tokens: int | None = None, bandwidth_share: float = 1.0) -> perf.CppGroup:
    """Nodes like the paper's, running LLaMA3-70B.

    Args:
        nodes: how many.
        chunk_tokens: of a chunk; None takes assumption B14.
        bandwidth_share: of the network, what is left for prefill beside transfers of KVCache.
    """
    tokens = chunk_tokens or int(assumption("B14").value or 0)
    found = perf.CppGroup.of(paper_node_latency(), nodes=nodes, chunk_tokens=tokens)
    link = perf.LinkLatency(found.link.bytes_per_s * bandwidth_share, found.link.latency_s)
    return replace(found, link=link)


@tabulated
def three_ways(
    lengths: Sequence[int] = LENGTHS,
    nodes: Sequence[int] = (1, 2, 4),
    bandwidth_shares: Sequence[float] = (1.0,),
) -> Iterator[dict[str, Any]]:
    """Every way to share a prefill over nodes."""
    for share in bandwidth_shares:
        for tokens in lengths:
            alone_s = shared_prefill(group(1), "CPP", tokens).seconds
            for count in nodes:
                for way in WAYS:
                    found = shared_prefill(group(count, bandwidth_share=share), way, tokens)
                    yield {
                        "way": way,
                        "tokens": tokens,
                        "nodes": count,
                        "bandwidth_share": share,
                        "ttft_s": found.seconds,
                        "speed_up": alone_s / found.seconds,
                        "network_gb": found.network_bytes / 1e9,
                        "mfu": found.mfu(perf.hardware(NODE), count),
                    }


@tabulated
def chunk_sweep() -> Iterator[dict[str, Any]]:
    """Speed-up of four nodes over one by chunk length, with and without a constant for each chunk."""
    for length in (32_768, 131_072, 1_048_576):
        alone_s = perf.cpp_prefill_s(group(1), length)
        for constant_ms in (0.0, 10.0):
            for chunk in (512, 1024, 2048, 4096, 8192, 16_384, 32_768):
                priced = replace(group(4, chunk_tokens=chunk), chunk_constant_s=constant_ms / 1000)
                ttft_s = perf.cpp_prefill_s(priced, length)
                setting = {"tokens": length, "chunk_tokens": chunk, "chunk_constant_ms": constant_ms}
                yield setting | {"ttft_s": ttft_s, "speed_up": alone_s / ttft_s}


def equal_time_sizes(whole: perf.CppGroup, tokens: int, chunks: int) -> list[int]:
    """As many chunks that take equally long rather than hold equally many tokens: later ones are shorter."""
    total_s = whole.prefill.compute_s(tokens) - whole.prefill.constant_s
    ends, low = list[int](), 0
    for index in range(1, chunks):
        target_s, high = total_s * index / chunks, tokens
        while low < high:
            middle = (low + high) // 2
            reached_s = whole.prefill.compute_s(middle) - whole.prefill.constant_s
            low, high = (middle + 1, high) if reached_s < target_s else (low, middle)
        ends.append(low)
    cuts = [0, *ends, tokens]
    return [stop - start for start, stop in pairwise(cuts) if stop > start]


@tabulated
def equal_tokens_or_time() -> Iterator[dict[str, Any]]:
    """What shorter chunks at the end buy for a prompt of 128k tokens on four nodes."""
    shared, tokens, nodes = group(4), 131_072, 4
    cuts = {"equal tokens": perf.chunk_sizes(tokens, shared.chunk_tokens)}
    cuts["equal time"] = equal_time_sizes(shared, tokens, len(cuts["equal tokens"]))
    ideal_s = perf.cpp_prefill_s(group(1), tokens) / nodes
    for name, sizes in cuts.items():
        ttft_s = perf.cpp_prefill_s(shared, tokens, sizes=sizes)
        yield {
            "cut": name,
            "first_tokens": sizes[0],
            "last_tokens": sizes[-1],
            "longest_ms": 1000 * max(perf.chunk_seconds(shared, sizes)),
            "ttft_s": ttft_s,
            "ramp_percent": 100 * (ttft_s / ideal_s - 1),
        }


def recurrence_against_events(tokens: Sequence[int] = LENGTHS) -> float:
    """The largest relative difference between the recurrence and the event simulation, over all ends of chunks."""
    worst = 0.0
    for length in tokens:
        for count in (1, 2, 3, 4):
            shared = group(count, chunk_tokens=8192)
            expected = perf.cpp_finish_s(shared, length)
            found = simulate_cpp(shared, perf.chunk_sizes(length, shared.chunk_tokens))
            for ours, theirs in zip(found, expected, strict=True):
                worst = max(worst, *(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)))
    return worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """One prompt by one process, and over several by chunked pipelines and by KV-Runahead."""

    model: str = "lab-30m"
    processes: int = 2
    prompt_tokens: int = 768
    chunk_tokens: int = 96
    timeout_s: float = 600.0
    seed: int = 0


def measure_live(setting: Live) -> tuple[pd.DataFrame, Mapping[str, pd.DataFrame]]:
    """Prefill one prompt every way over 2 up to all processes.

    Returns:
        A row a way and number of processes; and, of the prefills over all processes, the timeline of each way.
    """
    shape, name = perf.model_shape(setting.model), f"random:{setting.model}"
    # the dense backend compiles nothing, so the workers start quickly
    asked: dict[str, Any] = {"device": "cpu", "dtype": "float32", "backend": "dense", "seed": setting.seed}
    rng, chunk = np.random.default_rng(setting.seed), setting.chunk_tokens
    tokens = rng.integers(0, shape.vocabulary, setting.prompt_tokens).astype(np.int32)
    engine = PrefillEngine(load_model(name, **asked))
    engine.prefill(tokens[:8])  # the first one warms up
    alone = engine.prefill(tokens)
    rows: list[dict[str, Any]] = [{"way": "one process", "over": 1, "seconds": alone.seconds, "same_token": True}]
    charts: dict[str, pd.DataFrame] = {}
    spec = CrewSpec(model=name, processes=setting.processes, timeout_s=setting.timeout_s, **asked)
    with Crew(spec) as crew:
        cpp_prefill(crew, tokens, chunk_tokens=chunk)  # likewise
        for over in range(2, setting.processes + 1):
            bounds = even_bounds(len(tokens), over)
            hops = (over - 1) * len(tokens) * shape.width * shape.bytes_per_element
            sent = traffic_tokens(bounds) * shape.kv_bytes_per_token
            chunked = cpp_prefill(crew, tokens, chunk_tokens=chunk, processes=over)
            chained = runahead_prefill(crew, tokens, bounds=bounds)
            for way, found, predicted in (("CPP", chunked, hops), ("KV-Runahead", chained, sent)):
                apart = [float((a - b.cpu()).abs().max()) for a, b in zip(found.kv, alone.kv.layers, strict=True)]
                rows.append({
                    "way": way, "over": over, "seconds": found.seconds,
                    "same_token": found.first_token == alone.first_token, "kv_difference": max(apart),
                    "sent_bytes": found.sent_bytes, "predicted_bytes": predicted,
                    "overlap": overlap_share(found.shares),
                })  # fmt: skip
                charts[way] = pd.DataFrame(live_timeline(found))
    return pd.DataFrame(rows).fillna(0.0), charts


def live_timeline(found: Together) -> list[dict[str, Any]]:
    """Rows of rank, what (compute or wait), piece, start_ms and end_ms, from the first activity on."""
    begin_s = min(each.start_s for share in found.shares for each in share.activities)
    return [
        {
            "rank": share.rank,
            "what": each.what,
            "piece": each.piece,
            "start_ms": 1000 * (each.start_s - begin_s),
            "end_ms": 1000 * (each.end_s - begin_s),
        }
        for share in found.shares
        for each in share.activities
    ]
