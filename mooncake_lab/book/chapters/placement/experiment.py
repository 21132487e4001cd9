"""Chapter 09: placement policies on whole traces, and the caches and nodes that they need."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from mooncake_lab import conductor
from mooncake_lab.book.chapters.placement.readings import (
    AloneEstimator,
    DecodeChoice,
    Transfers,
    with_decode_choice,
)
from mooncake_lab.book.experiments.cache import named_files
from mooncake_lab.book.experiments.experiment import vary
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.book.testbeds.arxiv import TestbedName, latency_of
from mooncake_lab.book.testbeds.nodes import device_tokens, node_latency
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import Placed, TracedRequest, keyed_uniform, sum_in_order
from mooncake_lab.metrics import prefill_gpu_s, replicas_at, reused_share, tier_hit_rates, ttft_s
from mooncake_lab.perf import LatencyModel, LinkLatency, as_told, column_sizes, hardware
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import Trace, check_workload, load, load_or_read, with_spread_arrivals

Array = npt.NDArray[np.float64]
PolicyName = Literal["kvcache_centric", "cache_aware", "load_balance", "random", "longest_prefix"]

FIRST_REQUESTS: Final = {"smoke": 400, "classroom": None, "full": None, "gpu": None}
"""How many requests of each trace a scale replays; None is all of them."""
SWEPT_REQUESTS: Final = {"smoke": 400, "classroom": 6000, "full": None, "gpu": None}
"""The same where one knob after the other is turned."""
PAPER_NODE: Final = "a800-node"
"""The node of both editions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReplay:
    """One trace on one disaggregated cluster under one placement policy."""

    workload: str = "conversation"
    """The name of a workload, or the path of a trace."""
    node: str = PAPER_NODE
    """What each node is: the paper's, or another one scaled from it (`testbeds.nodes.node_latency`)."""
    testbed: TestbedName = "fast"
    """Whose nodes of that kind: those of FAST'25, or of the arXiv edition, fitted to its Figs. 8 and 13."""
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
    first_shown_by: Literal["decode", "prefill"] = "decode"
    """Which node shows the first token, so that TTFT ends there (assumption B18)."""
    pack_tokens: int = 1
    """Tokens up to which a prefill node packs waiting prompts; with 1, it computes each alone (assumption B56)."""
    overtaking: bool = False
    """Whether a prompt whose prefix is on its way lets those behind it start (assumption B51)."""
    eviction: str = "lru"
    speed: float = 1.0
    """Speed of the replay relative to the recording."""
    spread: bool = False
    """Whether arrivals are spread over the ticks of their time stamps (assumption B09)."""
    one_token: bool = False
    """Force every answer to one token, as in FAST'25 §5.3.2."""
    belief_error: float = 0.0
    """The Conductor's prefill estimates err by up to this share."""
    offline_tests: int = 0
    """From how many offline tests, each off by up to 5 %, it has learned its estimates (assumption B03); with 0 it
    knows them."""
    transfers: Transfers = "shared"
    """How it estimates the time of a transfer (assumption B02)."""
    decode_choice: DecodeChoice = "least_tbt"
    """How a decode instance is selected (assumption B05)."""
    fetch_timeout_s: float = 30.0
    """How long a prompt waits for a prefix from another node (assumption B57)."""
    first: int | None = None
    seed: int = 0
    """Seed of random placement, spread arrivals, estimate errors, and the twin where there is no released file."""
    block_size_tokens: int = 0
    """Tokens per block of a trace file that does not say so; with 0 there are 512."""

    def __post_init__(self) -> None:
        check_workload(self.workload)
        _node(self)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: TTFT as a box plot draws it, hit rate, prefill GPU time, what was fetched."""
        shown = (self.workload, self.first, self.seed, self.speed, self.spread, self.one_token)
        trace, requests = traffic(*shown, self.block_size_tokens)
        log = _cluster(self, trace.block_size_tokens).run(requests)
        latencies = np.fromiter(ttft_s(log).values(), dtype=np.float64)
        placed = [record for record in log if isinstance(record, Placed)]
        yield {
            **box(latencies),
            "p90_s": float(np.percentile(latencies, 90)),
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
    prefill_nodes: int = 8
    """This and what follows as of `PlacementReplay`."""
    decode_nodes: int = 8
    speed: float = 1.0
    spread: bool = False
    offline_tests: int = 0
    transfers: Transfers = "shared"
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a rank and sample; blocks rank by the sum of their replicas over all samples, as in §5.3.3."""
        replay = PlacementReplay(
            workload=self.workload,
            threshold=self.threshold,
            cache_tokens=self.cache_tokens,
            eviction=self.eviction,
            prefill_nodes=self.prefill_nodes,
            decode_nodes=self.decode_nodes,
            offline_tests=self.offline_tests,
            transfers=self.transfers,
            first=self.first,
            seed=self.seed,
        )
        trace, requests = traffic(self.workload, self.first, self.seed, self.speed, self.spread)
        ends_s = float(trace.arrival_s[-1]) / self.speed
        log = _cluster(replay, trace.block_size_tokens).run(requests, until_s=ends_s)
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
                told = {"requests": len(trace), "origin": trace.origin}
                yield {"rank": rank, "at_s": at_s, "replicas": replicas, **told}


def one_knob_at_a_time(base: PlacementReplay) -> dict[str, PlacementReplay]:
    """The same replay with one assumption changed at a time, by what was changed."""
    return {
        "as assumed": base,
        "arrivals spread over the ticks of their time stamps (B09)": replace(base, spread=True),
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
    policy: conductor.PlacementPolicy, *, first: int = 1000, prefill_nodes: int = 6, whole: Trace | None = None
) -> float:
    """Mean TTFT of the first requests of a trace, conversation by default, under any policy, such as one's own."""
    trace = (whole or load("conversation")).head(first)
    spec = ClusterSpec.disaggregated(
        prefill_nodes=prefill_nodes, placement=policy, block_size_tokens=trace.block_size_tokens
    )
    latencies = ttft_s(Cluster(spec, paper_node_latency()).run(trace.requests())).values()
    return sum_in_order(latencies) / len(latencies)


def box(values: Array) -> dict[str, float]:
    """The parts of a box plot, in seconds: whiskers reach to the last value within 1.5 times the box."""
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


def traffic(
    workload: str,
    first: int | None = None,
    seed: int = 0,
    speed: float = 1.0,
    spread: bool = False,
    one_token: bool = False,
    block_size_tokens: int = 0,
) -> tuple[Trace, tuple[TracedRequest, ...]]:
    """A trace and its requests as they arrive; those that share a tick keep their order.

    Made once for all clusters that serve them. A file is read again when its contents change.
    """
    digests = named_files([workload]).values()
    return _traffic(workload, first, seed, speed, spread, one_token, block_size_tokens, *digests)


@lru_cache(maxsize=2)
def _traffic(
    workload: str,
    first: int | None,
    seed: int,
    speed: float,
    spread: bool,
    one_token: bool,
    block_size_tokens: int,
    *sha256: str,
) -> tuple[Trace, tuple[TracedRequest, ...]]:
    whole = _read(workload, seed, block_size_tokens, *sha256)
    arriving_at = with_spread_arrivals(whole, seed=seed) if spread else whole
    trace = arriving_at if first is None else arriving_at.head(first)
    arriving = replace(trace, arrival_s=trace.arrival_s / speed).requests()
    return trace, tuple(replace(traced, output_tokens=1) if one_token else traced for traced in arriving)


@cache
def _read(workload: str, seed: int, block_size_tokens: int, *_sha256: str) -> Trace:
    return load_or_read(workload, seed=seed, block_size_tokens=block_size_tokens or None)


def _node(replay: PlacementReplay) -> LatencyModel:
    """The latency model of each node.

    Raises:
        ValueError: when there is no such node, or the testbed has no nodes of this kind.
    """
    if replay.testbed == "fast":
        return node_latency(replay.node)
    if replay.node != PAPER_NODE:
        raise ValueError(f"the arXiv testbed has nodes of the kind {PAPER_NODE!r} only, not {replay.node!r}")
    return latency_of(replay.testbed)


def _cluster(replay: PlacementReplay, block_size_tokens: int) -> Cluster:
    model = _node(replay)
    policies: dict[str, conductor.PlacementPolicy] = {
        "kvcache_centric": conductor.KVCacheCentric(replay.threshold, replay.edition),
        "load_balance": conductor.LoadBalance(replay.load),
    }
    placement = policies.get(replay.policy) or conductor.named_placement(replay.policy, replay.seed)
    spec = ClusterSpec.disaggregated(
        prefill_nodes=replay.prefill_nodes,
        decode_nodes=replay.decode_nodes,
        device_tokens=device_tokens(hardware(replay.node), model.shape),
        cache_tokens=replay.cache_tokens,
        shared_cache=replay.shared_cache,
        first_shown_by=replay.first_shown_by,
        pack_tokens=replay.pack_tokens,
        overtaking=replay.overtaking,
        fetch_timeout_s=replay.fetch_timeout_s,
        eviction=replay.eviction,
        block_size_tokens=block_size_tokens,
        placement=with_decode_choice(placement, replay.decode_choice),
    )
    estimate = estimator(model, replay.transfers, replay.offline_tests, replay.seed)
    if replay.belief_error and not replay.offline_tests:
        estimate = NoisyEstimator(model, relative_error=replay.belief_error, seed=replay.seed)
    return Cluster(spec, model, estimate=estimate)


def estimator(model: LatencyModel, transfers: Transfers, offline_tests: int, seed: int) -> conductor.Estimator:
    """What the Conductor believes: the truth, or one of the readings of B02 and B03."""
    if offline_tests:
        return learned(model, offline_tests, seed)
    return conductor.LatencyEstimator(model) if transfers == "shared" else AloneEstimator(model)


_LEAST_INDEPENDENCE: Final = 1e-7
"""The least independence of the columns; below it, nine digits do not determine the coefficients."""


@dataclass(frozen=True, slots=True)
class NoisyEstimator(conductor.LatencyEstimator):
    """Prefill estimates that err by a factor uniform in 1 ± `relative_error`.

    The draw depends on the seed and the request alone, so that decisions replay.
    """

    relative_error: float = 0.05
    seed: int = 0

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """The estimate times the request's error."""
        error = self.relative_error * (2 * keyed_uniform(self.seed, request_id) - 1)
        return (1 + error) * conductor.LatencyEstimator.prefill_s(self, request_id, input_tokens, reused_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolynomialEstimator(conductor.LatencyEstimator):
    """Prefill times by polynomial regression on prompt and prefix length; other times from the latency model.

    The paper says no more than "polynomial regression model fitted with offline test data"; the degree is ours
    (assumption B03). Unlike a `LatencyModel`, the polynomial has no physical meaning outside its data. A negative
    estimate is set to zero, and the errors of the fit are kept with it.
    """

    degree: int
    scale_tokens: float
    """Lengths are divided by this before they are raised to powers."""
    coefficients: tuple[float, ...]
    """One for each `n^i p^j` with `i + j <= degree`, in the order of `powers`."""
    relative_errors: tuple[float, ...]
    """`(predicted - measured) / measured` of each point it was fitted to."""

    @classmethod
    def fit(
        cls, model: LatencyModel, tokens: Array, reused_tokens: Array, measured_s: Array, *, degree: int = 2
    ) -> "PolynomialEstimator":
        """The polynomial with the least sum of squared relative errors at points of shape (points,).

        Raises:
            ValueError: when the points do not determine the polynomial.
        """
        scale = float(tokens.max())
        terms = [(tokens / scale) ** i * (reused_tokens / scale) ** j for i, j in powers(degree)]
        columns = np.stack(terms, axis=1)
        relative = columns / measured_s[:, None]
        size = column_sizes(relative)
        ones = np.ones(len(measured_s))
        solution, _, rank, _ = np.linalg.lstsq(relative / size, ones, rcond=_LEAST_INDEPENDENCE)
        if rank < len(terms):
            raise ValueError(
                f"{len(tokens)} points of rank {rank} for the {len(terms)} coefficients of degree {degree};"
                " measure more lengths and prefixes, or lower the degree"
            )
        found = as_told(solution.astype(np.float64) / size)
        return cls(
            model=model,
            degree=degree,
            scale_tokens=scale,
            coefficients=tuple(found.tolist()),
            relative_errors=tuple((columns @ found / measured_s - 1).tolist()),
        )

    @property
    def max_relative_error(self) -> float:
        """The largest relative error at a point of the fit."""
        return max(map(abs, self.relative_errors))

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """The value of the polynomial, or 0 where it is negative."""
        del request_id
        n, p = input_tokens / self.scale_tokens, reused_tokens / self.scale_tokens
        terms = zip(self.coefficients, powers(self.degree), strict=True)
        return max(0.0, sum_in_order(c * n**i * p**j for c, (i, j) in terms))


def powers(degree: int) -> Iterator[tuple[int, int]]:
    """The exponents of prompt and prefix length of all terms up to a degree."""
    return ((i, j) for i in range(degree + 1) for j in range(degree + 1 - i))


def learned(truth: LatencyModel, tests: int, seed: int) -> PolynomialEstimator:
    """What regression makes of offline tests of a node, off by up to 5 %: to 128k tokens, any share reused."""
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.uniform(np.log(256), np.log(131_072), tests)).round()
    reused = (rng.uniform(0, 0.95, tests) * tokens).round()
    exact = conductor.LatencyEstimator(truth)
    true_s = np.array([exact.prefill_s(0, int(n), int(p)) for n, p in zip(tokens, reused, strict=True)])
    return PolynomialEstimator.fit(truth, tokens, reused, true_s * rng.uniform(0.95, 1.05, tests))


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
        trace, requests = traffic(self.workload, self.first, self.seed)
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
            "ttft_mean_s": float(latencies.mean()),
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
