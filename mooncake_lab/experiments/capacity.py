"""Capacity planning: what DRAM or SSD for KVCache a prefill node needs to reach which TTFT and hit rate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mooncake_lab.experiments.paper_node import paper_node_latency
from mooncake_lab.metrics import prefill_gpu_s, tier_hit_rates, ttft_s
from mooncake_lab.perf import LinkLatency
from mooncake_lab.simulation import Cluster, ClusterSpec
from mooncake_lab.workload import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """One trace on one cluster whose prefill nodes hold so much KVCache in DRAM and on SSD."""

    dram_tokens: int = 3_000_000
    ssd_tokens: int = 0
    ssd_bytes_per_s: float
    """Reading KVCache from a node's SSDs. No edition states it, so that whoever asks has to."""
    workload: str = "conversation"
    prefill_nodes: int = 8
    decode_nodes: int = 8
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: TTFT, hit rates by tier, prefill GPU time a request, bytes of both tiers."""
        trace = load(self.workload, seed=self.seed)
        trace = trace if self.first is None else trace.head(self.first)
        model = replace(paper_node_latency(), ssd=LinkLatency(self.ssd_bytes_per_s))
        spec = ClusterSpec(
            prefill_nodes=self.prefill_nodes,
            decode_nodes=self.decode_nodes,
            cache_tokens=self.dram_tokens,
            ssd_tokens=self.ssd_tokens,
            block_size_tokens=trace.block_size_tokens,
        )
        log = Cluster(spec, model).run(trace.requests())
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
