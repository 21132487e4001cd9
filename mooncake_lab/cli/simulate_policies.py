"""Names that `mooncake-lab simulate` accepts, their policies and specs, and the settings that it records."""

from dataclasses import fields, is_dataclass
from typing import Any, Literal

from mooncake_lab.conductor import (
    FewestRequests,
    KVCacheCentric,
    LatencyEstimator,
    PlacementPolicy,
    full_decode_s,
    named_placement,
)
from mooncake_lab.core import SLO
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation import COUPLED_SYSTEMS, ClusterSpec
from mooncake_lab.workload import Trace

PlacementName = Literal[
    "random",
    "round_robin",
    "load_balance",
    "fewest_requests",
    "longest_prefix",
    "prefix_affinity",
    "cache_aware",
    "kvcache_centric",
]
AdmissionName = Literal[
    "none",
    "slo",
    "after_prefill",
    "early",
    "committed",
    "predictive",
    "length_predicting",
    "adaptive",
    "priority",
]
BatchingName = Literal[
    "vllm",
    "vllm_prefix",
    "vllm_chunked",
    "request_level",
    "orca",
    "splitfuse",
    "tensorrt_llm",
    "tensorrt_llm_max_utilization",
    "sarathi",
    "sarathi_serve",
]


def made_placement(name: str | None, seed: int, *, coupled: bool) -> PlacementPolicy:
    """The placement policy of a name; without a name, the default for separate pools or for coupled nodes."""
    if name is None:
        return FewestRequests() if coupled else KVCacheCentric()
    return named_placement(name, seed)


def trace_decode_s(trace: Trace, latency: LatencyModel, slo: SLO, capacity_tokens: int) -> float:
    """How long the mean request of a trace decodes on a full node."""
    return full_decode_s(
        LatencyEstimator(latency),
        slo,
        input_tokens=float(trace.input_tokens.mean()),
        output_tokens=float(trace.output_tokens.mean()),
        capacity_tokens=capacity_tokens,
    )


def settings_of(spec: ClusterSpec, **others: Any) -> dict[str, Any]:
    """The settings of a run as JSON has them: others, then its spec, policies with their parameters."""
    return others | {each.name: _plain(getattr(spec, each.name)) for each in fields(spec)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if not is_dataclass(value):
        return value
    return {
        "type": type(value).__name__,
        **{each.name: _plain(getattr(value, each.name)) for each in fields(value)},
    }


def disaggregated_spec(prefill: int, decode: int, cache_tokens: int | None, others: dict[str, Any]) -> ClusterSpec:
    """Separate pools; without a size of the DRAM cache, the spec's default holds."""
    sized: dict[str, Any] = {} if cache_tokens is None else {"cache_tokens": cache_tokens}
    return ClusterSpec.disaggregated(prefill_nodes=prefill, decode_nodes=decode, **sized, **others)


def coupled_spec(nodes: int, batching: str, others: dict[str, Any]) -> ClusterSpec:
    """Coupled nodes under a batching system of the command line."""
    policy, prefix_caching = COUPLED_SYSTEMS[batching]
    return ClusterSpec.coupled(nodes=nodes, batching=policy, prefix_caching=prefix_caching, **others)
