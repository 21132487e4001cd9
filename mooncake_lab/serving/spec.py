"""What only a live cluster has, what of a `ClusterSpec` it can do, and what each worker is told when it starts."""

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import msgspec

from mooncake_lab.batching import BATCHING_POLICIES, BatchingPolicy
from mooncake_lab.cluster import ClusterSpec, CoordinatorRules, CoupledPool, PrefillPool, Role
from mooncake_lab.core.renamed import renamed_fields
from mooncake_lab.engine.config import NUMBER_BYTES
from mooncake_lab.serving.pacer import Pacer
from mooncake_lab.store.eviction import EVICTION_POLICIES

_REMEMBERED_BLOCKS: Final = 2**18
"""Most blocks that a worker remembers to be in a Mooncake Store that runs elsewhere, which tells no capacity."""
_MAY_BE_ZERO: Final = {"seed", "spares"}
_LEAST_DRAM_BLOCKS: Final = 8
"""Blocks that a worker needs in DRAM above an SSD or a shared store."""

SharedStoreKind = Literal["remote", "mooncake"]
"""The server of the shared store: our block server, or the Mooncake Store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a process loads before it knows which worker it will be."""

    model: str = "random:lab-tiny"
    """A Hugging Face directory, or `random:SHAPE`."""
    seed: int = 0
    """Seed of random weights."""
    device: str = "auto"
    """auto takes GPUs in turn where there are any, several workers to one if need be; or cpu, cuda, cuda:1."""
    dtype: str | None = None
    backend: str = "auto"
    """Who computes: auto, dense, cpu or cuda."""
    max_model_len: int = 8192
    """Longest context; fewer where the model's context length is shorter."""
    threads: int = 1
    """Threads of each worker's engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(ModelOptions):
    """What all workers of a cluster are told besides."""

    ssd_dir: str | None = None
    """Where each prefill worker keeps a folder of its own, of `PrefillPool.ssd_tokens`; None has no SSD."""
    shared_store: SharedStoreKind | None = None
    """The store below DRAM and SSD that all prefill workers share; None has none."""
    shared_store_tokens: int = 65_536
    """KVCache in the shared store; of one that runs elsewhere, what a worker remembers to be there."""
    transfer: Literal["tcp", "mooncake"] = "tcp"
    """How KVCache travels: over the workers' own connections, or by Mooncake's Transfer Engine.

    The latter needs the extra `mooncake`, listens on all interfaces without authentication.
    """
    transfer_bytes: int = 2**26
    """Memory of each worker that this engine may touch; what finds no room there takes the connection."""
    network_bytes_per_s: float | None = None
    """KVCache that a worker sends to others, or reads from the shared store, at most; None is no limit."""
    peer_timeout_s: float = 10.0
    """How long a worker may keep another waiting inside a frame."""
    log_layers: bool = False
    """Whether each layer's move is a record of its own."""
    pacer: Pacer | None = None
    """The pace of computing; None computes as fast as the machine can."""


@renamed_fields(
    pool="shared_store", pool_tokens="shared_store_tokens", pool_address="shared_store_address",
    most_waiting="max_kv_oversubscription",
)  # fmt: skip
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions(WorkerOptions):
    """How a cluster of real engines runs on this machine.

    Raises:
        ValueError: when a number is out of range, or an address cannot be one.
    """

    shared_store_address: str | None = None
    """HOST:PORT of a Mooncake Store that runs already; None starts and stops the store with the cluster."""
    max_inflight_requests: int = 1024
    """Requests in the cluster at once; one more is refused."""
    max_kv_oversubscription: float = 4.0
    """KVCache that all requests in flight may be expected to need, over that of all decode engines. What has no
    room in an engine waits in host memory. A request that would exceed it is refused, unless it is alone."""
    expected_answer_tokens: int = 512
    """How long an answer is expected to be, as far as the request allows, until it is longer than half of that.
    Our assumption: no request tells how long its answer will be."""
    max_attempts: int = 5
    """How often a request is placed before it is given up: it may be what kills workers."""
    spares: int = 1
    """Processes that wait with the model loaded to replace a worker; without one a replacement takes seconds."""
    start_timeout_s: float = 300.0
    """How long a worker may take to start, the loading of its model included."""
    heartbeat_timeout_s: float = 20.0
    """A worker that sends nothing for so long is killed and replaced."""
    worker_timeout_s: float = 60.0
    """A request that no worker can serve waits so long for one to come up; then it fails."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in _MAY_BE_ZERO else 1 if isinstance(value, int) else 1e-9
            if isinstance(value, int | float) and not isinstance(value, bool) and not value >= least:
                raise ValueError(f"LiveOptions.{each.name} is {value!r}; allowed is {least} or more")
        _refuse_if(
            self.dtype not in {None, *NUMBER_BYTES},
            f"LiveOptions.dtype is {self.dtype!r}; allowed are None, {', '.join(NUMBER_BYTES)}",
        )
        _refuse_if(self.transfer_bytes < 2**20, f"transfer_bytes is {self.transfer_bytes}; {2**20} are the least")
        _refuse_if(
            self.shared_store_address is not None and self.shared_store != "mooncake",
            f"shared_store_address is {self.shared_store_address!r} and shared_store {self.shared_store!r};"
            " only a Mooncake Store has one",
        )
        _refuse_if(
            self.shared_store_address is not None and not _is_address(self.shared_store_address),
            f"shared_store_address is {self.shared_store_address!r}; HOST:PORT is needed, with a port from 1 to"
            " 65535",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(WorkerOptions):
    """What one worker is told when it starts: its options, and its part of the cluster's spec."""

    name: str
    role: Role
    index: int
    """Place of the worker among all, from which its GPU follows."""
    token: bytes
    """The secret that all workers of a cluster share, and its block server."""
    block_size_tokens: int
    streams_layers: bool
    prefix_caching: bool = False
    cache_tokens: int = 0
    eviction: str = "lru"
    """Eviction policy of DRAM and SSD, by its name; an engine has LRU."""
    ssd_tokens: int = 0
    fetch_timeout_s: float = 0.0
    chunk_tokens: int = 0
    device_tokens: int = 0
    pack_tokens: int = 0
    """Tokens up to which a prefill worker packs prompts."""
    max_batch_tokens: int = 0
    """Tokens that a coupled worker computes per iteration at most."""
    max_requests: int | None = None
    max_request_tokens: int | None = None
    batching: tuple[str, dict[str, Any]] = ("", {})
    """The policy of a coupled worker, by its name and its parameters."""

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt with its answer that this worker takes; the model's context length may be shorter."""
        return min(self.max_model_len, self.max_request_tokens or self.max_model_len)


def check_live(spec: ClusterSpec, options: LiveOptions) -> None:
    """Refuse what a live cluster cannot do of a spec, and options that have no use with it.

    Raises:
        ValueError: naming what it cannot do, or what has no use.
    """
    match spec.pools:
        case (prefill, _):
            _check_prefill(prefill, spec.block_size_tokens, options)
        case (coupled,):
            _check_coupled(coupled, spec.block_size_tokens, options)


def _check_prefill(pool: PrefillPool, block: int, options: LiveOptions) -> None:
    unable = {
        "prefill_group": (pool.prefill_group, 1, "each worker computes its prompts alone"),
        "shared_cache": (pool.shared_cache, False, "its workers share LiveOptions.shared_store instead"),
        "overtaking": (pool.overtaking, False, "prompts start in order"),
    }
    for name, (value, only, why) in unable.items():
        _refuse_if(value != only, f"PrefillPool.{name} is {value!r}; a live cluster has {only!r}: {why}")
    _refuse_if(
        (options.ssd_dir is None) != (pool.ssd_tokens == 0),
        f"ssd_dir is {options.ssd_dir!r} and ssd_tokens {pool.ssd_tokens}; give a folder and a size, or neither",
    )
    known = [name for name in EVICTION_POLICIES if name != "belady"]  # which has to know the future
    _refuse_if(
        pool.eviction not in known,
        f"PrefillPool.eviction is {pool.eviction!r}; a live cluster knows {', '.join(known)}",
    )
    least = _LEAST_DRAM_BLOCKS * block
    for name, size in (
        ("ssd_tokens", pool.ssd_tokens),
        ("shared_store_tokens", options.shared_store and options.shared_store_tokens),
    ):
        _refuse_if(bool(size) and size < block, f"{name} is {size}; a block of {block} has to fit")
        _refuse_if(
            bool(size) and (pool.cache_tokens < least or not pool.prefix_caching),
            f"{pool.cache_tokens} tokens of DRAM and prefix caching {pool.prefix_caching} have no use for {name};"
            f" workers that cache prefixes, with {least}, have",
        )


def _check_coupled(pool: CoupledPool, block: int, options: LiveOptions) -> None:
    _refuse_if(
        pool.eviction != "lru",
        f"CoupledPool.eviction is {pool.eviction!r}; a live cluster has 'lru': its engines evict what was used"
        " least recently",
    )
    _refuse_if(
        pool.memory_block_tokens != block,
        f"CoupledPool.memory_block_tokens is {pool.memory_block_tokens} and block_size_tokens {block}; a live"
        " cluster has one size for both",
    )
    for name, value in (("ssd_dir", options.ssd_dir), ("shared_store", options.shared_store)):
        _refuse_if(value is not None, f"coupled workers have no store, and so no use for {name}")
    _refuse_if(
        options.transfer == "mooncake",
        "coupled workers move no KVCache; the Transfer Engine is for prefill and decode workers",
    )
    _named(pool.batching)


def _named(policy: BatchingPolicy) -> tuple[str, dict[str, Any]]:
    """A batching policy as workers are told of it.

    Raises:
        ValueError: when it is a user's own, which worker processes do not know.
    """
    for name, kind in BATCHING_POLICIES.items():
        if type(policy) is kind:
            return name, msgspec.to_builtins(policy)
    raise ValueError(
        f"CoupledPool.batching is {policy}; the workers of a live cluster know {', '.join(BATCHING_POLICIES)}"
    )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _refuse_if(holds: bool, sentence: str) -> None:
    if holds:
        raise ValueError(sentence)


def _told(kind: type[ModelOptions], *sources: Any) -> dict[str, Any]:
    """The fields of this kind that the sources have."""
    wanted = {each.name for each in fields(kind)}
    return {
        each.name: getattr(source, each.name)
        for source in sources
        for each in fields(source)
        if each.name in wanted
    }


def model_options(options: ModelOptions) -> ModelOptions:
    """What the processes of a cluster load, from what the cluster or one of its workers is told."""
    return ModelOptions(**_told(ModelOptions, options))


def worker_spec(spec: ClusterSpec, options: LiveOptions, name: str, token: bytes) -> WorkerSpec:
    """What the worker of this name is told."""
    roles = spec.roles
    pool = spec.pools[-1 if roles[name] == "decode" else 0]
    told = _told(WorkerSpec, options, spec, pool)
    if isinstance(pool, CoupledPool):
        told["batching"] = _named(pool.batching)
    if options.shared_store_address is not None:
        told["shared_store_tokens"] = _REMEMBERED_BLOCKS * spec.block_size_tokens
    return WorkerSpec(name=name, role=roles[name], index=list(roles).index(name), token=token, **told)


def coordinator_rules(options: LiveOptions) -> CoordinatorRules:
    """The rules of a live cluster: its requests wait for workers, and a policy's error costs one request."""
    return CoordinatorRules(
        wait_for_instances=True,
        longest_wait_s=options.worker_timeout_s,
        max_inflight_requests=options.max_inflight_requests,
        max_attempts=options.max_attempts,
        reject_policy_errors=True,
    )
