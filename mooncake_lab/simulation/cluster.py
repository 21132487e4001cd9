"""A cluster in virtual time, with separate pools or coupled instances: it carries out what the coordinator asks.

The coordinator (`mooncake_lab.cluster`) decides and keeps the log; here commands take simulated time. The methods
of `Cluster` are in the order in which a request meets them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import simpy

from mooncake_lab.cluster import (
    ClusterSpec,
    Coordinator,
    CoordinatorRules,
    CoupledPool,
    DecodePool,
    Event,
    PrefillPool,
    Role,
    events,
)
from mooncake_lab.conductor import ClusterView, Decided, Estimator, LatencyEstimator
from mooncake_lab.core import CacheChanged, Record, Request, RunEnded, TracedRequest
from mooncake_lab.perf import CppGroup, LatencyModel
from mooncake_lab.simulation.clock import EventLoop
from mooncake_lab.simulation.coupled import CoupledInstance
from mooncake_lab.simulation.instances import DecodeInstance, PrefillInstance
from mooncake_lab.simulation.kv_transfer import KVTransfer, PrefillJob
from mooncake_lab.simulation.network import Network
from mooncake_lab.simulation.options import SimulationOptions
from mooncake_lab.simulation.pool import CacheChange, PrefixPool


class Cluster:
    """Instances under one coordinator, simulated with one latency model as its clock.

    It has `run`, `view`, `log` and `decisions`, as `serving.LiveCluster` does.

    Args:
        spec: nodes and policies.
        model: how long everything really takes.
        options: what only a simulation has, such as failures at set times.
        estimate: what the Conductor believes; the truth unless an experiment says otherwise.
        log: where records go instead of into a list, so that a run of any length needs no memory for them.
        env: a simpy environment of the caller's, whose processes share the cluster's time; see `start`.

    Raises:
        ValueError: when nodes have SSDs that the model does not know, or an unknown instance is to fail.
    """

    pool: PrefixPool | None
    """The caches of prefill instances; None where instances are coupled, for each of these has its own."""
    _transfer: KVTransfer

    def __init__(
        self,
        spec: ClusterSpec,
        model: LatencyModel,
        options: SimulationOptions | None = None,
        *,
        estimate: Estimator | None = None,
        log: Callable[[Record], None] | None = None,
        env: simpy.Environment | None = None,
    ) -> None:
        options = options or SimulationOptions()
        self.spec = spec
        self.log: list[Record] = []
        self.decisions: list[Decided] = []
        """What the Conductor decided, and on what view; only with `SimulationOptions.keep_decisions`."""
        self._model = model
        self._loop = EventLoop(env)
        group, first = None, spec.pools[0]
        if isinstance(first, PrefillPool) and first.prefill_group > 1:
            group = CppGroup.of(model, nodes=first.prefill_group, chunk_tokens=first.chunk_tokens)
        self.estimate = estimate or LatencyEstimator(model, group)
        self.coordinator = Coordinator(
            spec,
            self.estimate,
            CoordinatorRules(schedule_s=model.schedule_s, view_age_s=options.view_age_s),
            write=log or self.log.append,
            extend=self._extend,
            observe=self.decisions.append if options.keep_decisions else None,
        )
        self._on = self.coordinator.on
        self._until_s: float | None = None
        self._requests: dict[int, TracedRequest] = {}  # in flight, as they are in the trace
        self._jobs: dict[int, PrefillJob] = {}  # by request, until it decodes
        self._actions: dict[type, Callable[[Any], None]] = {
            events.SetTimer: self._set_timer,
            events.PrepareDecode: lambda _: None,  # simulated buffers need no preparation
            events.RunPrefill: self._run_prefill,
            events.StartDecode: self._start_decode,
            events.CancelAttempt: self._cancel,
            events.Finish: self._forget,
            events.Reject: self._forget,
        }
        self._prefill: dict[str, PrefillInstance] = {}
        self._decode: dict[str, DecodeInstance] = {}
        self.coupled: dict[str, CoupledInstance] = {}
        match spec.pools:
            case (prefill, decode):
                self._add_pools(spec, prefill, decode, group)
            case (coupled,):
                self._add_coupled(spec, coupled, partial(options.max_tokens_of, coupled))
        for failure in options.failures:
            if failure.instance not in spec.roles:
                known = ", ".join(spec.roles)
                raise ValueError(
                    f"no instance {failure.instance!r} to fail at {failure.at_s} s; there are {known}"
                )
            self._loop.call_later(failure.at_s - self._loop.now_s, self._fail, failure.instance)

    def _add_pools(
        self, spec: ClusterSpec, prefill: PrefillPool, decode: DecodePool, group: CppGroup | None
    ) -> None:
        """Prefill and decode instances, and the network between them.

        Raises:
            ValueError: when nodes have SSDs that the model does not know.
        """
        loop, model = self._loop, self._model
        if prefill.ssd_tokens and model.ssd is None:
            raise ValueError(
                f"nodes hold {prefill.ssd_tokens} tokens on SSD; latency model {model.name!r} has no ssd"
            )
        names = [name for name, role in spec.roles.items() if role == "prefill"]
        cards = dict.fromkeys(names, prefill.prefill_group)
        network = Network(loop, model.transfer.bytes_per_s, model.transfer.latency_s, cards=cards)
        self.pool = pool = PrefixPool(
            names,
            capacity_tokens=prefill.cache_tokens * prefill.prefill_group,
            ssd_tokens=prefill.ssd_tokens * prefill.prefill_group,
            bytes_per_token=model.shape.kv_bytes_per_token,
            block_size_tokens=spec.block_size_tokens,
            eviction=prefill.eviction,
            shared=prefill.shared_cache,
            changed=self._cache_changed,
        )
        self._transfer = KVTransfer(
            loop,
            model,
            network,
            pool,
            fetch_timeout_s=prefill.fetch_timeout_s,
            streams_layers=spec.streams_layers,
            report=self.report,
        )
        for name in names:
            self._prefill[name] = PrefillInstance(
                loop, name, prefill, model, group, pool, self._transfer, self.report
            )
            self._up(name, "prefill", 0, pool.caches[name])
        for name in [name for name, role in spec.roles.items() if role == "decode"]:
            self._decode[name] = DecodeInstance(loop, name, model, decode, self.report)
            self._up(name, "decode", decode.device_tokens)

    def _add_coupled(
        self, spec: ClusterSpec, pool: CoupledPool, max_tokens_of: Callable[[TracedRequest], int]
    ) -> None:
        """Instances that prefill and decode."""
        self.pool = None
        for name in spec.roles:
            instance = CoupledInstance(
                self._loop, name, self._model, pool, spec.block_size_tokens, max_tokens_of, self.report
            )
            self.coupled[name] = instance
            self._up(name, "coupled", instance.capacity_tokens, name if pool.prefix_caching else None)

    def _up(self, name: str, role: Role, capacity_tokens: int, cache: str | None = None) -> None:
        self.report(
            events.WorkerUp(
                at_s=self._loop.now_s, worker=name, role=role, capacity_tokens=capacity_tokens, cache=cache
            )
        )

    def run(self, requests: Iterable[TracedRequest], until_s: float | None = None) -> list[Record]:
        """Serve requests in order of arrival until all are done, or until the horizon: `start`, time, `close`.

        With a horizon the log has what happened before it, every decode step that ended before it included, and
        ends with `RunEnded`.

        Returns:
            The run's log; empty where it went elsewhere.
        """
        self.start(requests, until_s)
        self._loop.run(inf if until_s is None else until_s)
        if until_s is not None:
            self.close()
        return self.log

    def start(self, requests: Iterable[TracedRequest], until_s: float | None = None) -> None:
        """Let requests arrive, in order of arrival; whoever owns the environment lets time pass.

        Args:
            requests: what is served.
            until_s: the horizon, if there is one: `env.run(until_s)` and `close` belong to it.
        """
        self._until_s = until_s
        for instance in (*self._decode.values(), *self.coupled.values()):
            instance.horizon_s = inf if until_s is None else until_s
        self._arrive(iter(requests))

    def close(self) -> None:
        """End the log at the horizon, whose last decode steps are in it.

        Raises:
            ValueError: when the cluster was started without a horizon, or it is not the present.
        """
        if self._until_s is None or self._until_s != self._loop.now_s:
            raise ValueError(
                f"a run until {self._until_s} is closed at {self._loop.now_s} s; close it at its horizon"
            )
        shown = dict[int, int]()
        for instance in (*self._decode.values(), *self.coupled.values()):
            shown |= instance.tokens_shown()
        self.report(RunEnded(at_s=self._until_s, tokens=shown))

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about this request; looking changes nothing in the cluster."""
        return self.coordinator.view(request, self._loop.now_s)

    def report(self, event: Event) -> None:
        """Tell the coordinator what happened, and carry out what it asks; no command reports anything at once."""
        commands = self._on(event, event.at_s)
        if commands:  # most events need nothing
            for command in commands:
                self._actions[type(command)](command)

    # the way of a request

    def _arrive(self, requests: Iterator[TracedRequest], traced: TracedRequest | None = None) -> None:
        """A request arrives, and those that come at the same moment; then the next one is awaited."""
        traced = traced or next(requests, None)
        while traced is not None:
            request = traced.request
            wait_s = request.arrival_s - self._loop.now_s
            if wait_s > 0:
                self._loop.call_later(wait_s, self._arrive, requests, traced)
                return
            self._requests[request.id] = traced
            self.report(events.RequestArrived(at_s=self._loop.now_s, request=request))
            traced = next(requests, None)

    def _set_timer(self, command: events.SetTimer) -> None:
        fires = events.TimerFired(at_s=self._loop.now_s + command.delay_s, request_id=command.request_id)
        self._loop.call_later(command.delay_s, self.report, fires)

    def _run_prefill(self, command: events.RunPrefill) -> None:
        """Fetch, compute, and stream to the decode instance: `PrefillInstance` and `KVTransfer` report each.

        Raises:
            ValueError: when a coupled instance is to fetch: it has no store to fetch from.
        """
        placement, request_id = command.placement, command.request.id
        coupled = self.coupled.get(placement.prefill)
        if coupled is None:
            job = PrefillJob(command.attempt, command.request, placement)
            self._jobs[request_id] = job
            self._transfer.fetch(job)
            self._prefill[placement.prefill].submit(job)
            return
        if placement.fetch_from is not None:
            raise ValueError(
                f"request {request_id} should fetch from {placement.fetch_from}; coupled instances"
                " do not share their caches, use a placement policy that does not fetch"
            )
        traced = self._requests[request_id]
        shown_tokens = command.request.input_tokens - traced.request.input_tokens
        coupled.submit(command.attempt, traced, shown_tokens=shown_tokens)

    def _start_decode(self, command: events.StartDecode) -> None:
        """From host memory into GPU memory."""
        job = self._jobs[command.attempt.request_id]
        self._transfer.load(command.worker, job.request.input_tokens, partial(self._loaded, job, command))

    def _loaded(self, job: PrefillJob, command: events.StartDecode) -> None:
        if job.cancelled:
            return
        request_id = job.request.id
        del self._jobs[request_id]
        self.report(events.KVLoaded(at_s=self._loop.now_s, attempt=job.attempt))
        self._decode[command.worker].join(
            job.attempt,
            context_tokens=job.request.input_tokens,
            output_tokens=self._requests[request_id].output_tokens,
            shown_tokens=command.shown_tokens,
            shows_computed=command.shows_computed,
        )

    def _cancel(self, command: events.CancelAttempt) -> None:
        """An attempt that is on its way to decode goes no further.

        In a simulated cluster no client leaves: an attempt that decodes or is coupled was ended by its instance.
        """
        job = self._jobs.get(command.attempt.request_id)
        if job is not None and job.attempt == command.attempt:
            job.cancelled = True
            del self._jobs[command.attempt.request_id]

    def _forget(self, command: events.Finish | events.Reject) -> None:
        del self._requests[command.request_id]

    def _extend(self, request: Request, tokens: int) -> Request | None:
        """A request whose prompt has grown by tokens of its own answer; None where the answer is complete.

        No other request shares the new blocks. A block that was partial is another one with these tokens in it, as
        the live cluster's keys, which hash the tokens of a block, say: a node that has it as it was lacks them.
        """
        traced, grown = self._requests[request.id], request.input_tokens + tokens
        if grown - traced.request.input_tokens >= traced.output_tokens:
            return None
        size = request.block_size_tokens
        kept, whole = request.block_keys[: request.input_tokens // size], grown // size
        own = [f"{request.id}/{k}".encode() for k in range(len(kept), whole)]
        if whole * size < grown:
            own.append(f"{request.id}/{whole}/{grown}".encode())
        return replace(request, input_tokens=grown, block_keys=(*kept, *own))

    # what happens to instances

    def _cache_changed(self, cache: str, change: CacheChange) -> None:
        self.report(
            CacheChanged(
                at_s=self._loop.now_s,
                instance=cache,
                added=change.added,
                removed=change.removed,
                promoted=change.promoted,
                demoted=change.demoted,
            )
        )

    def _fail(self, name: str) -> None:
        """An instance is down; one that decodes ends its step, and reports its requests as failed then."""
        instance = self._prefill.get(name) or self._decode.get(name) or self.coupled[name]
        if not instance.up:
            return
        if self.pool is not None and name in self._prefill:
            self.pool.drop(name)
        if name not in self.coupled:
            self._transfer.cancel(name)
        self.report(events.WorkerDown(at_s=self._loop.now_s, worker=name, finishes_step=name not in self._prefill))
        instance.stop()
