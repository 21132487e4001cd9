"""What a simulated cluster is made of, as plain values: pools of nodes, policies, and when instances fail."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from types import MappingProxyType
from typing import Any, Final, Literal, Self

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

DEVICE_TOKENS: Final = 1_330_000
"""KVCache that fits into the GPU memory of a node of the papers."""

COUPLED_SYSTEMS: Final[Mapping[str, tuple[BatchingPolicy, bool]]] = MappingProxyType(
    {
        "vllm": (VLLM(), False),
        "vllm_prefix": (VLLM(), True),
        "vllm_chunked": (VLLMChunked(chunk_tokens=512), False),
        "request_level": (RequestLevel(), False),
        "orca": (Orca(), False),
        "splitfuse": (SplitFuse(chunk_tokens=512), False),
        "tensorrt_llm": (TensorRTLLM(), False),
        "sarathi": (Sarathi(chunk_tokens=512), False),
        "sarathi_serve": (SarathiServe(chunk_tokens=512), False),
    }
)
"""Coupled systems by the names of the command line: batching policy, and whether prefixes are cached.

FAST'25 §5.1 compares with the first three, testing the two features separately; 512 tokens per iteration is what
vLLM of that time took for chunked prefill. Those that never preempt (request_level, orca, sarathi, tensorrt_llm)
reserve prompt and max_tokens of each request.
"""


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
class PrefillPool:
    """Nodes that prefill, and their caches.

    Raises:
        ValueError: when a count or a capacity is not positive, or groups are not whole.
    """

    nodes: int = 8
    prefill_group: int = 1
    """Nodes that compute each prompt together by chunked pipeline parallelism (arXiv §5.1). A group is one
    instance: prompts follow one another through it. It has the memory and the network cards of all its nodes."""
    prefill_chunk_tokens: int = 4096
    """What a group cuts prompts to (assumption B14)."""
    cache_tokens: int = 3_000_000
    """KVCache each node holds in DRAM (FAST'25 §2.2: about 1 TB)."""
    ssd_tokens: int = 0
    """KVCache each node holds on SSD besides; 0 where it has none. A prefix is read from there where that is
    faster than computing it again (FAST'25 Eq. 2)."""
    shared_cache: bool = False
    """One Mooncake Store over all nodes instead of a cache a node (FAST'25 §5.3). Each block lies on one node; the
    others read it over the network (assumption B55)."""
    eviction: str = "lru"
    max_batch_tokens: int = 1
    """Computed tokens up to which waiting prompts are packed into one iteration; a longer prompt is computed
    alone. 1 computes one prompt at a time (assumption B56)."""
    fetch_timeout_s: float = 30.0
    """How long a prompt waits for a prefix from another node, its reading from SSD there included; then it is
    computed. The default is that of Mooncake's Transfer Engine (assumption B57)."""
    overtaking: bool = False
    """Whether a prompt whose prefix is still on its way lets those behind it start; else all start in order."""

    def __post_init__(self) -> None:
        _require_positive(
            self, "nodes", "prefill_group", "prefill_chunk_tokens", "cache_tokens", "max_batch_tokens"
        )
        if self.ssd_tokens < 0:
            raise ValueError(f"PrefillPool.ssd_tokens is {self.ssd_tokens!r}; at least 0 is needed")
        if not 0 < self.fetch_timeout_s < inf:
            raise ValueError(
                f"PrefillPool.fetch_timeout_s is {self.fetch_timeout_s!r}; allowed are finite positive times"
            )
        if self.nodes % self.prefill_group:
            raise ValueError(f"{self.nodes} prefill nodes are no whole number of groups of {self.prefill_group}")
        if self.prefill_group > 1 and self.max_batch_tokens > 1:
            raise ValueError(
                f"PrefillPool.max_batch_tokens is {self.max_batch_tokens} with groups of {self.prefill_group}"
                " nodes; a group computes one prompt at a time, so 1 is allowed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePool:
    """Nodes that decode.

    Raises:
        ValueError: when a count or a capacity is not positive.
    """

    nodes: int = 8
    device_tokens: int = DEVICE_TOKENS
    """KVCache that fits into a node's GPU memory."""

    def __post_init__(self) -> None:
        _require_positive(self, "nodes", "device_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledPool:
    """Nodes that prefill and decode, each an instance (FAST'25 §5.1).

    Raises:
        ValueError: when a count or a capacity is not positive.
    """

    nodes: int = 16
    batching: BatchingPolicy = field(default_factory=VLLM)
    prefix_caching: bool = False
    """Keep computed prompts in free GPU memory (vLLM's automatic prefix caching)."""
    eviction: str = "lru"
    device_tokens: int = DEVICE_TOKENS
    """KVCache that fits into a node's GPU memory."""
    max_batch_tokens: int = 200_000
    """The most tokens that an iteration computes; the chunk size is a parameter of the batching policy."""
    max_requests: int = 256
    max_model_len: int = 200_000
    """The window; the longest requests of the synthetic trace fit."""
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    """What a request that states no max_tokens is taken to allow, or the smallest doubling of it that its recorded
    answer fits into. Policies that reserve for the worst case reserve prompt and max_tokens."""
    memory_block_tokens: int = 16

    def __post_init__(self) -> None:
        _require_positive(self, "nodes", "device_tokens", "memory_block_tokens", "default_max_tokens")

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
            max_request_tokens=self.max_model_len,
        )

    def max_tokens_of(self, traced: TracedRequest) -> int:
        """The most tokens of an answer; a default leaves room for the prompt, as servers' defaults do."""
        most = traced.max_tokens_or(self.default_max_tokens)
        if traced.request.max_tokens is None:
            longest = min(self.max_model_len, self.device_tokens)
            most = max(1, min(most, longest - traced.request.input_tokens + 1))
        return most


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster and its policies; `disaggregated` and `coupled` make the common ones.

    Raises:
        ValueError: when the pools are not a prefill and a decode pool, or one coupled pool; a trace's block is not
            a whole number of memory blocks; views would be of the future; or a policy needs what the cluster does
            not give.
    """

    pools: tuple[PrefillPool, DecodePool] | tuple[CoupledPool]
    block_size_tokens: int = 512
    """Block size of the trace: the unit that requests can share."""
    first_shown_by: Literal["decode", "prefill"] = "decode"
    """Who shows the first token to the user: the decode instance when the KVCache is there, so that TTFT includes
    transfer and load as in FAST'25 Fig. 14, or the prefill instance when it is computed."""
    streams_layers: bool = True
    """Whether each layer's KVCache leaves for the decode instance while the next is computed (arXiv §5.2); else
    all of it leaves when the prompt is computed."""
    placement: PlacementPolicy
    failures: tuple[Failure, ...] = ()
    view_age_s: float = 0.0
    """How old the loads may be on which the Conductor decides; 0 is always the present."""
    admission: AdmissionPolicy = field(default_factory=AdmitAll)
    slo: SLO = field(default_factory=SLO)

    def __post_init__(self) -> None:
        _require_positive(self, "block_size_tokens")
        if not (isfinite(self.view_age_s) and self.view_age_s >= 0):
            raise ValueError(f"ClusterSpec.view_age_s is {self.view_age_s!r}; allowed are finite times from 0")
        if tuple(map(type, self.pools)) not in {(PrefillPool, DecodePool), (CoupledPool,)}:
            raise ValueError(f"pools {self.pools}; allowed are a prefill and a decode pool, or one coupled pool")
        gives = set(NEEDS) - {"coupled_instances"}
        if isinstance(self.pools[0], CoupledPool):
            gives = set(NEEDS) - {"double_check", "remote_prefixes", "local_prefixes"}
            if self.pools[0].prefix_caching:
                gives.add("local_prefixes")
            if self.block_size_tokens % self.pools[0].memory_block_tokens:
                raise ValueError(
                    f"ClusterSpec.block_size_tokens is {self.block_size_tokens}, no multiple of memory blocks"
                    f" of {self.pools[0].memory_block_tokens} tokens"
                )
        check_needs("ClusterSpec", gives, placement=self.placement, admission=self.admission)

    @classmethod
    def disaggregated(
        cls,
        *,
        prefill_nodes: int = 8,
        decode_nodes: int = 8,
        decode_tokens: int = DEVICE_TOKENS,
        **settings: Any,
    ) -> Self:
        """Separate pools.

        Args:
            prefill_nodes: nodes that prefill.
            decode_nodes: nodes that decode.
            decode_tokens: KVCache that fits into the GPU memory of each of these.
            **settings: further fields of `PrefillPool` and of the spec.
        """
        prefill = PrefillPool(nodes=prefill_nodes, **_fields_of(PrefillPool, settings))
        decode = DecodePool(nodes=decode_nodes, device_tokens=decode_tokens)
        settings.setdefault("placement", KVCacheCentric())
        return cls(pools=(prefill, decode), **settings)

    @classmethod
    def coupled(cls, **settings: Any) -> Self:
        """Nodes that prefill and decode, behind the strongest router that knows nothing of prompts (B39).

        Args:
            **settings: fields of `CoupledPool` and of the spec.
        """
        pool = CoupledPool(**_fields_of(CoupledPool, settings))
        settings.setdefault("placement", FewestRequests())
        return cls(pools=(pool,), **settings)


def _fields_of(pool: type[PrefillPool | CoupledPool], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that are fields of a pool, taken out of them."""
    return {each.name: settings.pop(each.name) for each in fields(pool) if each.name in settings}


def _require_positive(spec: object, *names: str) -> None:
    for name in names:
        if getattr(spec, name) < 1:
            raise ValueError(f"{type(spec).__name__}.{name} is {getattr(spec, name)!r}; at least 1 is needed")
