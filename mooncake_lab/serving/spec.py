"""What a live cluster is made of, and what each worker of it is told when it starts."""

from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from mooncake_lab.cluster import CoordinatorSpec
from mooncake_lab.conductor import AdmissionPolicy, AdmitAll, KVCacheCentric, LoadBalance, PlacementPolicy
from mooncake_lab.conductor.decide import Need, check_needs
from mooncake_lab.core import SLO
from mooncake_lab.serving.pacer import Pacer
from mooncake_lab.store.backends.wire import MIN_TOKEN_BYTES

_REMEMBERED_BLOCKS: Final = 2**18
"""Most blocks that a worker remembers to be in a Mooncake Store that runs elsewhere, which tells no capacity."""

Role = Literal["prefill", "decode", "coupled"]
"""What a worker does: one stage, the other, or both."""
Transfer = Literal["tcp", "mooncake"]
"""What KVCache travels by."""
PoolKind = Literal["remote", "mooncake"]
"""Whose server holds the pool: our block server, or the Mooncake Store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSpec:
    """A cluster of real engines and its policies: `simulation.ClusterSpec`, for processes.

    Raises:
        ValueError: when a number is out of range, or the roles cannot serve a request.
    """

    model: str = "random:lab-tiny"
    """A Hugging Face directory, or `random:SHAPE`."""
    seed: int = 0
    """Of random weights."""
    device: str = "auto"
    """auto takes GPUs in turn where there are any, several workers to one if need be; or cpu, cuda, cuda:1."""
    dtype: str | None = None
    backend: str = "auto"
    """Who computes: auto, dense, cpu or cuda."""
    prefill_nodes: int = 1
    decode_nodes: int = 1
    coupled_nodes: int = 0
    """Workers that do both stages, instead of the two."""
    cache_tokens: int = 65_536
    """KVCache that each prefill worker keeps in DRAM."""
    ssd_dir: str | None = None
    """Where each prefill worker keeps a folder of its own for what DRAM evicts; None has no SSD."""
    ssd_tokens: int = 0
    """KVCache that each prefill worker keeps there."""
    pool: PoolKind | None = None
    """The store below DRAM and SSD that all prefill workers share; None has none."""
    pool_tokens: int = 65_536
    """KVCache that a pool holds which the cluster starts."""
    pool_address: str | None = None
    """Where a pool runs already, as HOST:PORT; None starts one."""
    pool_token: bytes = b""
    """The secret of a block server; empty takes a random one for a server that the cluster starts."""
    decode_tokens: int = 65_536
    """KVCache that fits into the engine of a decode or coupled worker."""
    block_size_tokens: int = 16
    chunk_tokens: int = 512
    """Most prompt tokens of an iteration."""
    max_batch_tokens: int = 1
    """Computed tokens up to which a prefill worker computes waiting prompts together; a longer prompt is computed
    alone. 1 computes one prompt at a time."""
    max_model_len: int = 8192
    """Longest context; fewer where the model's window is shorter."""
    max_requests: int = 256
    """Most requests that decode at once on a worker."""
    batching: str = "sarathi_serve"
    """What coupled workers run."""
    prefix_reuse: bool = True
    layerwise: bool = True
    """Whether KVCache leaves layer by layer while prefill runs (arXiv §5.2), or all of it afterwards."""
    transfer: Transfer = "tcp"
    """How KVCache travels: over the workers' own connections, or by Mooncake's Transfer Engine.

    The latter needs the extra `mooncake`, listens on all interfaces without authentication.
    """
    transfer_bytes: int = 2**26
    """Memory of each worker that this engine may touch; what finds no room there takes the connection."""
    network_bytes_per_s: float | None = None
    """KVCache that a worker sends to others, or reads from the pool, at most; None is what the machine carries."""
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
    threads: int = 1
    """Threads of each worker's engine."""
    spares: int = 1
    """Processes that wait with the model loaded to replace a worker; without one a replacement takes seconds."""
    start_timeout_s: float = 300.0
    """How long a worker may take to start, the loading of its model included."""
    peer_timeout_s: float = 10.0
    """How long a worker may keep another waiting inside a frame."""
    fetch_timeout_s: float = 2.0
    """How long a prompt waits for a prefix from elsewhere; then it is computed."""
    heartbeat_timeout_s: float = 20.0
    """A worker that sends nothing for so long is killed and replaced."""
    log_layers: bool = False
    """Whether each layer's move is a record of its own."""
    pacer: Pacer | None = None
    """The pace of computing; None computes as fast as the machine can."""

    def __post_init__(self) -> None:
        positive = (
            "cache_tokens", "pool_tokens", "decode_tokens", "block_size_tokens", "chunk_tokens",
            "max_batch_tokens", "max_model_len", "max_requests", "transfer_bytes", "max_inflight_requests",
            "most_waiting", "expected_answer_tokens", "most_attempts", "threads", "peer_timeout_s",
            "fetch_timeout_s", "heartbeat_timeout_s", "start_timeout_s",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"LiveSpec.{name} is {getattr(self, name)!r}; a positive number is needed")
        if self.network_bytes_per_s is not None and self.network_bytes_per_s <= 0:
            raise ValueError(f"network_bytes_per_s is {self.network_bytes_per_s!r}; positive numbers are allowed")
        if self.spares < 0:
            raise ValueError(f"LiveSpec.spares is {self.spares}; 0 or more are allowed")
        counts = (self.prefill_nodes, self.decode_nodes, self.coupled_nodes)
        pair, alone = min(counts[:2]) >= 1, max(counts[:2]) == 0
        if min(counts) < 0 or not ((pair and self.coupled_nodes == 0) or (alone and self.coupled_nodes >= 1)):
            raise ValueError(
                f"a cluster of {counts[0]} prefill, {counts[1]} decode and {counts[2]} coupled workers;"
                " it needs prefill and decode workers, or coupled ones instead"
            )
        self._check_ssd()
        self._check_pool()
        if self.transfer_bytes < 2**20:
            raise ValueError(f"transfer_bytes is {self.transfer_bytes}; {2**20} are the least")
        if self.transfer == "mooncake" and self.coupled_nodes:
            raise ValueError(
                "coupled workers move no KVCache; the Transfer Engine is for prefill and decode workers"
            )
        if self.coupled_nodes and isinstance(self.placement, KVCacheCentric):
            raise ValueError("coupled workers share no store to fetch from; cache_aware is the nearest placement")
        self._check_policies()

    def _check_policies(self) -> None:
        """Refuse policies that would decide on what the views of this cluster do not hold."""
        gives: set[Need] = {"decode_requests", "lengths", "priority"}
        gives.add("coupled_instances" if self.coupled_nodes else "double_check")
        if self.prefix_reuse:
            gives.add("local_prefixes")
            if not self.coupled_nodes:
                gives.add("remote_prefixes")
        check_needs("LiveSpec", gives, placement=self.placement, admission=self.admission)

    def _check_ssd(self) -> None:
        if (self.ssd_dir is None) != (self.ssd_tokens == 0) or self.ssd_tokens < 0:
            raise ValueError(
                f"ssd_dir is {self.ssd_dir!r} and ssd_tokens {self.ssd_tokens};"
                " give a folder and a size, or neither"
            )
        if 0 < self.ssd_tokens < self.block_size_tokens:
            raise ValueError(f"ssd_tokens is {self.ssd_tokens}; a block of {self.block_size_tokens} has to fit")
        least = 8 * self.block_size_tokens
        if self.ssd_tokens and (self.coupled_nodes or self.cache_tokens < least):
            raise ValueError(
                f"{self.coupled_nodes} coupled workers and {self.cache_tokens} tokens of DRAM have no use for"
                f" an SSD; it is for prefill workers with at least {least}"
            )

    def _check_pool(self) -> None:
        if self.pool is None:
            if self.pool_address is not None or self.pool_token:
                raise ValueError(f"pool_address is {self.pool_address!r} without a kind of pool; name one")
            return
        least = 8 * self.block_size_tokens
        if self.coupled_nodes or not self.prefix_reuse or self.cache_tokens < least:
            raise ValueError(
                f"{self.coupled_nodes} coupled workers, prefix reuse {self.prefix_reuse} and {self.cache_tokens}"
                f" tokens of DRAM have no use for a pool; prefill workers that reuse, with {least} tokens, have"
            )
        if self.pool_tokens < self.block_size_tokens:
            raise ValueError(f"pool_tokens is {self.pool_tokens}; a block of {self.block_size_tokens} has to fit")
        if self.pool_address is not None and not _is_address(self.pool_address):
            raise ValueError(f"pool_address is {self.pool_address!r}; HOST:PORT is needed")
        size = len(self.pool_token)
        if self.pool == "mooncake" and size:
            raise ValueError(f"pool_token has {size} bytes; a Mooncake Store takes no secret")
        if self.pool == "remote" and (size or self.pool_address is not None) and size < MIN_TOKEN_BYTES:
            raise ValueError(
                f"pool_token has {size} bytes; a block server at an address needs the secret of that server, which"
                f" has at least {MIN_TOKEN_BYTES}"
            )

    @property
    def places(self) -> PlacementPolicy:
        """The placement policy that is in force."""
        if self.placement is not None:
            return self.placement
        return LoadBalance() if self.coupled_nodes else KVCacheCentric()

    @property
    def roles(self) -> dict[str, Role]:
        """The role of each worker by its name, prefill first."""
        counted: tuple[tuple[Role, int], ...] = (
            ("prefill", self.prefill_nodes), ("decode", self.decode_nodes), ("coupled", self.coupled_nodes),
        )  # fmt: skip
        return {f"{role}-{i}": role for role, count in counted for i in range(count)}


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is told when it starts."""

    name: str
    role: Role
    index: int
    """Its place among all workers, from which its GPU follows."""
    token: bytes
    """The secret that all workers of a cluster share."""
    model: str
    seed: int
    device: str
    dtype: str | None
    backend: str
    cache_tokens: int
    ssd_dir: str | None
    ssd_tokens: int
    pool: PoolKind | None
    pool_tokens: int
    """KVCache in a Mooncake Store that a worker remembers at most; a block server tells its capacity."""
    pool_token: bytes
    """The secret of its block server."""
    decode_tokens: int
    block_size_tokens: int
    chunk_tokens: int
    max_batch_tokens: int
    max_model_len: int
    max_requests: int
    batching: str
    prefix_reuse: bool
    layerwise: bool
    transfer: Transfer
    transfer_bytes: int
    network_bytes_per_s: float | None
    threads: int
    peer_timeout_s: float
    fetch_timeout_s: float
    log_layers: bool
    pacer: Pacer | None


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdecimal() and 0 < int(port) < 2**16


def worker_spec(spec: LiveSpec, name: str, token: bytes) -> WorkerSpec:
    """What the worker of this name is told."""
    shared = {key: getattr(spec, key) for key in WorkerSpec.__struct_fields__ if hasattr(spec, key)}
    shared["pool_token"] = spec.pool_token or token
    if spec.pool_address is not None:
        shared["pool_tokens"] = _REMEMBERED_BLOCKS * spec.block_size_tokens
    return WorkerSpec(name=name, role=spec.roles[name], index=list(spec.roles).index(name), token=token, **shared)


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
