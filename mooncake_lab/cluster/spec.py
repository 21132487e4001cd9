"""What a cluster is made of, as plain values: pools of nodes and policies, the same for both runtimes.

What only one of them has is in the options of that runtime: `simulation.SimulationOptions`, `serving.LiveOptions`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
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
    VLLMToday,
)
from mooncake_lab.cluster.events import Role
from mooncake_lab.conductor import (
    AdmissionPolicy,
    AdmitAll,
    FewestRequests,
    KVCacheCentric,
    LoadBalance,
    Need,
    PlacementPolicy,
    check_needs,
)
from mooncake_lab.core import SLO
from mooncake_lab.core.renamed import old_names, renamed_fields

DEVICE_TOKENS: Final = 1_330_000
"""KVCache that fits into the GPU memory of a node of the papers."""

SMALL_TOKENS: Final = 65_536
"""KVCache of a small node."""

COUPLED_SYSTEMS: Final[Mapping[str, tuple[BatchingPolicy, bool]]] = MappingProxyType(
    {
        "vllm": (VLLM(), False),
        "vllm_prefix": (VLLM(), True),
        "vllm_chunked": (VLLMChunked(chunk_tokens=512), False),
        "vllm_today": (VLLMToday(chunk_tokens=2048), True),
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
vLLM of that time took for chunked prefill. All three are of vLLM 0.5; `vllm_today` is the scheduler of vLLM V1,
with both features and the 2,048 tokens that its server takes on an A100. Those that never preempt (request_level,
orca, sarathi, tensorrt_llm) reserve prompt and max_tokens of each request.
"""


@renamed_fields(max_batch_tokens="pack_tokens")
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
    chunk_tokens: int = 4096
    """What a group (assumption B14) or an instance of the live cluster cuts prompts to. How long a simulated node
    takes alone does not depend on it."""
    cache_tokens: int = 3_000_000
    """KVCache each node holds in DRAM (FAST'25 §2.2: about 1 TB)."""
    ssd_tokens: int = 0
    """KVCache each node holds on SSD besides; 0 where it has none. A prefix is read from there where that is
    faster than computing it again (FAST'25 Eq. 2)."""
    prefix_caching: bool = True
    """Whether computed prompts are kept, and found by those that begin alike."""
    shared_cache: bool = False
    """One Mooncake Store over all nodes instead of a cache per node (FAST'25 §5.3). Each block lies on one node;
    the others read it over the network (assumption B55)."""
    eviction: str = "lru"
    pack_tokens: int = 1
    """Computed tokens up to which waiting prompts are packed into one iteration; a longer prompt is computed
    alone. 1 computes one prompt at a time (assumption B56)."""
    fetch_timeout_s: float = 30.0
    """How long a prompt waits for a prefix from another node, its reading from SSD there included; then it is
    computed. The default is that of Mooncake's Transfer Engine (assumption B57)."""
    overtaking: bool = False
    """Whether a prompt whose prefix is still on its way lets those behind it start; else all start in order."""

    def __post_init__(self) -> None:
        _require_positive(self, "nodes", "prefill_group", "chunk_tokens", "cache_tokens", "pack_tokens")
        if self.ssd_tokens < 0:
            raise ValueError(f"PrefillPool.ssd_tokens is {self.ssd_tokens!r}; at least 0 is needed")
        if not 0 < self.fetch_timeout_s < inf:
            raise ValueError(
                f"PrefillPool.fetch_timeout_s is {self.fetch_timeout_s!r}; allowed are finite positive times"
            )
        if self.nodes % self.prefill_group:
            raise ValueError(
                f"PrefillPool.nodes is {self.nodes}; a multiple of prefill_group, {self.prefill_group}, is needed"
            )
        if self.prefill_group > 1 and self.pack_tokens > 1:
            raise ValueError(
                f"PrefillPool.pack_tokens is {self.pack_tokens} with groups of {self.prefill_group}"
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
    max_requests: int | None = None
    """Most requests that decode at once on a node; None is as many as fit."""
    keep_answers: bool = False
    """Whether a node sends the whole blocks of a complete answer to the prefill node of its prompt, which keeps
    them for the next turn. The paper's nodes do not: the next turn prefills the answer (assumption B10)."""

    def __post_init__(self) -> None:
        _require_positive(self, "nodes", "device_tokens")
        if self.max_requests is not None:
            _require_positive(self, "max_requests")


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
    max_request_tokens: int = 200_000
    """Most tokens of a prompt and its answer; the longest requests of the synthetic trace fit."""
    memory_block_tokens: int = 16

    def __post_init__(self) -> None:
        _require_positive(
            self, "nodes", "device_tokens", "memory_block_tokens",
            "max_batch_tokens", "max_requests", "max_request_tokens",
        )  # fmt: skip

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster and its policies, for either runtime.

    `disaggregated` and `coupled` make clusters of the papers' nodes, `small` and `small_coupled` such that run on
    one machine.

    Raises:
        ValueError: when the pools are not a prefill and a decode pool, or one coupled pool; a trace's block is not
            a whole number of memory blocks; or a policy needs what the cluster does not give.
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
    admission: AdmissionPolicy = field(default_factory=AdmitAll)
    slo: SLO = field(default_factory=SLO)

    def __post_init__(self) -> None:
        _require_positive(self, "block_size_tokens")
        if tuple(map(type, self.pools)) not in {(PrefillPool, DecodePool), (CoupledPool,)}:
            raise ValueError(f"pools {self.pools}; allowed are a prefill and a decode pool, or one coupled pool")
        gives: set[Need] = {"decode_requests", "lengths", "priority"}
        match self.pools:
            case (prefill, decode):
                gives.add("double_check")
                if decode.keep_answers and not prefill.prefix_caching:
                    raise ValueError(
                        "DecodePool.keep_answers needs PrefillPool.prefix_caching, to find them again"
                    )
                if prefill.prefix_caching:
                    gives |= {"local_prefixes", "remote_prefixes"}
            case (coupled,):
                gives.add("coupled_instances")
                if coupled.prefix_caching:
                    gives.add("local_prefixes")
                if self.block_size_tokens % coupled.memory_block_tokens:
                    raise ValueError(
                        f"ClusterSpec.block_size_tokens is {self.block_size_tokens}, no multiple of memory blocks"
                        f" of {coupled.memory_block_tokens} tokens"
                    )
        check_needs("ClusterSpec", gives, placement=self.placement, admission=self.admission)

    @property
    def roles(self) -> dict[str, Role]:
        """The role of each instance by its name, prefill first; a group of prefill nodes is one instance."""
        match self.pools:
            case (prefill, decode):
                counts: dict[Role, int] = {
                    "prefill": prefill.nodes // prefill.prefill_group, "decode": decode.nodes,
                }  # fmt: skip
            case (coupled,):
                counts = {"coupled": coupled.nodes}
        return {f"{role}-{i}": role for role, count in counts.items() for i in range(count)}

    @classmethod
    def disaggregated(cls, *, prefill_nodes: int = 8, decode_nodes: int = 8, **settings: Any) -> Self:
        """Separate pools.

        Args:
            prefill_nodes: nodes that prefill.
            decode_nodes: nodes that decode.
            **settings: further fields of `PrefillPool`, of `DecodePool` and of the spec.
        """
        prefill = PrefillPool(nodes=prefill_nodes, **_fields_of(PrefillPool, settings))
        decode = DecodePool(nodes=decode_nodes, **_fields_of(DecodePool, settings))
        settings.setdefault("placement", KVCacheCentric() if prefill.prefix_caching else LoadBalance())
        return cls(pools=(prefill, decode), **settings)

    @classmethod
    def coupled(cls, **settings: Any) -> Self:
        """Nodes that prefill and decode, behind a router that counts their requests (assumption B39).

        Args:
            **settings: fields of `CoupledPool` and of the spec.
        """
        pool = CoupledPool(**_fields_of(CoupledPool, settings))
        settings.setdefault("placement", FewestRequests())
        return cls(pools=(pool,), **settings)

    @classmethod
    def small(cls, *, prefill_nodes: int = 1, decode_nodes: int = 1, **settings: Any) -> Self:
        """Separate pools of the size of processes on one machine, with blocks of 16 tokens.

        Args:
            prefill_nodes: nodes that prefill.
            decode_nodes: nodes that decode.
            **settings: as of `disaggregated`.
        """
        sizes: dict[str, Any] = {
            "block_size_tokens": 16, "cache_tokens": SMALL_TOKENS, "chunk_tokens": 512, "fetch_timeout_s": 2.0,
            "device_tokens": SMALL_TOKENS, "max_requests": 256,
        }  # fmt: skip
        return cls.disaggregated(prefill_nodes=prefill_nodes, decode_nodes=decode_nodes, **sizes | settings)

    @classmethod
    def small_coupled(cls, *, nodes: int = 1, **settings: Any) -> Self:
        """A small cluster of nodes that prefill and decode, under Sarathi-Serve and with prefix caching.

        Args:
            nodes: nodes that do both.
            **settings: as of `coupled`.
        """
        block = settings.setdefault("block_size_tokens", 16)
        sizes: dict[str, Any] = {
            "batching": SarathiServe(chunk_tokens=512), "prefix_caching": True, "device_tokens": SMALL_TOKENS,
            "memory_block_tokens": block,
        }  # fmt: skip
        return cls.coupled(nodes=nodes, **sizes | settings)


def _fields_of(pool: type[PrefillPool | DecodePool | CoupledPool], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that are fields of a pool, taken out of them."""
    names = [*(each.name for each in fields(pool)), *old_names(pool)]
    return {name: settings.pop(name) for name in names if name in settings}


def _require_positive(spec: object, *names: str) -> None:
    for name in names:
        if getattr(spec, name) < 1:
            raise ValueError(f"{type(spec).__name__}.{name} is {getattr(spec, name)!r}; at least 1 is needed")
