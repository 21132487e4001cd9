"""Servers on one core and requests with shared prefixes: a measurement over HTTP, and the simulator's prediction.

`benchmarks/gain.py` measures, and writes `data/measured/real_gain.json`. Its requests are those of
`SharedPrefixes`. The prediction runs simulated clusters on the same requests, with latency models that fit prompts
and decode steps of each engine, which were timed alone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Literal

import numpy as np
import pandas as pd

from mooncake_lab import metrics
from mooncake_lab.batching import SarathiServe, VLLMToday
from mooncake_lab.book.experiments import tabulated
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import named_placement
from mooncake_lab.core import SLO, Request, TracedRequest, block_keys, carried_folder
from mooncake_lab.perf import HybridLatency, LatencyModel, LinkLatency, model_shape
from mooncake_lab.perf.calibration import fit_decode, fit_prefill
from mooncake_lab.simulation import Cluster

RECORD: Final = carried_folder("measured") / "real_gain.json"
_IDLE_S: Final = 1.0
"""Between two prompts that fill the caches of a simulated cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of the workload."""

    at_s: float
    prefix: int
    prompt: tuple[int, ...]
    """Token ids, those of the prefix first."""
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Requests that each begin with one of a few long prefixes, at random moments (Poisson)."""

    prefixes: int = 16
    prefix_tokens: int = 1024
    least_tail_tokens: int = 32
    most_tail_tokens: int = 224
    least_new_tokens: int = 16
    most_new_tokens: int = 64
    vocabulary: int = 8192

    def first(self, texts: int) -> list[Arrival]:
        """Each prefix once, with one token of answer: what fills the caches before anything counts.

        Args:
            texts: which set of prefixes; another number gives prefixes that nobody has seen.
        """
        return [
            Arrival(at_s=0.0, prefix=number, prompt=self._prefix(texts, number), new_tokens=1)
            for number in range(self.prefixes)
        ]

    def arrivals(self, requests_per_s: float, seconds: float, seed: int, texts: int) -> list[Arrival]:
        """The requests of so many seconds, at least one; only the rate and the seed set moments and lengths.

        Args:
            requests_per_s: mean rate.
            seconds: how long requests arrive.
            seed: of moments and lengths.
            texts: as in `first`.
        """
        rng = np.random.default_rng([seed, round(1000 * requests_per_s)])
        gaps_s = rng.exponential(1 / requests_per_s, max(1, round(3 * requests_per_s * seconds)))
        found = list[Arrival]()
        for at_s in (np.cumsum(gaps_s) - gaps_s[0]).tolist():
            if at_s >= seconds:
                break
            number = int(rng.integers(self.prefixes))
            tail = rng.integers(
                0, self.vocabulary, rng.integers(self.least_tail_tokens, self.most_tail_tokens + 1)
            )
            prompt = (*self._prefix(texts, number), *tail.tolist())
            new_tokens = int(rng.integers(self.least_new_tokens, self.most_new_tokens + 1))
            found.append(Arrival(at_s=at_s, prefix=number, prompt=prompt, new_tokens=new_tokens))
        return found

    def _prefix(self, texts: int, number: int) -> tuple[int, ...]:
        rng = np.random.default_rng([texts, number, self.prefixes])
        return tuple(rng.integers(0, self.vocabulary, self.prefix_tokens).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A system that is measured and simulated."""

    label: str
    engine: Literal["ours", "vllm"]
    processes: int
    """Workers with a model, which share the core."""
    router: str
    """Placement policy in front of them."""
    is_disaggregated: bool = False


SYSTEMS: Final[Mapping[str, Served]] = {
    "ours_1p1d": Served(
        label="ours, 1P+1D", engine="ours", processes=2, router="kvcache_centric", is_disaggregated=True
    ),
    "ours_1": Served(label="ours, one coupled worker", engine="ours", processes=1, router="fewest_requests"),
    "ours_2": Served(label="ours, two coupled workers", engine="ours", processes=2, router="cache_aware"),
    "vllm_1": Served(label="vLLM, one process", engine="vllm", processes=1, router="fewest_requests"),
    "vllm_2": Served(label="vLLM, two, fewest requests", engine="vllm", processes=2, router="fewest_requests"),
    "vllm_2_aware": Served(label="vLLM, two, cache-aware", engine="vllm", processes=2, router="cache_aware"),
}
"""In the order of the figure."""
CHUNK_TOKENS: Final = {"ours": 512, "vllm": 2048}
"""Each engine's own default."""
BLOCK_TOKENS: Final = {"ours": 16, "vllm": 32}
MAX_REQUESTS: Final = 64


def recorded() -> dict[str, Any]:
    """The measurement."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def latency_model(probes: Mapping[str, Any], model: str, slower: float = 1.0) -> LatencyModel:
    """The latency model that fits the probes of one engine.

    Args:
        probes: `prefill`, rows of prompt tokens and seconds to the first token of a request that is alone;
            `decode`, rows of requests, context tokens and seconds of one step.
        model: the shape that the engine computes.
        slower: by how much all times are multiplied, such as on half a core.
    """
    prefill, decode = (np.array(probes[name], np.float64).T for name in ("prefill", "decode"))
    first = fit_prefill(prefill[0], np.zeros_like(prefill[0]), slower * prefill[1]).model
    second = fit_decode(decode[0], decode[1], slower * decode[2]).model
    copying = LinkLatency(1e9)  # on loopback; a prompt's KVCache takes some ms
    return LatencyModel(
        name=f"probes of one core, times {slower:g}",
        shape=model_shape(model),
        prefill=first,
        decode=second,
        hybrid=HybridLatency.of(first, second),
        transfer=copying,
        dram=LinkLatency(1e10),
    )


def spec_of(system: Served, kv_tokens: int) -> ClusterSpec:
    """The simulated cluster of a system whose processes hold so many tokens of KVCache together."""
    engine, each = system.engine, kv_tokens // system.processes
    shared: dict[str, Any] = {
        "block_size_tokens": BLOCK_TOKENS[engine], "device_tokens": each, "max_requests": MAX_REQUESTS,
        "placement": named_placement(system.router, 0),
    }  # fmt: skip
    if system.is_disaggregated:
        return ClusterSpec.small(cache_tokens=each, **shared)
    chunk_tokens = CHUNK_TOKENS[engine]
    batching = (
        SarathiServe(chunk_tokens=chunk_tokens) if engine == "ours" else VLLMToday(chunk_tokens=chunk_tokens)
    )
    return ClusterSpec.small_coupled(nodes=system.processes, batching=batching, **shared)


def simulated(
    system: Served, warm: Sequence[Arrival], arrivals: Sequence[Arrival], model: LatencyModel, kv_tokens: int
) -> pd.DataFrame:
    """The `request_table` of the arrivals, behind prompts that fill the caches one by one."""
    block = BLOCK_TOKENS[system.engine]
    before_s = len(warm) * _IDLE_S
    moments_s = [number * _IDLE_S for number in range(len(warm))] + [before_s + each.at_s for each in arrivals]
    traced = [
        TracedRequest(
            Request(
                id=number, arrival_s=at_s, input_tokens=len(each.prompt), block_size_tokens=block,
                block_keys=tuple(block_keys(np.array(each.prompt, np.int32), block)),
            ),
            each.new_tokens,
        )
        for number, (each, at_s) in enumerate(zip([*warm, *arrivals], moments_s, strict=True))
    ]  # fmt: skip
    return metrics.request_table(Cluster(spec_of(system, kv_tokens), model).run(traced)).loc[len(warm) :]


@tabulated
def measured(record: Mapping[str, Any], tbt_limit_s: float) -> Iterator[Mapping[str, Any]]:
    """One row a system, rate and round: percent of the requests that had both latencies within the limits."""
    for cell in record["cells"]:
        pairs = list(zip(cell["ttft_s"], cell["tbt_s"], strict=True))
        within = [_within(ttft_s, tbt_s, record["ttft_limit_s"], tbt_limit_s) for ttft_s, tbt_s in pairs]
        asked = len(pairs) + cell["unanswered"]
        yield {
            "system": cell["system"],
            "requests_per_s": cell["requests_per_s"],
            "round": cell["round"],
            "requests": asked,
            "within": 100 * within.count(True) / asked,
            "ttft_median_s": float(np.median(cell["ttft_s"])) if pairs else np.nan,
            "tbt_median_s": float(np.median(cell["tbt_s"])) if pairs else np.nan,
        }


def _within(ttft_s: float, tbt_s: float, ttft_limit_s: float, tbt_limit_s: float) -> bool:
    return ttft_s <= ttft_limit_s and tbt_s <= tbt_limit_s


@tabulated
def predicted(record: Mapping[str, Any], tbt_limit_s: float) -> Iterator[Mapping[str, Any]]:
    """The same of the simulator, for all rounds together, one row a system, rate and share of the core.

    The simulator knows no core that two processes share. Of two processes, one bound gives each a core of its own,
    the other half a core all the time.
    """
    workload, texts = SharedPrefixes(**record["workload"]), 0
    rates: list[float] = record["rates"]
    for name, rate in product(SYSTEMS, rates):
        system = SYSTEMS[name]
        for slower in sorted({1.0, float(system.processes)}):
            model = latency_model(record["probes"][system.engine], record["model"], slower)
            tables = [
                simulated(
                    system, workload.first(texts),
                    workload.arrivals(rate, record["seconds"], seed, texts), model, record["kv_tokens"],
                )
                for seed in range(record["rounds"])
            ]  # fmt: skip
            table = pd.concat(tables)
            slo = SLO(ttft_s=record["ttft_limit_s"], tbt_s=tbt_limit_s)
            yield {
                "system": name,
                "requests_per_s": rate,
                "slower": slower,
                "within": 100 * metrics.effective_request_capacity(table, slo),
                "ttft_median_s": float(np.nanmedian(table["ttft_s"].to_numpy())),
                "tbt_median_s": float(np.nanmedian(table["tbt_fast_s"].to_numpy())),
            }


def source_of(record: Mapping[str, Any]) -> str:
    """Where and when it was measured, for the footer of a figure."""
    machine = record["machine"]
    loads = [cell["load_average"] for cell in record["cells"]]
    return (
        f"circles: measured on {machine['processor']}, one of {machine['cores']} cores, {machine['date']}, commit"
        f" {record['commit']}, load average {min(loads):.1f} to {max(loads):.1f}; dotted: simulated"
    )
