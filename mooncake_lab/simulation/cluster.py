"""The cluster in virtual time: requests arrive, the Conductor decides, instances act, the log remembers."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import simpy

from mooncake_lab.conductor import (
    AdmissionPolicy,
    AdmitAll,
    ClusterView,
    DecodeView,
    Estimator,
    KVCacheCentric,
    LatencyEstimator,
    Placement,
    PlacementPolicy,
    PrefillView,
)
from mooncake_lab.core import SLO, FirstToken, Moved, Record, Request, TracedRequest, blocks_for
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.decode import DecodeInstance
from mooncake_lab.simulation.frontdoor import FrontDoor
from mooncake_lab.simulation.network import Network
from mooncake_lab.simulation.pool import PrefixPool
from mooncake_lab.simulation.prefill import Job, PrefillInstance


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance dies, with all KVCache it holds. Nobody's request is lost: they are placed again."""

    instance: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A disaggregated cluster and its policies.

    Raises:
        ValueError: when a count or a capacity is not positive.
    """

    prefill_nodes: int = 8
    decode_nodes: int = 8
    cache_tokens: int = 3_000_000
    """KVCache each prefill node holds in DRAM (FAST'25 §2.2: about 1 TB)."""
    decode_tokens: int = 1_330_000
    """KVCache that fits into a decode node's GPU memory."""
    shared_cache: bool = False
    """One Mooncake Store over all prefill nodes instead of a cache a node (FAST'25 §5.3)."""
    eviction: str = "lru"
    block_size_tokens: int = 512
    first_shown_by: Literal["decode", "prefill"] = "decode"
    """Who shows the first token to the user: the decode instance when the KVCache is there, so that TTFT includes
    transfer and load as in FAST'25 Fig. 14, or the prefill instance when it is computed."""
    placement: PlacementPolicy = field(default_factory=KVCacheCentric)
    failures: tuple[Failure, ...] = ()
    admission: AdmissionPolicy = field(default_factory=AdmitAll)
    slo: SLO = field(default_factory=SLO)

    def __post_init__(self) -> None:
        for name in ("prefill_nodes", "decode_nodes", "cache_tokens", "decode_tokens", "block_size_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"ClusterSpec.{name} is {getattr(self, name)!r}; at least 1 is needed")


class Cluster:
    """Prefill and decode pools under one Conductor, simulated with one latency model as its clock.

    Args:
        spec: nodes and policies.
        model: how long everything really takes.
        estimate: what the Conductor believes; the truth unless an experiment says otherwise.
    """

    def __init__(self, spec: ClusterSpec, model: LatencyModel, estimate: Estimator | None = None) -> None:
        self.log: list[Record] = []
        self._spec = spec
        self._model = model
        self._estimate = estimate or LatencyEstimator(model)
        self._env = simpy.Environment()
        self._network = Network(self._env, model.transfer.bytes_per_s, model.transfer.latency_s)
        names = [f"prefill-{i}" for i in range(spec.prefill_nodes)]
        self.pool = PrefixPool(
            names,
            capacity_tokens=spec.cache_tokens,
            bytes_per_token=model.shape.kv_bytes_per_token,
            block_size_tokens=spec.block_size_tokens,
            eviction=spec.eviction,
            shared=spec.shared_cache,
        )
        self._prefill = {name: self._prefill_instance(name) for name in names}
        self._decode = {
            name: DecodeInstance(self._env, name, model, spec.decode_tokens, self.log.append, self._resume)
            for name in (f"decode-{i}" for i in range(spec.decode_nodes))
        }
        self._streams: dict[Job, simpy.Event] = {}
        self._under_way: dict[int, tuple[TracedRequest, Placement]] = {}  # placed, and not yet decoding
        self._shown: dict[int, int] = {}  # tokens that users saw before decoding, or before their instance died
        self._in_prompt: dict[int, int] = {}  # those of them that a death made part of the prompt
        self._resumed: set[int] = set()  # whose next token prefill computes
        for failure in spec.failures:
            self._plan_death(failure)
        self._door = FrontDoor(
            env=self._env,
            placement=spec.placement,
            admission=spec.admission,
            estimate=self._estimate,
            slo=spec.slo,
            schedule_s=model.schedule_s,
            view=self.view,
            place=self._place,
            log=self.log.append,
        )

    def run(self, requests: Iterable[TracedRequest], until_s: float | None = None) -> list[Record]:
        """Serve requests in order of arrival until all are done, or until the horizon; the run's log."""
        self._door.serve(requests)
        self._env.run(until=until_s)
        return self.log

    def watch(self, every_s: float, look: Callable[[float], None]) -> None:
        """Look at the cluster every so many seconds from now on; such a run needs a horizon."""
        self._env.process(self._watching(every_s, look))

    def _watching(self, every_s: float, look: Callable[[float], None]) -> Generator[simpy.Event, Any, None]:
        while True:
            look(self._env.now)
            yield self._env.timeout(every_s)

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about this request now; looking changes nothing."""
        matches = self.pool.matches(request)
        flows_from = self._network.flows_from
        prefill = [
            PrefillView(
                name,
                instance.backlog_s,
                instance.queued_requests,
                instance.assigned_requests,
                matched,
                flows_from(name),
            )
            for (name, instance), matched in zip(self._prefill.items(), matches, strict=True)
            if instance.alive
        ]
        decode = [
            DecodeView(name, instance.requests, instance.context_tokens, instance.capacity_tokens)
            for name, instance in self._decode.items()
            if instance.alive
        ]
        return ClusterView(self._env.now, tuple(prefill), tuple(decode))

    def _prefill_instance(self, name: str) -> PrefillInstance:
        return PrefillInstance(
            self._env,
            name,
            self._model,
            self.pool,
            log=self.log.append,
            started=self._stream,
            computed=self._hand_over,
            wanted=lambda job: self._is_under_way(job.traced, job.placement),
        )

    def _place(self, traced: TracedRequest, placement: Placement) -> None:
        request = traced.request
        self._under_way[request.id] = (traced, placement)
        self._decode[placement.decode].promise(traced)
        believed_s = self._estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        fetched = self._fetch(request, placement) if placement.fetch_from else None
        self._prefill[placement.prefill].submit(Job(traced, placement, believed_s, fetched))

    def _fetch(self, request: Request, placement: Placement) -> simpy.Event:
        """Copy prefix blocks from their holder; they stay, which is how hot blocks spread (FAST'25 §4.2)."""
        source = str(placement.fetch_from)
        size = placement.fetched_tokens * self._model.shape.kv_bytes_per_token
        done = self._network.transfer(source, placement.prefill, size)
        start_s = self._env.now

        def arrived(_: simpy.Event) -> None:
            if not (self._prefill[source].alive and self._prefill[placement.prefill].alive):
                return  # the bytes died with their sender, or with who was to keep them
            blocks = -(-placement.reused_tokens // request.block_size_tokens)
            self.pool.keep(placement.prefill, request, blocks)
            self._moved(request, source, placement.prefill, start_s, size)

        done.callbacks.append(arrived)
        return done

    def _stream(self, job: Job) -> None:
        """Each layer's KVCache leaves for the decode instance while the next layer is computed (arXiv §5.2)."""
        request, placement = job.traced.request, job.placement
        size = request.input_tokens * self._model.shape.kv_bytes_per_token
        self._streams[job] = self._network.transfer(placement.prefill, placement.decode, size)

    def _hand_over(self, job: Job) -> None:
        stream = self._streams.pop(job)
        if not self._is_under_way(job.traced, job.placement):
            return
        if self._spec.first_shown_by == "prefill" and not self._shown.get(job.traced.request.id):
            self._shown[job.traced.request.id] = 1
            self.log.append(FirstToken(at_s=self._env.now, request_id=job.traced.request.id))
        self._env.process(self._deliver(job, stream))

    def _deliver(self, job: Job, stream: simpy.Event) -> Generator[simpy.Event, Any, None]:
        """The last layer, the rest of the stream if the network is busy, then host memory to GPU memory."""
        request, placement = job.traced.request, job.placement
        size = request.input_tokens * self._model.shape.kv_bytes_per_token
        start_s = self._env.now
        last_layer_s = self._model.transfer.seconds(size / self._model.shape.layers)
        yield self._env.timeout(last_layer_s)
        if not stream.processed:
            yield stream
        if not self._is_under_way(job.traced, placement):
            return
        self._moved(request, placement.prefill, placement.decode, start_s, size)
        yield self._env.timeout(self._model.dram_load_s(request.input_tokens))
        if not self._is_under_way(job.traced, placement):
            return
        del self._under_way[request.id]
        shown = self._shown.get(request.id, 0)
        resumed = request.id in self._resumed
        self._resumed.discard(request.id)
        self._decode[placement.decode].join(job.traced, shown, resumed=resumed)

    def _moved(self, request: Request, source: str, destination: str, start_s: float, size: int) -> None:
        self.log.append(
            Moved(
                at_s=self._env.now,
                request_id=request.id,
                source=source,
                destination=destination,
                start_s=start_s,
                bytes=size,
            )
        )

    def _is_under_way(self, traced: TracedRequest, placement: Placement) -> bool:
        """Whether this is still where the request is going; after a death it may be placed elsewhere."""
        current = self._under_way.get(traced.request.id)
        return current is not None and current[1] is placement

    def _plan_death(self, failure: Failure) -> None:
        """Let an instance die.

        Raises:
            ValueError: when there is no instance of that name.
        """
        if failure.instance not in self._prefill and failure.instance not in self._decode:
            known = ", ".join([*self._prefill, *self._decode])
            raise ValueError(f"no instance {failure.instance!r} to die at {failure.at_s} s; there are {known}")

        def die(_: simpy.Event) -> None:
            self._die(failure.instance)

        self._env.timeout(failure.at_s).callbacks.append(die)

    def _die(self, name: str) -> None:
        """An instance is gone: whoever was on the way through it is placed again, in order of id."""
        if not (self._prefill.get(name) or self._decode[name]).alive:
            return  # dead already
        if name in self._prefill:
            self._prefill[name].die()
            self.pool.drop(name)
        else:
            self._decode[name].die()
        for request_id in sorted(self._under_way):
            traced, placement = self._under_way[request_id]
            if name in {placement.prefill, placement.decode, placement.fetch_from}:
                del self._under_way[request_id]
                if self._decode[placement.decode].alive:
                    self._decode[placement.decode].break_promise(traced)
                self._door.decide(traced, f"placed again after {name} died: ")

    def _resume(self, traced: TracedRequest, shown_tokens: int) -> None:
        """A request whose decode instance died: its prompt and the tokens it has shown are prefilled anew."""
        if not shown_tokens:
            self._door.decide(traced, "placed again after its decode instance died: ")
            return
        request = traced.request
        tokens = request.input_tokens + shown_tokens - self._shown_in_prompt(request.id)
        blocks = blocks_for(tokens, request.block_size_tokens)
        own = tuple(f"{request.id}/{k}".encode() for k in range(len(request.block_keys), blocks))
        longer = replace(request, input_tokens=tokens, block_keys=(*request.block_keys, *own))
        self._shown[request.id] = self._in_prompt[request.id] = shown_tokens
        self._resumed.add(request.id)
        self._door.decide(replace(traced, request=longer), "placed again after its decode instance died: ")

    def _shown_in_prompt(self, request_id: int) -> int:
        """Tokens that an earlier death has made part of the prompt."""
        return self._in_prompt.get(request_id, 0)
