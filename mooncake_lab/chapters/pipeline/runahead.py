"""KV-Runahead on A100s, modelled: even, equal-work and best slices beside gathering all KVCache everywhere."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from mooncake_lab.perf import Hardware, LinkLatency, ModelShape, hardware, model_shape
from mooncake_lab.perf.runahead import (
    Runahead,
    equal_work_bounds,
    even_bounds,
    gathered_s,
    gathered_tokens,
    runahead_s,
    traffic_tokens,
)
from mooncake_lab.perf.runahead_search import best_bounds

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
    efficiency: float = EFFICIENCY,
    attention_efficiency: float = EFFICIENCY,
) -> Runahead:
    """A layer of a model on a device that reaches these shares of its peak."""
    peak = device.flops_per_s()
    project = shape.width * (shape.query_width + 2 * shape.kv_width)
    return Runahead(
        layers=shape.layers,
        project_s_per_token=2 * project / (peak * efficiency),
        rest_s_per_token=2 * (shape.layer_parameters - project) / (peak * efficiency),
        pair_s=4 * shape.query_width / (peak * attention_efficiency),
        kv_bytes_per_token=shape.kv_bytes_per_token / shape.layers,
        link=LinkLatency(bytes_per_s, MESSAGE_S),
    )


def runahead_sweep(
    lengths: Sequence[int] = (1024, 2048, 4096, 8192, 12_288, 16_384),
    processes: Sequence[int] = (2, 4, 8),
    bandwidths: Sequence[float] = (NVLINK_BYTES_PER_S, SLOW_BYTES_PER_S),
    attention_efficiencies: Sequence[float] = (EFFICIENCY,),
    *,
    model: str = "llama-7b",
    grains: int = 64,
) -> pd.DataFrame:
    """Time to first token by slicing, over prompt length, GPUs, network and efficiency of attention.

    Returns:
        Rows of tokens, processes, gb_per_s, attention_efficiency; milliseconds of even, equal-work, best slices
        and of gathering (dense and causal); tokens sent a layer by both; the bounds of the best slices.
    """
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        for count in processes:
            for bandwidth in bandwidths:
                for share in attention_efficiencies:
                    cost = runahead_cost(
                        model_shape(model), hardware("a100"), bytes_per_s=bandwidth, attention_efficiency=share
                    )
                    setting = {"tokens": tokens, "processes": count, "gb_per_s": bandwidth / 1e9}
                    rows.append(setting | {"attention_efficiency": share} | _row(cost, tokens, count, grains))
    return pd.DataFrame(rows)


def _row(cost: Runahead, tokens: int, count: int, grains: int) -> dict[str, Any]:
    even, equal = even_bounds(tokens, count), equal_work_bounds(cost, tokens, count)
    grid = best_bounds(cost, tokens, count, grain_tokens=max(tokens // grains, 1))
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
