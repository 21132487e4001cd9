"""Chapter 06: long prompts over several processes: chunked pipelines, KV-Runahead, and both on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from mooncake_lab.engine import KVSpan, PrefillEngine, load_model
from mooncake_lab.engine.pipeline import Crew, CrewSpec, Together, cpp_prefill, overlap_share, runahead_prefill
from mooncake_lab.paper import assumption
from mooncake_lab.perf import (
    CppGroup,
    Hardware,
    LinkLatency,
    ModelShape,
    chunk_seconds,
    chunk_sizes,
    cpp_finish_s,
    cpp_prefill_s,
    hardware,
    model_shape,
)
from mooncake_lab.perf.cpp import WAYS, shared_prefill
from mooncake_lab.perf.runahead import (
    Runahead,
    best_bounds,
    equal_work_bounds,
    even_bounds,
    gathered_s,
    gathered_tokens,
    runahead_s,
    traffic_tokens,
)
from mooncake_lab.simulation import simulate_cpp
from mooncake_lab.testbeds import paper_node_latency

EFFICIENCY = 0.5
"""Share of the peak that matrices and attention reach (assumption B42)."""
NVLINK_BYTES_PER_S, SLOW_BYTES_PER_S = 300e9, 10e9
"""The two networks of the paper's experiments."""
MESSAGE_S = 10e-6
"""Latency of a message (assumption B42)."""


def runahead_cost(
    shape: ModelShape,
    device: Hardware,
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
        link=LinkLatency(bytes_per_s, MESSAGE_S),
    )


def runahead_sweep(
    lengths: Sequence[int] = (1024, 2048, 4096, 8192, 12_288, 16_384),
    processes: Sequence[int] = (2, 4, 8),
    bandwidths: Sequence[float] = (NVLINK_BYTES_PER_S, SLOW_BYTES_PER_S),
    attention_efficiencies: Sequence[float] = (EFFICIENCY,),
) -> pd.DataFrame:
    """Time to first token of LLaMA-7B by slicing, over prompt length, GPUs, network and efficiency of attention.

    Returns:
        Rows of tokens, processes, gb_per_s, attention_efficiency; milliseconds of even, equal-work, best slices
        and of gathering (dense and causal); tokens sent a layer by both; the bounds of the best slices.
    """
    shape, device = model_shape("llama-7b"), hardware("a100")
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        for count in processes:
            for bandwidth in bandwidths:
                for share in attention_efficiencies:
                    cost = runahead_cost(shape, device, bytes_per_s=bandwidth, attention_efficiency=share)
                    setting = {"tokens": tokens, "processes": count, "gb_per_s": bandwidth / 1e9}
                    rows.append(setting | {"attention_efficiency": share} | _runahead_row(cost, tokens, count))
    return pd.DataFrame(rows)


def _runahead_row(cost: Runahead, tokens: int, count: int) -> dict[str, Any]:
    even, equal = even_bounds(tokens, count), equal_work_bounds(cost, tokens, count)
    grid = best_bounds(cost, tokens, count, grain_tokens=max(tokens // 64, 1))
    best = min(grid, equal, key=lambda bounds: runahead_s(cost, bounds))  # equal work is not bound to grains
    ttft_s = {
        "even": runahead_s(cost, even),
        "equal_work": runahead_s(cost, equal),
        "best": runahead_s(cost, best),
        "gathered": gathered_s(cost, tokens, count),
        "gathered_causal": gathered_s(cost, tokens, count, causal=True),
        "alone": runahead_s(cost, [tokens]),
    }
    return {
        **{f"{name}_ms": 1000 * seconds for name, seconds in ttft_s.items()},
        "gain": ttft_s["gathered"] / ttft_s["best"],
        "gain_over_causal": ttft_s["gathered_causal"] / ttft_s["best"],
        "best_sends": traffic_tokens(best),
        "gathering_sends": gathered_tokens(tokens, count),
        "bounds": " ".join(str(bound) for bound in best),
    }


LENGTHS = (32_768, 131_072, 262_144, 524_288, 1_048_576)
"""Tokens of a prompt. The node was measured to 131,072; beyond, the fit is extrapolated."""
NODE = "a800-node"


def group(nodes: int, *, chunk_tokens: int | None = None, bandwidth_share: float = 1.0) -> CppGroup:
    """Nodes like the paper's, running LLaMA3-70B.

    Args:
        nodes: how many.
        chunk_tokens: of a chunk; None takes assumption B14.
        bandwidth_share: of the network, what is left for prefill beside transfers of KVCache.
    """
    latency = paper_node_latency()
    found = CppGroup.of(latency, nodes=nodes, chunk_tokens=chunk_tokens or int(assumption("B14").value or 0))
    link = LinkLatency(found.link.bytes_per_s * bandwidth_share, found.link.latency_s)
    return CppGroup(
        prefill=found.prefill, shape=found.shape, nodes=nodes, chunk_tokens=found.chunk_tokens, link=link
    )


def three_ways(
    lengths: Sequence[int] = LENGTHS,
    nodes: Sequence[int] = (1, 2, 4),
    bandwidth_shares: Sequence[float] = (1.0,),
) -> pd.DataFrame:
    """Every way to share a prefill over nodes.

    Returns:
        Rows of way, tokens, nodes, bandwidth_share, ttft_s, speed_up (over one node), network_gb, mfu.
    """
    rows: list[dict[str, Any]] = []
    for share in bandwidth_shares:
        for tokens in lengths:
            alone_s = shared_prefill(group(1), "CPP", tokens).seconds
            for count in nodes:
                for way in WAYS:
                    found = shared_prefill(group(count, bandwidth_share=share), way, tokens)
                    rows.append(
                        {
                            "way": way,
                            "tokens": tokens,
                            "nodes": count,
                            "bandwidth_share": share,
                            "ttft_s": found.seconds,
                            "speed_up": alone_s / found.seconds,
                            "network_gb": found.network_bytes / 1e9,
                            "mfu": found.mfu(hardware(NODE), count),
                        }
                    )
    return pd.DataFrame(rows)


def chunk_sweep() -> pd.DataFrame:
    """Speed-up of four nodes over one by chunk length, with and without a constant for each chunk.

    Returns:
        Rows of tokens, chunk_tokens, chunk_constant_ms, ttft_s, speed_up.
    """
    rows: list[dict[str, float]] = []
    for length in (32_768, 131_072, 1_048_576):
        alone_s = cpp_prefill_s(group(1), length)
        for constant_ms in (0.0, 10.0):
            for chunk in (512, 1024, 2048, 4096, 8192, 16_384, 32_768):
                plain = group(4, chunk_tokens=chunk)
                priced = CppGroup(
                    prefill=plain.prefill,
                    shape=plain.shape,
                    nodes=4,
                    chunk_tokens=chunk,
                    link=plain.link,
                    chunk_constant_s=constant_ms / 1000,
                )
                ttft_s = cpp_prefill_s(priced, length)
                rows.append(
                    {
                        "tokens": length,
                        "chunk_tokens": chunk,
                        "chunk_constant_ms": constant_ms,
                        "ttft_s": ttft_s,
                        "speed_up": alone_s / ttft_s,
                    }
                )
    return pd.DataFrame(rows)


def equal_time_sizes(whole: CppGroup, tokens: int, chunks: int) -> list[int]:
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


def equal_tokens_or_time() -> pd.DataFrame:
    """What shorter chunks at the end buy for a prompt of 128k tokens on four nodes.

    Returns:
        Rows of cut, first_tokens, last_tokens, longest_ms, ttft_s, ramp_percent (over an equal share of the work).
    """
    shared, tokens, nodes = group(4), 131_072, 4
    cuts = {"equal tokens": chunk_sizes(tokens, shared.chunk_tokens)}
    cuts["equal time"] = equal_time_sizes(shared, tokens, len(cuts["equal tokens"]))
    ideal_s = cpp_prefill_s(group(1), tokens) / nodes
    rows: list[dict[str, Any]] = []
    for name, sizes in cuts.items():
        ttft_s = cpp_prefill_s(shared, tokens, sizes=sizes)
        rows.append(
            {
                "cut": name,
                "first_tokens": sizes[0],
                "last_tokens": sizes[-1],
                "longest_ms": 1000 * max(chunk_seconds(shared, sizes)),
                "ttft_s": ttft_s,
                "ramp_percent": 100 * (ttft_s / ideal_s - 1),
            }
        )
    return pd.DataFrame(rows)


def recurrence_against_events(tokens: Sequence[int] = LENGTHS) -> float:
    """The largest relative difference between the recurrence and the event simulation, over all ends of chunks."""
    worst = 0.0
    for length in tokens:
        for count in (1, 2, 3, 4):
            shared = group(count, chunk_tokens=8192)
            expected = cpp_finish_s(shared, length)
            found = simulate_cpp(shared, chunk_sizes(length, shared.chunk_tokens))
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
    device: str = "cpu"
    dtype: str = "float32"
    backend: str = "dense"
    """Backend of the operators; the dense one compiles nothing, so the workers start quickly."""
    timeout_s: float = 600.0
    seed: int = 0


def measure_live(setting: Live) -> tuple[pd.DataFrame, Mapping[str, pd.DataFrame]]:
    """Prefill one prompt every way over 2 up to all processes.

    Returns:
        Rows of way, over, seconds, same_token, kv_difference, sent_bytes, predicted_bytes, overlap; and, of the
        prefills over all processes, the timeline of each way.

    Raises:
        ProcessDiedError: when a process dies or fails.
    """
    shape, name = model_shape(setting.model), f"random:{setting.model}"
    rng = np.random.default_rng(setting.seed)
    tokens = rng.integers(0, shape.vocabulary, setting.prompt_tokens).astype(np.int32)
    model = load_model(
        name, device=setting.device, dtype=setting.dtype, backend=setting.backend, seed=setting.seed
    )
    engine = PrefillEngine(model)
    engine.prefill(tokens[:8])  # the first one warms up
    alone = engine.prefill(tokens)
    rows: list[dict[str, Any]] = [{"way": "one process", "over": 1, "seconds": alone.seconds, "same_token": True}]
    charts: dict[str, pd.DataFrame] = {}
    with Crew(_spec(setting, name)) as crew:
        cpp_prefill(crew, tokens, chunk_tokens=setting.chunk_tokens)  # likewise
        for over in range(2, setting.processes + 1):
            bounds = even_bounds(len(tokens), over)
            hops = (over - 1) * len(tokens) * shape.width * shape.bytes_per_element
            sent = traffic_tokens(bounds) * shape.kv_bytes_per_token
            chunked = cpp_prefill(crew, tokens, chunk_tokens=setting.chunk_tokens, processes=over)
            chained = runahead_prefill(crew, tokens, bounds=bounds)
            for way, found, predicted in (("CPP", chunked, hops), ("KV-Runahead", chained, sent)):
                rows.append({"way": way, "over": over} | _live_row(found, alone.first_token, alone.kv, predicted))
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


def _spec(setting: Live, name: str) -> CrewSpec:
    return CrewSpec(
        model=name,
        processes=setting.processes,
        device=setting.device,
        dtype=setting.dtype,
        backend=setting.backend,
        seed=setting.seed,
        timeout_s=setting.timeout_s,
    )


def _live_row(found: Together, token: int, kv: KVSpan, predicted_bytes: int) -> dict[str, Any]:
    apart = [float((a - b.cpu()).abs().max()) for a, b in zip(found.kv, kv.layers, strict=True)]
    return {
        "seconds": found.seconds,
        "same_token": found.first_token == token,
        "kv_difference": max(apart),
        "sent_bytes": found.sent_bytes,
        "predicted_bytes": predicted_bytes,
        "overlap": overlap_share(found.shares),
    }
