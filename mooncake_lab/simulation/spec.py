"""What a simulated cluster is made of, as plain values: nodes, memory, policies, and when instances fail."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Final, Literal

from mooncake_lab.batching import (
    VLLM,
    BatchingPolicy,
    Limits,
    Orca,
    RequestLevel,
    Sarathi,
    SarathiServe,
    SplitFuse,
    TensorRTLLM,
    VLLMChunked,
)
from mooncake_lab.conductor import (
    NEEDS,
    AdmissionPolicy,
    AdmitAll,
    FewestRequests,
    KVCacheCentric,
    PlacementPolicy,
    check_needs,
)
from mooncake_lab.core import SLO, TracedRequest

DEFAULT_MAX_TOKENS: Final = 2000
"""What a client that states no max_tokens is taken to allow (assumption B52)."""

COUPLED_SYSTEMS: Final[Mapping[str, tuple[BatchingPolicy, bool]]] = MappingProxyType(
    {
        "vllm": (VLLM(), False),
        "vllm_prefix": (VLLM(), True),
        "vllm_chunked": (VLLMChunked(chunk_tokens=512), False),
        "request_level": (RequestLevel(), False),
        "orca": (Orca(), False),
        "splitfuse": (SplitFuse(chunk_tokens=512), False),
        "tensorrt_llm": (TensorRTLLM(), False),
        "tensorrt_llm_max_utilization": (TensorRTLLM(capacity="max_utilization"), False),
        "sarathi": (Sarathi(chunk_tokens=512), False),
        "sarathi_serve": (SarathiServe(chunk_tokens=512), False),
    }
)
"""Coupled systems by the names of the command line: batching policy, and whether prefixes are cached.

FAST'25 §5.1 compares with the first three, testing the two features separately; 512 tokens per iteration is what
vLLM of that time took for chunked prefill. Those that never preempt (request_level, orca, sarathi, tensorrt_llm)
reserve prompt and max_tokens of each request.
"""

_POSITIVE: Final = (
    "prefill_nodes",
    "decode_nodes",
    "prefill_group",
    "prefill_chunk_tokens",
    "cache_tokens",
    "decode_tokens",
    "block_size_tokens",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance fails and loses all KVCache that it holds. Its requests are placed again.

    Raises:
        ValueError: when the time is negative or not finite.
    """

    instance: str
    at_s: float

    def __post_init__(self) -> None:
        if not (isfinite(self.at_s) and self.at_s >= 0):
            raise ValueError(f"{self.instance!r} should fail at {self.at_s!r} s; allowed are finite times from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A disaggregated cluster and its policies.

    Raises:
        ValueError: when a count or a capacity is not positive, groups are not whole, views are of the future, or a
            policy needs what separate pools do not give.
    """

    prefill_nodes: int = 8
    decode_nodes: int = 8
    cache_tokens: int = 3_000_000
    """KVCache each prefill node holds in DRAM (FAST'25 §2.2: about 1 TB)."""
    ssd_tokens: int = 0
    """KVCache each prefill node holds on SSD besides; 0 where it has none."""
    prefill_group: int = 1
    """Prefill nodes that compute each prompt together by chunked pipeline parallelism (arXiv §5.1). A group is one
    instance: prompts follow one another through it. It has the memory and the network cards of all its nodes."""
    prefill_chunk_tokens: int = 4096
    """What a group cuts prompts to (assumption B14)."""
    decode_tokens: int = 1_330_000
    """KVCache that fits into a decode node's GPU memory."""
    shared_cache: bool = False
    """One Mooncake Store over all prefill nodes instead of a cache a node (FAST'25 §5.3)."""
    eviction: str = "lru"
    block_size_tokens: int = 512
    first_shown_by: Literal["decode", "prefill"] = "decode"
    """Who shows the first token to the user: the decode instance when the KVCache is there, so that TTFT includes
    transfer and load as in FAST'25 Fig. 14, or the prefill instance when it is computed."""
    streams_layers: bool = True
    """Whether each layer's KVCache leaves for the decode instance while the next is computed (arXiv §5.2); else
    all of it leaves when the prompt is computed."""
    overtaking: bool = False
    """Whether a prompt whose prefix is still on its way lets those behind it start; else all start in order."""
    placement: PlacementPolicy = field(default_factory=KVCacheCentric)
    failures: tuple[Failure, ...] = ()
    view_age_s: float = 0.0
    """How old the loads may be on which the Conductor decides; 0 is always the present."""
    admission: AdmissionPolicy = field(default_factory=AdmitAll)
    slo: SLO = field(default_factory=SLO)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"ClusterSpec.{name} is {getattr(self, name)!r}; at least 1 is needed")
        if self.ssd_tokens < 0:
            raise ValueError(f"ClusterSpec.ssd_tokens is {self.ssd_tokens!r}; at least 0 is needed")
        if self.prefill_nodes % self.prefill_group:
            raise ValueError(
                f"{self.prefill_nodes} prefill nodes are no whole number of groups of {self.prefill_group}"
            )
        refuse_age(self.view_age_s, "ClusterSpec")
        gives = NEEDS.keys() - {"coupled_instances"}
        check_needs("ClusterSpec", gives, placement=self.placement, admission=self.admission)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledSpec:
    """A cluster whose every instance prefills and decodes, one instance a node (FAST'25 §5.1).

    Raises:
        ValueError: when a count is not positive, views would be of the future, a trace's block is not a whole
            number of memory blocks, or a policy needs what coupled instances do not give.
    """

    nodes: int = 16
    batching: BatchingPolicy = field(default_factory=VLLM)
    prefix_caching: bool = False
    """Keep computed prompts in free GPU memory (vLLM's automatic prefix caching)."""
    eviction: str = "lru"
    device_tokens: int = 1_330_000
    """KVCache that fits into a node's GPU memory."""
    max_batch_tokens: int = 200_000
    """The most tokens that an iteration computes; the chunk size is a parameter of the batching policy."""
    max_requests: int = 256
    max_request_tokens: int = 200_000
    """The window; the longest requests of the synthetic trace fit."""
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    """What a request that states no max_tokens is taken to allow, or the smallest doubling of it that its recorded
    answer fits into. Policies that reserve for the worst case reserve prompt and max_tokens."""
    memory_block_tokens: int = 16
    block_size_tokens: int = 512
    """Block size of the trace: the unit that requests can share."""
    view_age_s: float = 0.0
    """How old the loads may be on which the Conductor decides; 0 is always the present."""
    placement: PlacementPolicy = field(default_factory=FewestRequests)
    """The strongest router that knows nothing of prompts (assumption B39)."""
    failures: tuple[Failure, ...] = ()
    admission: AdmissionPolicy = field(default_factory=AdmitAll)
    slo: SLO = field(default_factory=SLO)

    def __post_init__(self) -> None:
        for name in ("nodes", "device_tokens", "memory_block_tokens", "block_size_tokens", "default_max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"CoupledSpec.{name} is {getattr(self, name)!r}; at least 1 is needed")
        refuse_age(self.view_age_s, "CoupledSpec")
        if self.block_size_tokens % self.memory_block_tokens:
            raise ValueError(
                f"CoupledSpec.block_size_tokens is {self.block_size_tokens}, no multiple of memory blocks"
                f" of {self.memory_block_tokens} tokens"
            )
        gives = {"decode_requests", "lengths", "coupled_instances", "priority"}
        if self.prefix_caching:
            gives.add("local_prefixes")
        check_needs("CoupledSpec", gives, placement=self.placement, admission=self.admission)

    @property
    def limits(self) -> Limits:
        """What one instance may spend in an iteration."""
        blocks = self.device_tokens // self.memory_block_tokens
        return Limits(
            max_batch_tokens=self.max_batch_tokens,
            max_requests=self.max_requests,
            block_size_tokens=self.memory_block_tokens,
            capacity_blocks=blocks,
            free_blocks=blocks,
            max_request_tokens=self.max_request_tokens,
        )

    def max_tokens_of(self, traced: TracedRequest) -> int:
        """The most tokens of an answer; a default leaves room for the prompt, as servers' defaults do."""
        most = traced.max_tokens_or(self.default_max_tokens)
        if traced.request.max_tokens is None:
            longest = min(self.max_request_tokens, self.device_tokens)
            most = max(1, min(most, longest - traced.request.input_tokens + 1))
        return most


def refuse_age(view_age_s: float, owner: str) -> None:
    """Refuse an age of views that is not possible.

    Raises:
        ValueError: when it is negative or not finite.
    """
    if not (isfinite(view_age_s) and view_age_s >= 0):
        raise ValueError(f"{owner}.view_age_s is {view_age_s!r}; allowed are finite times from 0")
