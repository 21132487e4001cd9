"""Capacity planning: what DRAM or SSD for KVCache a prefill node needs to reach which TTFT and hit rate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from mooncake_lab.core import TracedRequest
from mooncake_lab.experiments.experiment import vary
from mooncake_lab.metrics import prefill_gpu_s, tier_hit_rates, ttft_s
from mooncake_lab.perf import LinkLatency
from mooncake_lab.simulation import Cluster, ClusterSpec
from mooncake_lab.testbeds import paper_node_latency
from mooncake_lab.workload import Trace, load

DRAM_TOKENS: Final = (1_000_000, 3_000_000, 6_000_000, 12_000_000)
"""DRAM of a node without SSD; a node with SSD has the smallest of them."""
SSD_TOKENS: Final = (2_000_000, 11_000_000)
"""SSD beside the smallest DRAM: the node then holds as much as a node with more DRAM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """One trace on one cluster whose prefill nodes hold a given amount of KVCache in DRAM and on SSD."""

    dram_tokens: int = 3_000_000
    ssd_tokens: int = 0
    ssd_bytes_per_s: float
    """Read bandwidth of a node's SSDs. No edition states it, so it has no default."""
    workload: str = "conversation"
    prefill_nodes: int = 8
    decode_nodes: int = 8
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: TTFT, hit rates by tier, prefill GPU time a request, bytes of both tiers."""
        trace, requests = _arriving(self.workload, self.seed, self.first)
        model = replace(paper_node_latency(), ssd=LinkLatency(self.ssd_bytes_per_s))
        spec = ClusterSpec.disaggregated(
            prefill_nodes=self.prefill_nodes,
            decode_nodes=self.decode_nodes,
            cache_tokens=self.dram_tokens,
            ssd_tokens=self.ssd_tokens,
            block_size_tokens=trace.block_size_tokens,
        )
        log = Cluster(spec, model).run(requests)
        latencies = np.fromiter(ttft_s(log).values(), dtype=np.float64)
        kv_bytes = model.shape.kv_bytes_per_token
        hits = tier_hit_rates(log, kv_bytes)
        yield {
            "dram_bytes": self.dram_tokens * kv_bytes,
            "ssd_bytes": self.ssd_tokens * kv_bytes,
            "ttft_mean_s": float(latencies.mean()),
            "ttft_p90_s": float(np.percentile(latencies, 90)),
            "token_hit_rate": hits["dram"] + hits["ssd"],
            "dram_hit_rate": hits["dram"],
            "ssd_hit_rate": hits["ssd"],
            "prefill_gpu_s": prefill_gpu_s(log) / len(trace),
            "origin": trace.origin,
            "source": trace.source,
        }


def plan(base: Capacity) -> tuple[Capacity, ...]:
    """A planner's sweep: more DRAM; or little DRAM and SSDs of several sizes, a third to four times as fast."""
    little = replace(base, dram_tokens=DRAM_TOKENS[0])
    speeds = (base.ssd_bytes_per_s / 3, base.ssd_bytes_per_s * 4)
    return (
        *vary(base, dram_tokens=DRAM_TOKENS),
        *vary(little, ssd_tokens=SSD_TOKENS),
        *vary(replace(little, ssd_tokens=SSD_TOKENS[0]), ssd_bytes_per_s=speeds),
    )


@lru_cache(maxsize=2)
def _arriving(workload: str, seed: int, first: int | None) -> tuple[Trace, tuple[TracedRequest, ...]]:
    trace = load(workload, seed=seed)
    trace = trace if first is None else trace.head(first)
    return trace, tuple(trace.requests())
