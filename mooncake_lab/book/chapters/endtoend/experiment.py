"""Chapter 10: Mooncake and vLLM on whole traces, and a worked example."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab import metrics
from mooncake_lab.batching import VLLM, BatchingPolicy, VLLMChunked, VLLMToday
from mooncake_lab.book.chapters.placement.experiment import estimator
from mooncake_lab.book.chapters.placement.readings import DecodeChoice, Transfers, with_decode_choice
from mooncake_lab.book.experiments import whole_trace
from mooncake_lab.book.testbeds.arxiv import TestbedName, latency_of
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import KVCacheCentric, PlacementPolicy, named_placement
from mooncake_lab.conductor.placement import FewestRequests
from mooncake_lab.core import SLO, Record, Request, TracedRequest
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import Trace, with_spread_arrivals

PROMPT_TOKENS = 512
ARRIVALS_S = (0.0, 1.15, 2.45, 2.45)
ANSWER_TOKENS = 6


def round_numbers() -> LatencyModel:
    """A second a prompt, a tenth of a second a step whatever the batch, and links that take no time."""
    prefill = PrefillLatency(constant_s=0.0, per_token_s=1 / PROMPT_TOKENS, per_token_squared_s=0.0)
    decode = DecodeLatency(0.1, 0.0, 0.0)
    instant = LinkLatency(1e18)
    return LatencyModel(
        name="one second a prompt, a tenth a step",
        shape=model_shape("llama3-70b"),
        prefill=prefill,
        decode=decode,
        hybrid=HybridLatency.of(prefill, decode),
        transfer=instant,
        dram=instant,
    )


def coupled_log(nodes: int = 1) -> list[Record]:
    """The four on instances that do both stages, prompts first."""
    return Cluster(ClusterSpec.coupled(nodes=nodes, placement=FewestRequests()), round_numbers()).run(_four())


def split_log() -> list[Record]:
    """The four on a prefill and a decode node."""
    return Cluster(ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1), round_numbers()).run(_four())


def longest_gaps_s(log: Iterable[Record]) -> list[float]:
    """The longest gap between two tokens of each request, in order of id, to the millisecond."""
    found = dict(metrics.token_times_s(log))
    return [round(float(np.diff(found[i]).max()), 3) for i in sorted(found)]


def _four() -> list[TracedRequest]:
    return [
        TracedRequest(
            Request(id=i, arrival_s=at_s, input_tokens=PROMPT_TOKENS, block_keys=(i,)), output_tokens=ANSWER_TOKENS
        )
        for i, at_s in enumerate(ARRIVALS_S)
    ]


SystemName = Literal["mooncake", "vllm", "vllm_prefix", "vllm_chunked", "vllm_today"]
RouterName = Literal["fewest_requests", "least_tokens", "round_robin", "load_balance", "random", "cache_aware"]
"""Names of placement policies; only the last knows what instances cache, so its system must cache prefixes."""

FIRST_REQUESTS: Final = {"smoke": 200, "classroom": None, "full": None, "gpu": None}
"""How many requests of each trace a scale replays; None is all of them."""
SEARCHED_REQUESTS: Final = {"smoke": 200, "classroom": 4000, "full": None, "gpu": None}
"""The same where the highest rate is searched, which takes many replays."""
LIMITS_MS: Final = (100, 200, 300)
"""The three TBT limits of FAST'25 §5.1."""
WITHIN_MS: Final = (200, 300, 500)
"""Further limits at which arXiv Fig. 13 shows the share of requests within TBT."""
TBT_GRID_MS: Final = tuple(float(x) for x in np.geomspace(25, 1000, 81).round(2))
"""Where TBT distributions are recorded, as wide as FAST'25 Figs. 1, 6 and 7."""
TTFT_GRID_S: Final = tuple(float(x) for x in np.geomspace(0.1, 100, 61).round(4))
"""Where TTFT distributions are recorded (arXiv Fig. 13)."""
LARGE_CHUNK_TOKENS: Final = 2048
"""The tokens of an iteration of chunked prefill that the jump of the paper's curves implies, at about 300 ms."""
TODAY_CHUNK_TOKENS: Final = 2048
"""Tokens per iteration that the server of vLLM V1 takes by default on an A100."""
FEW_GAPS: Final = 10
"""Up to so many tokens an answer has fewer than ten gaps, and their longest tenth is less than one (B17)."""
VLLM_BLOCK_TOKENS: Final = 16
"""vLLM's default KVCache block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEnd:
    """One trace served by one system, from arrival to last token."""

    workload: str = "conversation"
    system: SystemName = "mooncake"
    prefill_nodes: int = 8
    """Mooncake's split (assumption B06); vLLM has as many instances as both together."""
    decode_nodes: int = 8
    testbed: TestbedName = "fast"
    """Whose nodes: those of FAST'25, or of the arXiv edition as they were fitted to its Figs. 8 and 13."""
    host_s: float = 0.0
    """What the host adds to a decode step for each request beyond `host_free`, or 0 (assumption B37)."""
    host_free: float = 0.0
    chunk_tokens: int = 512
    """Tokens per iteration of chunked prefill (assumption B16)."""
    pack_tokens: int = 1
    """Tokens up to which a prefill node packs waiting prompts; with 1, it computes each alone (assumption B56)."""
    hash_s_per_token: float = 0.0
    """With prefix caching, what hashing a token costs vLLM, each time it does (assumption B38)."""
    router: RouterName = "fewest_requests"
    """What spreads requests over vLLM instances (assumption B39)."""
    cache_tokens: int = 3_000_000
    """KVCache in the DRAM of a prefill node of Mooncake (assumption B08)."""
    first_shown_by: Literal["decode", "prefill"] = "decode"
    """Which node of Mooncake shows the first token, so that TTFT ends there (assumption B18)."""
    device_tokens: int = 1_330_000
    """KVCache in the GPU memory of a node that decodes (assumption B15)."""
    threshold: float = 1.5
    """kvcache_balancing_threshold of Mooncake (assumption B01), and so are the next five of Mooncake alone."""
    transfers: Transfers = "shared"
    """How the time of a transfer is estimated (assumption B02)."""
    offline_tests: int = 0
    """From how many offline tests prefill estimates are learned (assumption B03); with 0 they are exact."""
    decode_choice: DecodeChoice = "least_tbt"
    """How a decode instance is selected (assumption B05)."""
    overtaking: bool = False
    """Whether a prompt whose prefix is on its way lets those behind it start (assumption B51)."""
    fetch_timeout_s: float = 30.0
    """How long a prompt waits for a prefix from another node (assumption B57)."""
    ttft_limit_s: float = 30.0
    tbt_limit_s: float = 0.1
    """Used only by `effective`; the distribution of TBT is recorded in any case."""
    speed: float = 1.0
    """Speed of the replay relative to the recording."""
    spread: bool = True
    """Whether arrivals are spread over the ticks of their time stamps (assumption B09)."""
    first: int | None = None
    seed: int = 0
    """Of the moments in the ticks, random routing, and the twin where there is no released file."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: latencies by both editions, capacity over TBT, prefill GPU time.

        Columns that begin with `few_gaps_` read B17 the other way: a request with fewer than ten gaps is within
        any limit on TBT, and has no part in means. `within_mean_gap` reads B44 the other way.
        """
        trace = self.trace()
        log = serve(self, trace)
        requests = metrics.request_table(log)
        has_gaps = requests["output_tokens"].to_numpy() != 1  # or was rejected, and counts as never within a limit
        gaps_ms, mean_gaps_ms = (1e3 * requests[f"tbt_{of}_s"].to_numpy()[has_gaps] for of in ("fast", "arxiv"))
        last_s = float(trace.arrival_s[-1])
        yield {
            **latencies(requests),
            "capacity": [self._capacity(requests, tbt_ms / 1e3) for tbt_ms in TBT_GRID_MS],
            **{f"capacity_{ms}_ms": self._capacity(requests, ms / 1e3) for ms in LIMITS_MS},
            "effective": self._capacity(requests, self.tbt_limit_s),
            "within_ttft": float((requests["ttft_s"].to_numpy() <= self.ttft_limit_s).mean()),
            "within_tbt": shares(gaps_ms, (1e3 * self.tbt_limit_s,))[0],
            **_within("within", gaps_ms),
            "within_mean_gap": shares(mean_gaps_ms, (1e3 * self.tbt_limit_s,))[0],
            **_within("within_mean_gap", mean_gaps_ms),
            **self._if_few_gaps_pass(requests),
            "ttft_cdf": shares(requests["ttft_s"].to_numpy(), TTFT_GRID_S),
            "tbt_cdf": shares(gaps_ms, TBT_GRID_MS),
            "prefill_gpu_s": metrics.prefill_gpu_s(log) / len(requests),
            "token_hit_rate": metrics.reused_share(log),
            "requests": len(requests),
            "trace_requests_per_s": len(trace) / (self.speed * last_s) if last_s else np.nan,
            "origin": trace.origin,
            "source": trace.source,
        }

    def _if_few_gaps_pass(self, requests: pd.DataFrame) -> dict[str, float]:
        tokens = requests["output_tokens"].to_numpy()
        few = (tokens > 1) & (tokens <= FEW_GAPS)
        gap_s = np.where(few, np.nan, requests["tbt_fast_s"].to_numpy(dtype=np.float64))
        passing = requests.assign(tbt_fast_s=gap_s)
        found = {f"capacity_{ms}_ms": self._capacity(passing, ms / 1e3) for ms in LIMITS_MS}
        found["effective"] = self._capacity(passing, self.tbt_limit_s)
        passing_ms = np.where(few, 0.0, 1e3 * gap_s)[tokens != 1]
        found |= {"within_tbt": shares(passing_ms, (1e3 * self.tbt_limit_s,))[0]} | _within("within", passing_ms)
        known_s = gap_s[~np.isnan(gap_s)]
        found["tbt_fast_mean_s"] = float(known_s.mean()) if known_s.size else np.nan
        found["tbt_fast_p50_s"] = float(np.percentile(known_s, 50)) if known_s.size else np.nan
        return {f"few_gaps_{name}": number for name, number in found.items()}

    def trace(self) -> Trace:
        """The requests as they arrive."""
        whole = whole_trace(self.workload, self.seed)
        arriving = with_spread_arrivals(whole, seed=self.seed) if self.spread else whole
        trace = arriving if self.first is None else arriving.head(self.first)
        return replace(trace, arrival_s=trace.arrival_s / self.speed)

    def _capacity(self, requests: pd.DataFrame, tbt_s: float) -> float:
        return metrics.effective_request_capacity(requests, SLO(self.ttft_limit_s, tbt_s))


def splits(base: EndToEnd, prefill_nodes: Iterable[int], hosts_s: Iterable[float]) -> tuple[EndToEnd, ...]:
    """The same number of nodes split differently, with several costs of the host (FAST'25 Fig. 15)."""
    nodes = base.prefill_nodes + base.decode_nodes
    pairs = product(tuple(prefill_nodes), tuple(hosts_s))
    return tuple(replace(base, prefill_nodes=p, decode_nodes=nodes - p, host_s=host_s) for p, host_s in pairs)


def one_knob_at_a_time(base: EndToEnd) -> dict[str, EndToEnd]:
    """The same replay with one assumption changed at a time, by what was changed; `base` has a host."""
    mooncake, vllm = replace(base, system="mooncake"), replace(base, system="vllm")
    prefix, chunked = replace(base, system="vllm_prefix"), replace(base, system="vllm_chunked")
    return {
        "Mooncake": mooncake,
        "Mooncake, engine alone (B37)": replace(mooncake, host_s=0.0),
        "Mooncake, arrivals as released (B09)": replace(mooncake, spread=False),
        "Mooncake, 6 of 16 nodes prefill (B06)": replace(mooncake, prefill_nodes=6, decode_nodes=10),
        "Mooncake, replayed 1.25 times as fast (B07)": replace(mooncake, speed=1.25),
        "vLLM": vllm,
        "vLLM, engine alone (B37)": replace(vllm, host_s=0.0),
        "vLLM, arrivals as released (B09)": replace(vllm, spread=False),
        "vLLM, replayed 1.25 times as fast (B07)": replace(vllm, speed=1.25),
        "vLLM, KVCache memory for 400,000 tokens (B15)": replace(vllm, device_tokens=400_000),
        "vLLM with prefix caching": prefix,
        "vLLM with prefix caching, hashing takes 40 ns per token (B38)": replace(prefix, hash_s_per_token=40e-9),
        "chunked prefill, 512 tokens per iteration": chunked,
        "chunked prefill, 2,048 tokens per iteration (B16)": replace(chunked, chunk_tokens=LARGE_CHUNK_TOKENS),
    }


def todays_vllm(base: EndToEnd) -> dict[str, EndToEnd]:
    """The same replay on the scheduler of vLLM V1, behind the router of the base and one that knows its caches."""
    today = replace(base, system="vllm_today")
    return {
        "vLLM V1": today,
        "vLLM V1 behind a cache-aware router": replace(today, router="cache_aware"),
    }


def capacity_of_router(router: PlacementPolicy) -> float:
    """Effective request capacity of vLLM on 600 conversations and 0.1 s of TBT, behind a router of one's own."""
    trace = whole_trace("conversation").head(600)
    spec = ClusterSpec.coupled(placement=router, block_size_tokens=trace.block_size_tokens)
    log = Cluster(spec, clock(EndToEnd(system="vllm"))).run(trace.requests())
    return metrics.effective_request_capacity(metrics.request_table(log), SLO(tbt_s=0.1))


def serve(point: EndToEnd, trace: Trace) -> list[Record]:
    """The run log of a trace on the system that the point names."""
    model = clock(point)
    if point.system == "mooncake":
        spec = ClusterSpec.disaggregated(
            prefill_nodes=point.prefill_nodes,
            decode_nodes=point.decode_nodes,
            cache_tokens=point.cache_tokens,
            first_shown_by=point.first_shown_by,
            device_tokens=point.device_tokens,
            max_batch_tokens=point.pack_tokens,
            block_size_tokens=trace.block_size_tokens,
            overtaking=point.overtaking,
            fetch_timeout_s=point.fetch_timeout_s,
            placement=with_decode_choice(KVCacheCentric(point.threshold), point.decode_choice),
        )
        believed = estimator(model, point.transfers, point.offline_tests, point.seed)
        return Cluster(spec, model, estimate=believed).run(trace.requests())
    batching: dict[str, BatchingPolicy] = {
        "vllm_chunked": VLLMChunked(chunk_tokens=point.chunk_tokens),
        "vllm_today": VLLMToday(chunk_tokens=TODAY_CHUNK_TOKENS),
    }
    coupled = ClusterSpec.coupled(
        nodes=point.prefill_nodes + point.decode_nodes,
        batching=batching.get(point.system, VLLM()),
        prefix_caching=point.system in {"vllm_prefix", "vllm_today"},
        device_tokens=point.device_tokens,
        block_size_tokens=trace.block_size_tokens,
        placement=named_placement(point.router, point.seed),
    )
    return Cluster(coupled, model).run(trace.requests())


def clock(point: EndToEnd) -> LatencyModel:
    """The calibrated node with what the point adds to it.

    vLLM 0.5 hashes, for each block of a prompt, all tokens up to its end: half the square of the prompt over the
    block size. That is a quadratic cost of prefill, paid where prefixes are cached. Here only tokens that are
    computed pay it; those found in the cache were hashed as well, so it is a lower bound.
    """
    model = latency_of(point.testbed).with_host(point.host_s, point.host_free)
    if point.system != "vllm_prefix" or not point.hash_s_per_token:
        return model
    hashing_s = point.hash_s_per_token / (2 * VLLM_BLOCK_TOKENS)
    hybrid = replace(model.hybrid, per_token_squared_s=model.hybrid.per_token_squared_s + hashing_s)
    return replace(model, hybrid=hybrid)


def latencies(requests: pd.DataFrame) -> dict[str, float]:
    """Mean, median, P90 and P99 of TTFT, and of TBT by both editions, in seconds; NaN where nobody has one."""
    found: dict[str, float] = {}
    for name in ("ttft", "tbt_fast", "tbt_arxiv"):
        values = requests[f"{name}_s"].to_numpy(dtype=np.float64)
        values = values[~np.isnan(values)]
        found[f"{name}_mean_s"] = float(values.mean()) if values.size else np.nan
        for percent in (50, 90, 99):
            found[f"{name}_p{percent}_s"] = float(np.percentile(values, percent)) if values.size else np.nan
    return found


def _within(name: str, gaps_ms: npt.NDArray[np.float64]) -> dict[str, float]:
    """Columns: the shares at each of `WITHIN_MS`."""
    return {f"{name}_{ms}_ms": share for ms, share in zip(WITHIN_MS, shares(gaps_ms, WITHIN_MS), strict=True)}


def shares(values: npt.NDArray[np.float64], grid: Sequence[float]) -> list[float]:
    """The share of all values that is at most each point of the grid; not a number counts as never."""
    ordered = np.sort(values[~np.isnan(values)])
    return (np.searchsorted(ordered, np.asarray(grid), side="right") / values.size).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The highest replay speed at which a share of requests keeps TTFT and TBT limits, at three TBT limits."""

    workload: str = "conversation"
    system: SystemName = "mooncake"
    prefill_nodes: int = 8
    decode_nodes: int = 8
    attained: float = 0.9
    """Share of requests that must be effective."""
    slowest: float = 0.25
    fastest: float = 4.0
    relative_tolerance: float = 0.1
    host_s: float = 0.0
    host_free: float = 0.0
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per TBT limit: the speed found, its rate, and how much above the capacity it may be."""
        seen: dict[float, dict[str, Any]] = {}
        for limit_ms in LIMITS_MS:
            speed = metrics.highest_passing(
                lambda speed, column=f"capacity_{limit_ms}_ms": self._at(speed, seen)[column] >= self.attained,
                self.slowest,
                self.fastest,
                relative_tolerance=self.relative_tolerance,
            )
            run = seen[speed or self.slowest]
            rate = (speed or 0.0) * run["trace_requests_per_s"]
            lasts_s = run["requests"] / rate if rate else float("nan")
            yield {
                "tbt_limit_ms": limit_ms,
                "speed": speed or 0.0,
                "requests_per_s": rate,
                "lasts_s": lasts_s,
                "hidden_overload": hidden_overload(lasts_s, run["ttft_limit_s"], self.attained),
                "prefill_gpu_s": run["prefill_gpu_s"],
                "runs": len(seen),
                "source": run["source"],
            }

    def _at(self, speed: float, seen: dict[float, dict[str, Any]]) -> dict[str, Any]:
        """The run at a speed; three searches share what they look at."""
        if speed not in seen:
            shared = (
                "workload",
                "system",
                "prefill_nodes",
                "decode_nodes",
                "host_s",
                "host_free",
                "first",
                "seed",
            )
            point = EndToEnd(speed=speed, **{name: getattr(self, name) for name in shared})
            (row,) = point.rows()
            seen[speed] = {**row, "ttft_limit_s": point.ttft_limit_s}
        return seen[speed]


def hidden_overload(lasts_s: float, ttft_limit_s: float, attained: float) -> float:
    """By what share a rate may exceed what a cluster sustains and still pass, because the arrivals end too soon.

    At (1 + e) times the sustained rate, a request that arrives after t seconds waits e t. It misses a limit L when
    t > L / e. Of arrivals that last D seconds at most the share 1 - a may miss it as long as e <= L / (a D).
    """
    return ttft_limit_s / (attained * lasts_s)
