"""The two kinds of simulated clusters: they carry out commands in virtual time, and report events."""

from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from mooncake_lab.cluster import ClusterSpec, CoupledPool, DecodePool, Event, Executor, PrefillPool, events
from mooncake_lab.core import CacheChanged, Request, TracedRequest, answer_keys
from mooncake_lab.perf import CppGroup, LatencyModel
from mooncake_lab.simulation.clock import EventLoop
from mooncake_lab.simulation.coupled import CoupledInstance
from mooncake_lab.simulation.instances import DecodeInstance, PrefillInstance
from mooncake_lab.simulation.kv_transfer import KVTransfer, PrefillJob
from mooncake_lab.simulation.network import Network
from mooncake_lab.simulation.prefix_caches import CacheChange, PrefixCaches
from mooncake_lab.workload.sessions import BUSY_STAGES, RequestOutcome

if TYPE_CHECKING:
    import simpy


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
        self.clients: dict[int, simpy.Event] = {}
        """What each client that waits for a request waits for, by the id of the request."""
        self.retry_after_s: Callable[[], float] = lambda: 1.0
        """When a client that is refused now may try again."""

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

    def confirm_instances(self, command: events.ConfirmInstances) -> None:
        """Confirm each instance: a failure is reported when it happens, so one that is not down is up."""
        for instance in command.instances:
            confirmed = events.InstanceConfirmed(at_s=self._loop.now_s, instance=instance)
            self._loop.call_later(0.0, self._report, confirmed)

    def reject(self, command: events.Reject) -> None:
        """End a request, and tell its client why."""
        traced, client = self.requests.pop(command.request_id), self.clients.pop(command.request_id, None)
        if client is not None:
            retry_after_s = self.retry_after_s() if command.stage in BUSY_STAGES else None
            refused: dict[str, Any] = {
                "stage": command.stage,
                "reason": command.reason,
                "retry_after_s": retry_after_s,
            }
            client.succeed(RequestOutcome(request=traced.request, at_s=self._loop.now_s, **refused))

    def finish(self, command: events.Finish) -> None:
        """End a request, and tell its client."""
        traced, client = self.requests.pop(command.request_id), self.clients.pop(command.request_id, None)
        if client is not None:
            tokens = traced.output_tokens
            client.succeed(RequestOutcome(request=traced.request, at_s=self._loop.now_s, output_tokens=tokens))

    def leave(self, request_id: int, reason: str) -> None:
        """The client of a request in flight leaves; a step that computes a token of its answer ends first."""
        if not any(instance.leave(request_id, reason) for instance in self.decoding):
            self._report(events.Cancelled(at_s=self._loop.now_s, request_id=request_id, reason=reason))

    def extend(self, request: Request, tokens: int) -> Request | None:
        """A request whose prompt has grown by tokens of its own answer; None where the answer is complete.

        A block that was partial is another one with these tokens in it, as the live cluster's keys, which hash the
        tokens of a block, say: a node that has it as it was lacks them. The next turn of a session goes on from
        the answer (`answer_keys`); no other request shares the new blocks of one without a session.
        """
        traced, grown = self.requests[request.id], request.input_tokens + tokens
        if grown - traced.request.input_tokens >= traced.output_tokens:
            return None
        size = request.block_size_tokens
        if traced.request.session is not None:
            asked = traced.request
            keys = answer_keys(asked.block_keys, asked.input_tokens, grown - asked.input_tokens, size)
            return replace(request, input_tokens=grown, block_keys=keys)
        kept, whole = request.block_keys[: request.input_tokens // size], grown // size
        own = [f"{request.id}/{k}".encode() for k in range(len(kept), whole)]
        if whole * size < grown:
            own.append(f"{request.id}/{whole}/{grown}".encode())
        return replace(request, input_tokens=grown, block_keys=(*kept, *own))


def _check_models(prefill: PrefillPool, model: LatencyModel, decode_model: LatencyModel) -> None:
    if prefill.ssd_tokens and model.ssd is None:
        raise ValueError(f"nodes hold {prefill.ssd_tokens} tokens on SSD; latency model {model.name!r} has no ssd")
    if decode_model.shape != model.shape:
        raise ValueError(
            f"prefill nodes run {model.shape.name!r} and decode nodes {decode_model.shape.name!r};"
            " both must run the same model"
        )


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
        _check_models(prefill, model, decode_model)
        super().__init__(loop, report)
        names = [name for name, role in spec.roles.items() if role == "prefill"]
        cards: dict[str, float] = dict.fromkeys(names, prefill.prefill_group)
        if decode_model.transfer.bytes_per_s != model.transfer.bytes_per_s:
            share = decode_model.transfer.bytes_per_s / model.transfer.bytes_per_s
            cards |= {name: share for name, role in spec.roles.items() if role == "decode"}
        network = Network(loop, model.transfer.bytes_per_s, model.transfer.latency_s, cards=cards)
        self.prefix_caches = PrefixCaches(
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
            self.prefix_caches,
            fetch_timeout_s=prefill.fetch_timeout_s,
            streams_layers=spec.streams_layers,
            report=report,
            decode_model=decode_model,
        )
        self.prefill = {
            name: PrefillInstance(loop, name, prefill, model, group, self.prefix_caches, self._transfer, report)
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
        self._keep_answers = decode.keep_answers
        self._decoding: dict[int, PrefillJob] = {}  # by request, after that, where answers are kept

    @property
    def decoding(self) -> Collection[DecodeInstance]:
        """The decode instances."""
        return self.decode.values()

    def come_up(self) -> None:
        """Report each instance as up."""
        now_s = self._loop.now_s
        for name in self.prefill:
            cache = self.prefix_caches.caches[name]
            self._report(events.InstanceUp(at_s=now_s, instance=name, role="prefill", cache=cache))
        for name, instance in self.decode.items():
            tokens = instance.capacity_tokens
            self._report(events.InstanceUp(at_s=now_s, instance=name, role="decode", capacity_tokens=tokens))

    def run_prefill(self, command: events.RunPrefill) -> None:
        """Fetch the prefix of a prompt, and queue the prompt at its instance."""
        job = PrefillJob(command.attempt, command.request, command.placement)
        self._jobs[command.request.id] = job
        self._transfer.fetch(job)
        self.prefill[command.placement.prefill].submit(job)

    def start_decode(self, command: events.StartDecode) -> None:
        """Load a KVCache from host memory into GPU memory."""
        job = self._jobs[command.attempt.request_id]
        self._transfer.load(command.instance, job.request.input_tokens, partial(self._loaded, job, command))

    def _loaded(self, job: PrefillJob, command: events.StartDecode) -> None:
        """The KVCache of a request is in GPU memory."""
        if job.cancelled:
            return
        request_id = job.request.id
        del self._jobs[request_id]
        if self._keep_answers:
            self._decoding[request_id] = job
        self._report(events.KVLoaded(at_s=self._loop.now_s, attempt=job.attempt))
        self.decode[command.instance].join(
            job.attempt,
            context_tokens=job.request.input_tokens,
            output_tokens=self.requests[request_id].output_tokens,
            shown_tokens=command.shown_tokens,
            shows_computed=command.shows_computed,
        )

    def finish(self, command: events.Finish) -> None:
        """End a request, tell its client, and keep its answer where answers are kept."""
        traced, job = self.requests[command.request_id], self._decoding.pop(command.request_id, None)
        super().finish(command)
        if job is not None:
            self._keep_answer(job, traced)

    def _keep_answer(self, job: PrefillJob, traced: TracedRequest) -> None:
        """Send the whole blocks of an answer back; the KVCache of its last token was never computed."""
        request, size = traced.request, traced.request.block_size_tokens
        first, blocks = job.request.input_tokens // size, (request.input_tokens + traced.output_tokens - 1) // size
        if first >= blocks:
            return
        keys = answer_keys(request.block_keys, request.input_tokens, traced.output_tokens, size)[:blocks]
        grown = replace(request, input_tokens=blocks * size, block_keys=keys)
        self._transfer.keep_answer(job.attempt, job.placement, grown, first)

    def reject(self, command: events.Reject) -> None:
        """End a request, and tell its client why."""
        self._decoding.pop(command.request_id, None)
        super().reject(command)

    def cancel_attempt(self, command: events.CancelAttempt) -> None:
        """Let an attempt on its way to decode go no further, and one that decodes leave its instance."""
        job = self._jobs.get(command.attempt.request_id)
        if job is not None and job.attempt == command.attempt:
            job.cancelled = True
            self._transfer.drop(job)
            del self._jobs[command.attempt.request_id]
        elif command.instance in self.decode:
            self.decode[command.instance].remove(command.attempt)

    def fail(self, name: str) -> None:
        """Let an instance fail now; a decode instance ends its step, and reports its requests as failed then."""
        instance = self.prefill.get(name) or self.decode[name]
        if not instance.up:
            return
        if name in self.prefill:
            self.prefix_caches.drop(name)
        self._transfer.cancel(name)
        self._report(events.InstanceDown(at_s=self._loop.now_s, instance=name, finishes_step=name in self.decode))
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
            up = events.InstanceUp(
                at_s=self._loop.now_s,
                instance=name,
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
        raise ValueError(f"{command.instance} is coupled and decodes by itself; it cannot carry out {command}")

    def cancel_attempt(self, command: events.CancelAttempt) -> None:
        """Let an attempt leave its instance."""
        self.instances[command.instance].remove(command.attempt)

    def fail(self, name: str) -> None:
        """Let an instance fail now; a step that decodes ends first."""
        instance = self.instances[name]
        if instance.up:
            self._report(events.InstanceDown(at_s=self._loop.now_s, instance=name, finishes_step=True))
            instance.stop()
