"""Chapter 09: placement policies on whole traces, and the caches and nodes that they need."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from mooncake_lab.chapters.placement.estimators import NoisyEstimator, PolynomialEstimator
from mooncake_lab.conductor import (
    Estimator,
    KVCacheCentric,
    LatencyEstimator,
    LoadBalance,
    PlacementPolicy,
    named_placement,
)
from mooncake_lab.core import Placed, TracedRequest
from mooncake_lab.experiments.cache import named_files
from mooncake_lab.experiments.experiment import vary
from mooncake_lab.metrics import prefill_gpu_s, replicas_at, reused_share, tier_hit_rates, ttft_s
from mooncake_lab.perf import LinkLatency, hardware
from mooncake_lab.simulation import Cluster, ClusterSpec
from mooncake_lab.testbeds import paper_node_latency
from mooncake_lab.testbeds.nodes import device_tokens, node_latency
from mooncake_lab.workload import Trace, check_workload, load, load_or_read

PolicyName = Literal["kvcache_centric", "cache_aware", "load_balance", "random", "longest_prefix"]

FIRST_REQUESTS: Final[Mapping[str, int | None]] = MappingProxyType(
    {"smoke": 400, "classroom": None, "full": None, "gpu": None}
)
"""How many requests of each trace a scale replays; None is all of them."""
SWEPT_REQUESTS: Final[Mapping[str, int | None]] = MappingProxyType(
    {"smoke": 400, "classroom": 6000, "full": None, "gpu": None}
)
"""The same where one knob after the other is turned."""


_ARRIVE: Final = ("workload", "speed", "spread_s", "one_token", "first", "seed")
"""What of a `PlacementReplay` decides what arrives, and when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReplay:
    """One trace on one disaggregated cluster under one placement policy.

    Raises:
        ValueError: when there is no such workload, file or node.
    """

    workload: str = "conversation"
    """The name of a workload, or the path of a trace."""
    node: str = "a800-node"
    """What each node is: the paper's, or another one scaled from it (`other_nodes`)."""
    policy: PolicyName = "kvcache_centric"
    load: Literal["backlog_s", "queued_requests", "assigned_requests"] = "backlog_s"
    """What load balancing balances (assumption B04)."""
    threshold: float = 1.5
    """kvcache_balancing_threshold (assumption B01)."""
    edition: Literal["fast", "arxiv"] = "fast"
    prefill_nodes: int = 8
    decode_nodes: int = 8
    cache_tokens: int = 3_000_000
    """KVCache each prefill node holds in DRAM (assumption B08)."""
    shared_cache: bool = False
    overtaking: bool = False
    """Whether a prompt whose prefix is on its way lets those behind it start (assumption B51)."""
    eviction: str = "lru"
    speed: float = 1.0
    """Speed of the replay relative to the recording."""
    spread_s: float = 0.0
    """Seconds after their tick over which arrivals are spread evenly (assumption B09)."""
    one_token: bool = False
    """Force every answer to one token, as in FAST'25 §5.3.2."""
    belief_error: float = 0.0
    """The Conductor's prefill estimates err by up to this share."""
    offline_tests: int = 0
    """From how many offline tests, each off by up to 5 %, it has learned its estimates (assumption B03); with 0 it
    knows them."""
    first: int | None = None
    seed: int = 0
    """Seed of random placement, spread arrivals, estimate errors, and the twin where there is no released file."""

    def __post_init__(self) -> None:
        check_workload(self.workload)
        node_latency(self.node)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: TTFT as a box plot draws it, hit rate, prefill GPU time, what was fetched."""
        trace = _trace(self)
        requests = _requests(self)
        log = _cluster(self, trace.block_size_tokens).run(requests)
        latencies = np.fromiter(ttft_s(log).values(), dtype=np.float64)
        placed = [record for record in log if isinstance(record, Placed)]
        yield {
            **box(latencies),
            "p90_s": float(np.percentile(latencies, 90)),
            "within_30_s": float((latencies <= 30.0).mean()),
            "token_hit_rate": reused_share(log),
            "prefill_gpu_s": prefill_gpu_s(log) / len(requests),
            "fetching": sum(record.fetched_tokens > 0 for record in placed) / len(placed),
            "fetched_tokens": sum(record.fetched_tokens for record in placed),
            "requests": len(requests),
            "origin": trace.origin,
            "source": trace.source,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """On how many nodes the block of a popularity rank is, over time (FAST'25 Fig. 11)."""

    workload: str = "conversation"
    ranks: tuple[int, ...] = (10, 100, 1000, 10_000)
    every_s: float = 30.0
    threshold: float = 1.5
    cache_tokens: int = 3_000_000
    eviction: str = "lru"
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a rank and sample; blocks rank by the sum of their replicas over all samples, as in §5.3.3."""
        replay = PlacementReplay(
            workload=self.workload,
            threshold=self.threshold,
            cache_tokens=self.cache_tokens,
            eviction=self.eviction,
            first=self.first,
            seed=self.seed,
        )
        trace = _trace(replay)
        ends_s = float(trace.arrival_s[-1])
        log = _cluster(replay, trace.block_size_tokens).run(trace.requests(), until_s=ends_s)
        samples: list[tuple[float, npt.NDArray[np.int8]]] = []
        ids = np.unique(trace.block_ids.view(np.uint64))
        for at_s, held in replicas_at(log, np.arange(0.0, ends_s, self.every_s).tolist()):
            counts = np.zeros(len(ids), dtype=np.int8)
            named = np.searchsorted(ids, np.fromiter(held.keys(), np.uint64, len(held)))
            counts[named] = np.fromiter(held.values(), np.int8, len(held))
            samples.append((at_s, counts))
        total = np.sum([counts for _, counts in samples], axis=0, dtype=np.int64)
        order = np.argsort(-total, kind="stable")
        for rank in self.ranks:
            for at_s, counts in samples:
                replicas = counts[order[rank - 1]] if rank <= len(ids) else 0
                yield {"rank": rank, "at_s": at_s, "replicas": replicas, "origin": trace.origin}


def one_knob_at_a_time(base: PlacementReplay) -> dict[str, PlacementReplay]:
    """The same replay with one assumption changed at a time, by what was changed."""
    return {
        "as assumed": base,
        "arrivals spread over the 3 s after their time stamp (B09)": replace(base, spread_s=3.0),
        "balancing threshold of 4 (B01)": replace(base, threshold=4.0),
        "Algorithm 1 of the arXiv edition": replace(base, edition="arxiv"),
        "estimates wrong by up to 50 %": replace(base, belief_error=0.5),
        "estimates learned from 50 offline tests (B03)": replace(base, offline_tests=50),
        "later prompts may overtake one that waits for its prefix (B51)": replace(base, overtaking=True),
        "LFU in place of LRU in the caches": replace(base, eviction="lfu"),
        "caches of 1 million tokens (B08)": replace(base, cache_tokens=1_000_000),
        "6 of 16 nodes prefill (B06)": replace(base, prefill_nodes=6, decode_nodes=10),
    }


def mean_ttft_s(
    policy: PlacementPolicy, *, first: int = 1000, prefill_nodes: int = 6, whole: Trace | None = None
) -> float:
    """Mean TTFT of the first requests of a trace, conversation by default, under any policy, such as one's own."""
    trace = (whole or load("conversation")).head(first)
    spec = ClusterSpec.disaggregated(
        prefill_nodes=prefill_nodes, placement=policy, block_size_tokens=trace.block_size_tokens
    )
    latencies = ttft_s(Cluster(spec, paper_node_latency()).run(trace.requests())).values()
    return sum(latencies) / len(latencies)


def box(values: npt.NDArray[np.float64]) -> dict[str, float]:
    """The parts of a box plot, in seconds: whiskers reach to the last value within 1.5 times the box.

    Args:
        values: shape (n,), at least one.
    """
    low, median, high = np.percentile(values, [25, 50, 75])
    reach = 1.5 * (high - low)
    inside = values[(values >= low - reach) & (values <= high + reach)]
    return {
        "mean": float(values.mean()),
        "q1": float(low),
        "median": float(median),
        "q3": float(high),
        "whisker_low": float(inside.min()),
        "whisker_high": float(inside.max()),
    }


def _trace(replay: PlacementReplay) -> Trace:
    trace = _whole(replay.workload, replay.seed)
    return trace if replay.first is None else trace.head(replay.first)


def _whole(workload: str, seed: int) -> Trace:
    return _read(workload, seed, *named_files([workload]).values())


@cache
def _read(workload: str, seed: int, *_sha256: str) -> Trace:
    return load_or_read(workload, seed=seed)


def _requests(replay: PlacementReplay) -> tuple[TracedRequest, ...]:
    """The trace as the experiment wants it to arrive; those that share a tick keep their order."""
    alike = PlacementReplay(**{name: getattr(replay, name) for name in _ARRIVE})
    return _arriving(alike, *named_files([replay.workload]).values())


@lru_cache(maxsize=2)
def _arriving(replay: PlacementReplay, *_sha256: str) -> tuple[TracedRequest, ...]:
    """Made once for all clusters that serve it."""
    trace = _trace(replay)
    arrival_s = trace.arrival_s / replay.speed
    if replay.spread_s:
        shifts_s = np.random.default_rng(replay.seed).uniform(0, replay.spread_s, len(trace))
        arrival_s = np.sort(arrival_s + shifts_s)
    arriving = replace(trace, arrival_s=arrival_s).requests()
    return tuple(replace(traced, output_tokens=1) if replay.one_token else traced for traced in arriving)


def _cluster(replay: PlacementReplay, block_size_tokens: int) -> Cluster:
    model = node_latency(replay.node)
    spec = ClusterSpec.disaggregated(
        prefill_nodes=replay.prefill_nodes,
        decode_nodes=replay.decode_nodes,
        decode_tokens=device_tokens(hardware(replay.node), model.shape),
        cache_tokens=replay.cache_tokens,
        shared_cache=replay.shared_cache,
        overtaking=replay.overtaking,
        eviction=replay.eviction,
        block_size_tokens=block_size_tokens,
        placement=_policy(replay),
    )
    estimate: Estimator = LatencyEstimator(model)
    if replay.offline_tests:
        estimate = learned(estimate, replay.offline_tests, replay.seed)
    if replay.belief_error:
        estimate = NoisyEstimator(estimate, replay.belief_error, replay.seed)
    return Cluster(spec, model, estimate)


def learned(truth: Estimator, tests: int, seed: int) -> PolynomialEstimator:
    """What regression makes of offline tests of a node: lengths to 128k tokens, any share of them reused.

    Args:
        truth: how long a prefill takes, and all that is not learned.
        tests: how many prefills were timed, each with an error of up to 5 %.
        seed: of lengths, shares and errors.
    """
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.uniform(np.log(256), np.log(131_072), tests)).round()
    reused = (rng.uniform(0, 0.95, tests) * tokens).round()
    true_s = np.array([truth.prefill_s(0, int(n), int(p)) for n, p in zip(tokens, reused, strict=True)])
    return PolynomialEstimator.fit(truth, tokens, reused, true_s * rng.uniform(0.95, 1.05, tests))


def _policy(replay: PlacementReplay) -> PlacementPolicy:
    if replay.policy == "kvcache_centric":
        return KVCacheCentric(replay.threshold, replay.edition)
    if replay.policy == "load_balance":
        return LoadBalance(replay.load)
    return named_placement(replay.policy, replay.seed)


DRAM_TOKENS: Final = (1_000_000, 3_000_000, 6_000_000, 12_000_000)
"""DRAM of a node without SSD; a node with SSD has the smallest of them."""
SSD_TOKENS: Final = (2_000_000, 11_000_000)
"""SSD beside the smallest DRAM: the node then holds as much as a node with more DRAM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCapacity:
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
        trace, requests = _slice(self.workload, self.seed, self.first)
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


def plan(base: ClusterCapacity) -> tuple[ClusterCapacity, ...]:
    """A planner's sweep: more DRAM; or little DRAM and SSDs of several sizes, a third to four times as fast."""
    little = replace(base, dram_tokens=DRAM_TOKENS[0])
    speeds = (base.ssd_bytes_per_s / 3, base.ssd_bytes_per_s * 4)
    return (
        *vary(base, dram_tokens=DRAM_TOKENS),
        *vary(little, ssd_tokens=SSD_TOKENS),
        *vary(replace(little, ssd_tokens=SSD_TOKENS[0]), ssd_bytes_per_s=speeds),
    )


@lru_cache(maxsize=2)
def _slice(workload: str, seed: int, first: int | None) -> tuple[Trace, tuple[TracedRequest, ...]]:
    trace = load(workload, seed=seed)
    trace = trace if first is None else trace.head(first)
    return trace, tuple(trace.requests())
