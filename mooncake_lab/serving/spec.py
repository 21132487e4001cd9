"""What a live cluster is made of, and what each worker of it is told when it starts."""

import re
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from mooncake_lab.cluster import CoordinatorSpec
from mooncake_lab.conductor import AdmissionPolicy, AdmitAll, KVCacheCentric, LoadBalance, PlacementPolicy
from mooncake_lab.conductor.decide import Need, check_needs
from mooncake_lab.core import SLO
from mooncake_lab.serving.pacer import Pacer

_REMEMBERED_BLOCKS: Final = 2**18
"""Most blocks that a worker remembers to be in a Mooncake Store that runs elsewhere, which tells no capacity."""
_MAY_BE_ZERO: Final = {"seed", "prefill_nodes", "decode_nodes", "coupled_nodes", "ssd_tokens", "spares"}

Role = Literal["prefill", "decode", "coupled"]
"""What a worker does: one stage, the other, or both."""
PoolKind = Literal["remote", "mooncake"]
"""Whose server holds the pool: our block server, or the Mooncake Store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a process loads before it knows which worker it will be."""

    model: str = "random:lab-tiny"
    """A Hugging Face directory, or `random:SHAPE`."""
    seed: int = 0
    """Of random weights."""
    device: str = "auto"
    """auto takes GPUs in turn where there are any, several workers to one if need be; or cpu, cuda, cuda:1."""
    dtype: str | None = None
    backend: str = "auto"
    """Who computes: auto, dense, cpu or cuda."""
    max_model_len: int = 8192
    """Longest context; fewer where the model's window is shorter."""
    threads: int = 1
    """Threads of each worker's engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ModelSpec):
    """What all workers of a cluster are told."""

    cache_tokens: int = 65_536
    """KVCache that each prefill worker keeps in DRAM."""
    ssd_dir: str | None = None
    """Where each prefill worker keeps a folder of its own for what DRAM evicts; None has no SSD."""
    ssd_tokens: int = 0
    """KVCache that each prefill worker keeps there."""
    pool: PoolKind | None = None
    """The store below DRAM and SSD that all prefill workers share; None has none."""
    pool_tokens: int = 65_536
    """KVCache in the pool; of a pool that runs elsewhere, what a worker remembers to be there."""
    decode_tokens: int = 65_536
    """KVCache that fits into the engine of a decode or coupled worker."""
    block_size_tokens: int = 16
    chunk_tokens: int = 512
    """Most prompt tokens of an iteration."""
    max_batch_tokens: int = 1
    """Computed tokens up to which a prefill worker computes waiting prompts together; a longer prompt is computed
    alone. 1 computes one prompt at a time."""
    max_requests: int = 256
    """Most requests that decode at once on a worker."""
    batching: str = "sarathi_serve"
    """What coupled workers run."""
    prefix_reuse: bool = True
    layerwise: bool = True
    """Whether KVCache leaves layer by layer while prefill runs (arXiv §5.2), or all of it afterwards."""
    transfer: Literal["tcp", "mooncake"] = "tcp"
    """How KVCache travels: over the workers' own connections, or by Mooncake's Transfer Engine.

    The latter needs the extra `mooncake`, listens on all interfaces without authentication.
    """
    transfer_bytes: int = 2**26
    """Memory of each worker that this engine may touch; what finds no room there takes the connection."""
    network_bytes_per_s: float | None = None
    """KVCache that a worker sends to others, or reads from the pool, at most; None is what the machine carries."""
    peer_timeout_s: float = 10.0
    """How long a worker may keep another waiting inside a frame."""
    fetch_timeout_s: float = 2.0
    """How long a prompt waits for a prefix from elsewhere; then it is computed."""
    log_layers: bool = False
    """Whether each layer's move is a record of its own."""
    pacer: Pacer | None = None
    """The pace of computing; None computes as fast as the machine can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSpec(WorkerSettings):
    """A cluster of real engines and its policies: `simulation.ClusterSpec`, for processes.

    Raises:
        ValueError: when a number is out of range, or the roles cannot serve a request.
    """

    pool_address: str | None = None
    """HOST:PORT of a Mooncake Store that runs already; None starts and stops the pool with the cluster."""
    prefill_nodes: int = 1
    decode_nodes: int = 1
    coupled_nodes: int = 0
    """Workers that do both stages, instead of the two."""
    first_shown_by: Literal["decode", "prefill"] = "decode"
    """Who shows the first token: the decode worker when the KVCache is there, or the prefill worker."""
    placement: PlacementPolicy | None = None
    """None takes Algorithm 1, or for coupled workers, which share no store, the least loaded one."""
    admission: AdmissionPolicy = field(default_factory=AdmitAll)
    slo: SLO = field(default_factory=SLO)
    max_inflight_requests: int = 1024
    """Requests in the cluster at once; one more is refused."""
    most_waiting: float = 4.0
    """KVCache that all requests under way are expected to need, in decode engines full of it. What finds no room
    in an engine waits in host memory. A request that would exceed it is refused, unless it is alone."""
    expected_answer_tokens: int = 512
    """How long an answer is expected to be, as far as the request allows, until it is longer than half of that.
    Our assumption: no request tells how long its answer will be."""
    most_attempts: int = 5
    """How often a request is placed before it is given up: it may be what kills workers."""
    spares: int = 1
    """Processes that wait with the model loaded to replace a worker; without one a replacement takes seconds."""
    start_timeout_s: float = 300.0
    """How long a worker may take to start, the loading of its model included."""
    heartbeat_timeout_s: float = 20.0
    """A worker that sends nothing for so long is killed and replaced."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in _MAY_BE_ZERO else 1 if isinstance(value, int) else 1e-9
            if isinstance(value, int | float) and not isinstance(value, bool) and not value >= least:
                raise ValueError(f"LiveSpec.{each.name} is {value!r}; allowed is {least} or more")
        self._check_nodes()
        self._check_stores()
        gives: set[Need] = {"decode_requests", "lengths", "priority"}
        gives.add("coupled_instances" if self.coupled_nodes else "double_check")
        if self.prefix_reuse:
            gives |= {"local_prefixes"} if self.coupled_nodes else {"local_prefixes", "remote_prefixes"}
        check_needs("LiveSpec", gives, placement=self.placement, admission=self.admission)

    def _check_nodes(self) -> None:
        prefill, decode, coupled = self.prefill_nodes, self.decode_nodes, self.coupled_nodes
        _refuse_if(
            bool(prefill + decode) == bool(coupled) or bool(prefill) != bool(decode),
            f"a cluster of {prefill} prefill, {decode} decode and {coupled} coupled workers;"
            " it needs prefill and decode workers, or coupled ones instead",
        )
        _refuse_if(self.transfer_bytes < 2**20, f"transfer_bytes is {self.transfer_bytes}; {2**20} are the least")
        _refuse_if(
            self.transfer == "mooncake" and coupled > 0,
            "coupled workers move no KVCache; the Transfer Engine is for prefill and decode workers",
        )
        _refuse_if(
            coupled > 0 and isinstance(self.placement, KVCacheCentric),
            "coupled workers share no store to fetch from; cache_aware is the nearest placement",
        )

    def _check_stores(self) -> None:
        """Refuse an SSD or a pool that nothing would be put into, or that cannot be found."""
        _refuse_if(
            self.pool_address is not None and self.pool != "mooncake",
            f"pool_address is {self.pool_address!r} and pool {self.pool!r}; only a Mooncake Store has one",
        )
        _refuse_if(
            self.pool_address is not None and not re.fullmatch(r".+:\d{1,5}", self.pool_address),
            f"pool_address is {self.pool_address!r}; HOST:PORT is needed",
        )
        _refuse_if(
            (self.ssd_dir is None) != (self.ssd_tokens == 0),
            f"ssd_dir is {self.ssd_dir!r} and ssd_tokens {self.ssd_tokens}; give a folder and a size, or neither",
        )
        block, least = self.block_size_tokens, 8 * self.block_size_tokens
        for name, size in (("ssd_tokens", self.ssd_tokens), ("pool_tokens", self.pool and self.pool_tokens)):
            _refuse_if(bool(size) and size < block, f"{name} is {size}; a block of {block} has to fit")
            _refuse_if(
                bool(size) and bool(self.coupled_nodes or self.cache_tokens < least or not self.prefix_reuse),
                f"{self.coupled_nodes} coupled workers, {self.cache_tokens} tokens of DRAM and prefix reuse"
                f" {self.prefix_reuse} have no use for {name}; prefill workers that reuse, with {least}, have",
            )

    @property
    def places(self) -> PlacementPolicy:
        """The placement policy that is in force."""
        return self.placement or (LoadBalance() if self.coupled_nodes else KVCacheCentric())

    @property
    def roles(self) -> dict[str, Role]:
        """The role of each worker by its name, prefill first."""
        counted: tuple[tuple[Role, int], ...] = (
            ("prefill", self.prefill_nodes), ("decode", self.decode_nodes), ("coupled", self.coupled_nodes),
        )  # fmt: skip
        return {f"{role}-{i}": role for role, count in counted for i in range(count)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(WorkerSettings):
    """What one worker is told when it starts."""

    name: str
    role: Role
    index: int
    """Its place among all workers, from which its GPU follows."""
    token: bytes
    """The secret that all workers of a cluster share, and its block server."""


def _refuse_if(holds: bool, sentence: str) -> None:
    if holds:
        raise ValueError(sentence)


def _settings(kind: type[ModelSpec], spec: ModelSpec) -> dict[str, Any]:
    """The settings of this kind that a spec has."""
    return {each.name: getattr(spec, each.name) for each in fields(kind)}


def model_spec(spec: ModelSpec) -> ModelSpec:
    """What the processes of a cluster load, from what the cluster or one of its workers is told."""
    return ModelSpec(**_settings(ModelSpec, spec))


def worker_spec(spec: LiveSpec, name: str, token: bytes) -> WorkerSpec:
    """What the worker of this name is told."""
    index, settings = list(spec.roles).index(name), _settings(WorkerSettings, spec)
    if spec.pool_address is not None:
        settings["pool_tokens"] = _REMEMBERED_BLOCKS * spec.block_size_tokens
    return WorkerSpec(name=name, role=spec.roles[name], index=index, token=token, **settings)


def coordinator_spec(spec: LiveSpec) -> CoordinatorSpec:
    """The rules of the live cluster: its requests wait for workers, and a policy's error costs one request."""
    return CoordinatorSpec(
        placement=spec.places,
        admission=spec.admission,
        slo=spec.slo,
        first_shown_by=spec.first_shown_by,
        wait_for_workers=True,
        max_inflight_requests=spec.max_inflight_requests,
        max_attempts=spec.most_attempts,
        reject_policy_errors=True,
    )
