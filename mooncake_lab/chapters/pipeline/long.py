"""Prompts of 32k to 1M tokens over one to four nodes: chunked pipelines beside tensor and sequence parallelism."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

from mooncake_lab.paper import assumption
from mooncake_lab.perf import (
    CppGroup,
    LinkLatency,
    chunk_seconds,
    chunk_sizes,
    cpp_finish_s,
    cpp_prefill_s,
    hardware,
)
from mooncake_lab.perf.pipeline_rivals import WAYS, shared_prefill
from mooncake_lab.simulation import simulate_cpp
from mooncake_lab.testbeds import paper_node_latency

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


def chunk_sweep(
    chunks: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16_384, 32_768),
    tokens: Sequence[int] = (32_768, 131_072, 1_048_576),
    nodes: int = 4,
    constants_ms: Sequence[float] = (0.0, 10.0),
) -> pd.DataFrame:
    """Speed-up over one node by chunk length, with and without a constant for each chunk.

    Returns:
        Rows of tokens, chunk_tokens, chunk_constant_ms, ttft_s, speed_up.
    """
    rows: list[dict[str, float]] = []
    for length in tokens:
        alone_s = cpp_prefill_s(group(1), length)
        for constant_ms in constants_ms:
            for chunk in chunks:
                plain = group(nodes, chunk_tokens=chunk)
                priced = CppGroup(
                    prefill=plain.prefill,
                    shape=plain.shape,
                    nodes=nodes,
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


def equal_tokens_or_time(tokens: int = 131_072, nodes: int = 4) -> pd.DataFrame:
    """What shorter chunks at the end buy.

    Returns:
        Rows of cut, first_tokens, last_tokens, longest_ms, ttft_s, ramp_percent (over an equal share of the work).
    """
    shared = group(nodes)
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


def recurrence_against_events(tokens: Sequence[int] = LENGTHS, nodes: Sequence[int] = (1, 2, 3, 4)) -> float:
    """The largest relative difference between the recurrence and the event simulation, over all ends of chunks."""
    worst = 0.0
    for length in tokens:
        for count in nodes:
            shared = group(count, chunk_tokens=8192)
            expected = cpp_finish_s(shared, length)
            found = simulate_cpp(shared, chunk_sizes(length, shared.chunk_tokens))
            for ours, theirs in zip(found, expected, strict=True):
                worst = max(worst, *(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)))
    return worst
