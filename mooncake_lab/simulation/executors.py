"""The two kinds of simulated clusters: they carry out commands in virtual time, and report events."""

from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import final

from mooncake_lab.cluster import ClusterSpec, CoupledPool, DecodePool, Event, Executor, PrefillPool, events
from mooncake_lab.core import CacheChanged, Request, TracedRequest
from mooncake_lab.perf import CppGroup, LatencyModel
from mooncake_lab.simulation.clock import EventLoop
from mooncake_lab.simulation.coupled import CoupledInstance
from mooncake_lab.simulation.instances import DecodeInstance, PrefillInstance
from mooncake_lab.simulation.kv_transfer import KVTransfer, PrefillJob
from mooncake_lab.simulation.network import Network
from mooncake_lab.simulation.pool import CacheChange, PrefixPool


class SimulatedExecutor(Executor):
    """What both kinds do alike: timers, and requests as their trace has them. Mutable: instances change.

    Args:
        loop: the virtual time.
        report: tells the coordinator of an event.
    """

    def __init__(self, loop: EventLoop, report: Callable[[Event], None]) -> None:
        self._loop = loop
        self._report = report
        self.requests: dict[int, TracedRequest] = {}
        """The requests in flight, with the lengths of their answers, by id."""

    @property
    @abstractmethod
    def decoding(self) -> Collection[DecodeInstance | CoupledInstance]:
        """The instances that decode."""
        ...

    @abstractmethod
    def come_up(self) -> None:
        """Report each instance as up."""
        ...

    @abstractmethod
    def fail(self, name: str) -> None:
        """Let an instance fail now."""
        ...

    def set_timer(self, command: events.SetTimer) -> None:
        """Report `TimerFired` of a request later."""
        fires = events.TimerFired(at_s=self._loop.now_s + command.delay_s, request_id=command.request_id)
        self._loop.call_later(command.delay_s, self._report, fires)

    def prepare_decode(self, command: events.PrepareDecode) -> None:
        """Nothing: simulated buffers need no preparation."""

    def confirm_workers(self, command: events.ConfirmWorkers) -> None:
        """Confirm each worker: a failure is reported when it happens, so that a worker that is not down is up."""
        for worker in command.workers:
            confirmed = events.WorkerConfirmed(at_s=self._loop.now_s, worker=worker)
            self._loop.call_later(0.0, self._report, confirmed)

    def reject(self, command: events.Reject) -> None:
        """End a request."""
        del self.requests[command.request_id]

    def finish(self, command: events.Finish) -> None:
        """End a request."""
        del self.requests[command.request_id]

    def extend(self, request: Request, tokens: int) -> Request | None:
        """A request whose prompt has grown by tokens of its own answer; None where the answer is complete.

        No other request shares the new blocks. A block that was partial is another one with these tokens in it, as
        the live cluster's keys, which hash the tokens of a block, say: a node that has it as it was lacks them.
        """
        traced, grown = self.requests[request.id], request.input_tokens + tokens
        if grown - traced.request.input_tokens >= traced.output_tokens:
            return None
        size = request.block_size_tokens
        kept, whole = request.block_keys[: request.input_tokens // size], grown // size
        own = [f"{request.id}/{k}".encode() for k in range(len(kept), whole)]
        if whole * size < grown:
            own.append(f"{request.id}/{whole}/{grown}".encode())
        return replace(request, input_tokens=grown, block_keys=(*kept, *own))


@final
class DisaggregatedExecutor(SimulatedExecutor):
    """Prefill instances, decode instances, and the network between them.

    Args:
        spec: of the cluster.
        prefill: its prefill pool.
        decode: its decode pool.
        model: how long everything really takes; of the prefill nodes, where they differ.
        decode_model: likewise of the decode nodes.
        group: the nodes of a prefill instance, where it has several.
        loop: the virtual time.
        report: tells the coordinator of an event.

    Raises:
        ValueError: when nodes have SSDs that the model does not know, or the two kinds of nodes run other models.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        prefill: PrefillPool,
        decode: DecodePool,
        *,
        model: LatencyModel,
        decode_model: LatencyModel,
        group: CppGroup | None,
        loop: EventLoop,
        report: Callable[[Event], None],
    ) -> None:
        if prefill.ssd_tokens and model.ssd is None:
            raise ValueError(
                f"nodes hold {prefill.ssd_tokens} tokens on SSD; latency model {model.name!r} has no ssd"
            )
        if decode_model.shape != model.shape:
            raise ValueError(
                f"prefill nodes run {model.shape.name!r} and decode nodes {decode_model.shape.name!r};"
                " both must run the same model"
            )
        super().__init__(loop, report)
        names = [name for name, role in spec.roles.items() if role == "prefill"]
        cards: dict[str, float] = dict.fromkeys(names, prefill.prefill_group)
        if decode_model.transfer.bytes_per_s != model.transfer.bytes_per_s:
            share = decode_model.transfer.bytes_per_s / model.transfer.bytes_per_s
            cards |= {name: share for name, role in spec.roles.items() if role == "decode"}
        network = Network(loop, model.transfer.bytes_per_s, model.transfer.latency_s, cards=cards)
        self.pool = PrefixPool(
            names,
            capacity_tokens=prefill.cache_tokens * prefill.prefill_group,
            ssd_tokens=prefill.ssd_tokens * prefill.prefill_group,
            bytes_per_token=model.shape.kv_bytes_per_token,
            block_size_tokens=spec.block_size_tokens,
            eviction=prefill.eviction,
            shared=prefill.shared_cache,
            changed=self._cache_changed,
        )
        """The caches of the prefill instances."""
        self._transfer = KVTransfer(
            loop,
            model,
            network,
            self.pool,
            fetch_timeout_s=prefill.fetch_timeout_s,
            streams_layers=spec.streams_layers,
            report=report,
            decode_model=decode_model,
        )
        self.prefill = {
            name: PrefillInstance(loop, name, prefill, model, group, self.pool, self._transfer, report)
            for name in names
        }
        """The prefill instances, by name."""
        self.decode = {
            name: DecodeInstance(loop, name, decode_model, decode, report)
            for name, role in spec.roles.items()
            if role == "decode"
        }
        """The decode instances, by name."""
        self._jobs: dict[int, PrefillJob] = {}  # by request, until it decodes

    @property
    def decoding(self) -> Collection[DecodeInstance]:
        """The decode instances."""
        return self.decode.values()

    def come_up(self) -> None:
        """Report each instance as up."""
        now_s = self._loop.now_s
        for name in self.prefill:
            cache = self.pool.caches[name]
            self._report(events.WorkerUp(at_s=now_s, worker=name, role="prefill", cache=cache))
        for name, instance in self.decode.items():
            tokens = instance.capacity_tokens
            self._report(events.WorkerUp(at_s=now_s, worker=name, role="decode", capacity_tokens=tokens))

    def run_prefill(self, command: events.RunPrefill) -> None:
        """Fetch the prefix of a prompt, and queue the prompt at its instance."""
        job = PrefillJob(command.attempt, command.request, command.placement)
        self._jobs[command.request.id] = job
        self._transfer.fetch(job)
        self.prefill[command.placement.prefill].submit(job)

    def start_decode(self, command: events.StartDecode) -> None:
        """Load a KVCache from host memory into GPU memory."""
        job = self._jobs[command.attempt.request_id]
        self._transfer.load(command.worker, job.request.input_tokens, partial(self._loaded, job, command))

    def _loaded(self, job: PrefillJob, command: events.StartDecode) -> None:
        """The KVCache of a request is in GPU memory."""
        if job.cancelled:
            return
        request_id = job.request.id
        del self._jobs[request_id]
        self._report(events.KVLoaded(at_s=self._loop.now_s, attempt=job.attempt))
        self.decode[command.worker].join(
            job.attempt,
            context_tokens=job.request.input_tokens,
            output_tokens=self.requests[request_id].output_tokens,
            shown_tokens=command.shown_tokens,
            shows_computed=command.shows_computed,
        )

    def cancel_attempt(self, command: events.CancelAttempt) -> None:
        """Let an attempt that is on its way to decode go no further.

        No client leaves a simulated cluster: an attempt that decodes was ended by its instance.
        """
        job = self._jobs.get(command.attempt.request_id)
        if job is not None and job.attempt == command.attempt:
            job.cancelled = True
            del self._jobs[command.attempt.request_id]

    def fail(self, name: str) -> None:
        """Let an instance fail now; a decode instance ends its step, and reports its requests as failed then."""
        instance = self.prefill.get(name) or self.decode[name]
        if not instance.up:
            return
        if name in self.prefill:
            self.pool.drop(name)
        self._transfer.cancel(name)
        self._report(events.WorkerDown(at_s=self._loop.now_s, worker=name, finishes_step=name in self.decode))
        instance.stop()

    def _cache_changed(self, cache: str, change: CacheChange) -> None:
        self._report(
            CacheChanged(
                at_s=self._loop.now_s,
                instance=cache,
                added=change.added,
                removed=change.removed,
                promoted=change.promoted,
                demoted=change.demoted,
            )
        )


@final
class CoupledExecutor(SimulatedExecutor):
    """Instances that prefill and decode, each with a cache of its own.

    Args:
        spec: of the cluster.
        pool: its instances.
        max_tokens_of: the most tokens that the answer to a request may have.
        model: how long everything really takes.
        loop: the virtual time.
        report: tells the coordinator of an event.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        pool: CoupledPool,
        max_tokens_of: Callable[[TracedRequest], int],
        *,
        model: LatencyModel,
        loop: EventLoop,
        report: Callable[[Event], None],
    ) -> None:
        super().__init__(loop, report)
        self._caches_prefixes = pool.prefix_caching
        self.instances = {
            name: CoupledInstance(loop, name, model, pool, spec.block_size_tokens, max_tokens_of, report)
            for name in spec.roles
        }
        """The instances, by name."""

    @property
    def decoding(self) -> Collection[CoupledInstance]:
        """All instances."""
        return self.instances.values()

    def come_up(self) -> None:
        """Report each instance as up."""
        for name, instance in self.instances.items():
            cache = name if self._caches_prefixes else None
            up = events.WorkerUp(
                at_s=self._loop.now_s,
                worker=name,
                role="coupled",
                capacity_tokens=instance.capacity_tokens,
                cache=cache,
            )
            self._report(up)

    def run_prefill(self, command: events.RunPrefill) -> None:
        """Let an instance compute and decode a request.

        Raises:
            ValueError: when the instance is to fetch: it has no store to fetch from.
        """
        placement, request = command.placement, command.request
        if placement.fetch_from is not None:
            raise ValueError(
                f"request {request.id} should fetch from {placement.fetch_from}; coupled instances"
                " do not share their caches, use a placement policy that does not fetch"
            )
        traced = self.requests[request.id]
        shown_tokens = request.input_tokens - traced.request.input_tokens
        self.instances[placement.prefill].submit(command.attempt, traced, shown_tokens=shown_tokens)

    def start_decode(self, command: events.StartDecode) -> None:
        """Never asked: an instance decodes what it prefilled.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{command.worker} is coupled and decodes by itself; it cannot carry out {command}")

    def cancel_attempt(self, command: events.CancelAttempt) -> None:
        """Nothing: no client leaves a simulated cluster, and an instance has ended the attempts that fail."""

    def fail(self, name: str) -> None:
        """Let an instance fail now; a step that decodes ends first."""
        instance = self.instances[name]
        if instance.up:
            self._report(events.WorkerDown(at_s=self._loop.now_s, worker=name, finishes_step=True))
            instance.stop()
