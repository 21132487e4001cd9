"""The cluster in real time: worker messages become events of the coordinator, its commands become messages.

The coordinator (`mooncake_lab.cluster`) follows each request, as in the simulator. Here are the clients' streams
of tokens, the messages, and the order in which both are handled. All of it belongs to one event loop.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Self, final

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.cluster import (
    SHARED_STORE,
    ClusterSpec,
    Coordinator,
    DecodePool,
    Event,
    Executor,
    InstanceState,
    carry_out,
    events,
)
from mooncake_lab.conductor import ClusterView, Decided, Estimator, LatencyEstimator
from mooncake_lab.core import CacheChanged, Record, Request, blocks_for
from mooncake_lab.perf import LatencyModel
from mooncake_lab.serving import messages
from mooncake_lab.serving.calibration import latency_model
from mooncake_lab.serving.clients import Clients
from mooncake_lab.serving.launch import Launcher
from mooncake_lab.serving.pending_calls import PendingCalls
from mooncake_lab.serving.spec import LiveOptions, check_live, coordinator_rules
from mooncake_lab.serving.stream import FailedError, RequestStream
from mooncake_lab.serving.supervisor import Supervisor, WorkerConnection
from mooncake_lab.serving.timeouts import Timers
from mooncake_lab.serving.unsent import unsent

_LOG: Final = logging.getLogger(__name__)
_SHUT: Final = "the cluster is shut down"


@final
class ClusterRuntime(Executor):
    """Workers, the coordinator, and the streams of all requests in flight. Mutable.

    Args:
        spec: workers and policies.
        options: what only a live cluster has, such as its model.
        model: how long everything takes, as the Conductor estimates; None measures it when the workers are ready.
        estimate: what the Conductor estimates instead.
        launcher: where workers come from; None makes one for this cluster alone.
        write: gets each record as the cluster learns of it.

    Raises:
        ValueError: when a live cluster cannot do what the spec asks, or prefill workers have an SSD and the
            latency model none.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        options: LiveOptions | None = None,
        *,
        model: LatencyModel | None = None,
        estimate: Estimator | None = None,
        launcher: Launcher | None = None,
        write: Callable[[Record], None],
    ) -> None:
        self.options = options = options or LiveOptions()
        check_live(spec, options)
        if options.ssd_dir is not None and model is not None and model.ssd is None:
            raise ValueError(f"latency model {model.name!r} has no ssd, and prefill workers have one")
        self.spec = spec
        decode = spec.pools[-1]
        self._keeps_answers = isinstance(decode, DecodePool) and decode.keep_answers
        self.model = model
        self.damaged_blocks: dict[str, int] = {}
        """Blocks that the workers of each name have found damaged in their stores."""
        self.supervisor = Supervisor(
            spec,
            options,
            launcher,
            worker_up=self._worker_up,
            heard=self._heard,
            worker_exit=self._worker_exit,
            shared_store_gone=self._shared_store_gone,
            time_passes=self._time_passes,
        )
        self.pending_calls = PendingCalls(self.supervisor, options.heartbeat_timeout_s)
        self.estimate = estimate
        """What the Conductor believes; from the start on there is one."""
        self._coordinator: Coordinator | None = None
        self._clients: Clients
        self._run = 0
        self._zero_s = time.monotonic()
        self._events: deque[Event] = deque()
        self._handling = False
        self._timers = Timers()
        self._write = write
        self.on_decision: Callable[[Decided], None] | None = None
        """Told each decision of the runs that begin from now on."""
        self.on_event: Callable[[Event, float], None] | None = None
        """Told each event, and the time at which the coordinator learned of it."""
        self._is_shut = False

    async def __aenter__(self) -> Self:
        try:
            await self.supervisor.start()
            if self.model is None:
                _LOG.info("timing the workers for the Conductor's latency model")
                self.model = await self.calibrate()
                if self.options.pacer is not None:
                    self.model = self.options.pacer.paced(self.model)
            self.estimate = self.estimate or LatencyEstimator(
                self.model, fetches_by_layer=self.spec.streams_layers
            )
        except BaseException:
            await self.supervisor.close()
            raise
        self.begin_run()
        self.supervisor.keep_spares()  # only now, so that they disturb neither the start nor the timing
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def calibrate(self) -> LatencyModel:
        """Let one worker of each role time itself, one after the other while nothing else runs.

        Raises:
            ValueError: when what was timed fits no latency model.
        """
        found = await self.pending_calls.measure(self.spec.roles, self.options.ssd_dir)
        ready = self.supervisor.ready
        return latency_model(ready.shape, found, f"{ready.shape.name} on {ready.device}, measured at start")

    async def close(self) -> None:
        """End every request in flight, and every worker."""
        self.shut()
        await self.supervisor.close()

    def shut(self) -> None:
        """End every request in flight, and accept no more; clients are told why."""
        self._is_shut = True
        for request_id in list(self.streams):
            self.report(events.Cancelled(at_s=self.now_s(), request_id=request_id, reason=_SHUT))

    def begin_run(self) -> None:
        """Time 0 is now; for what else begins anew see `drop_requests`."""
        self._zero_s = time.monotonic()
        self.drop_requests()

    def drop_requests(self) -> None:
        """History begins anew, without the requests in flight; workers keep their caches.

        Those requests are cancelled at their workers, and the log does not say that they ended.
        """
        assert self.estimate is not None  # noqa: S101  # the cluster is open
        before, names = self._coordinator, (*self.spec.roles, SHARED_STORE)
        caches, on_ssd = dict[str, tuple[bytes, ...]](), dict[str, tuple[bytes, ...]]()
        if before is not None:
            caches = {name: tuple(before.instances.cached(name)) for name in names}
            on_ssd = {name: tuple(before.instances.on_ssd(name)) for name in names}
            for state in before.requests.values():
                for worker in state.instances:
                    self.cancel_attempt(events.CancelAttempt(state.attempt, worker.name))
            self._clients.cancel_all()
        self._run += 1
        self._timers = Timers()
        self.pending_calls.forget()
        self._clients = Clients(self.spec, self.options, self.supervisor.ready, lambda: self.workers)
        self._coordinator = Coordinator(
            self.spec,
            self.estimate,
            coordinator_rules(self.options),
            write=self._record,
            extend=self._clients.extend,
            observe=self.on_decision,
        )
        early = list(self._events)  # what workers found in their caches before the first run
        self._events.clear()
        for name in names:
            if name in self.supervisor.connections:
                self._worker_up(name, self.supervisor.connections[name])
            if caches.get(name):
                changed = {"added": caches[name], "removed": (), "demoted": on_ssd[name]}
                self.report(CacheChanged(at_s=self.now_s(), instance=name, **changed))
        for event in early:
            self.report(event)

    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._zero_s

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of the current run.

        Raises:
            RuntimeError: when the cluster is not open.
        """
        if self._coordinator is None:
            raise RuntimeError("the cluster is not open")
        return self._coordinator

    @property
    def streams(self) -> dict[int, RequestStream]:
        """The answers to requests in flight, by request id."""
        return self._clients.streams

    @property
    def workers(self) -> list[InstanceState]:
        """What the cluster knows about the workers that are up."""
        return self.coordinator.instances.up

    # what clients do

    def submit(
        self,
        prompt: npt.NDArray[np.int32],
        params: messages.SamplingParams,
        *,
        traced: Request | None = None,
        completion_id: str | None = None,
        session: str | None = None,
    ) -> RequestStream:
        """Accept a request and place it; its tokens come through the stream.

        Args:
            prompt: token ids, shape (n,).
            params: how its answer is generated.
            traced: as a trace has it, with its id in the log and what policies may know; None is a new one.
            completion_id: its id for its client, for the log.
            session: the conversation that it belongs to, where its client says so.

        Raises:
            ValueError: when it can never be served.
            RejectedError: when the cluster does not accept it now.
            FailedError: when the cluster is shut down.
        """
        if self._is_shut:
            raise FailedError(_SHUT)
        stream, request, refusal = self._clients.accept(prompt, params, traced, session)
        arrived = events.RequestArrived(
            at_s=self.now_s(),
            request=request,
            refusal=refusal,
            completion_id=completion_id,
            wall_s=None if completion_id is None else time.time(),
        )
        self.report(arrived)
        if stream.end is not None and stream.end.error is not None:
            raise stream.end.error
        return stream

    def cancel(self, stream: RequestStream, reason: str) -> None:
        """End a request, unless it has ended."""
        if stream.end is None:
            self.report(events.Cancelled(at_s=self.now_s(), request_id=stream.request_id, reason=reason))

    def stop(self, stream: RequestStream) -> None:
        """A client has all that it wants of an answer that has not ended."""
        if stream.end is None:
            self.report(events.ClientStopped(at_s=self.now_s(), request_id=stream.request_id))

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about a request now; looking changes nothing."""
        return self.coordinator.view(request, self.now_s())

    def end_tokens(self, more: Iterable[int] = ()) -> tuple[int, ...]:
        """The tokens that end an answer: those of the model's config, and more as far as the model knows them."""
        ready = self.supervisor.ready
        known = (token for token in more if token < ready.shape.vocabulary)
        return tuple(dict.fromkeys((*ready.end_tokens, *known)))

    def shown_tokens(self, request_id: int) -> int:
        """Tokens that the client of a request in flight has; 0 of one that is not."""
        stream = self.streams.get(request_id)
        return 0 if stream is None else len(stream.tokens)

    def max_model_len(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return self._clients.max_model_len()

    # events, and the commands that follow

    def report(self, event: Event) -> None:
        """Tell the coordinator what happened, and carry out its commands before the next event."""
        self._events.append(event)
        if self._handling or self._coordinator is None:
            return
        self._handling = True
        try:
            while self._events:
                self._handle(self._events.popleft(), self._coordinator)
        finally:
            self._handling = False

    def _handle(self, event: Event, coordinator: Coordinator) -> None:
        now_s = self.now_s()
        if self.on_event is not None:
            self.on_event(event, now_s)
        for command in coordinator.on(event, now_s):
            try:
                carry_out(command, self)
            except Exception as error:
                if not isinstance(command, (events.PrepareDecode, events.RunPrefill)):
                    raise
                self._cannot_send(command, error)

    # commands

    def set_timer(self, command: events.SetTimer) -> None:
        """Report `TimerFired` of a request later."""
        self._timers.set(command.request_id, command.delay_s)

    def prepare_decode(self, command: events.PrepareDecode) -> None:
        """Tell a decode worker which request will arrive.

        Raises:
            KeyError: when the worker is down.
        """
        prompt, params = self.streams[command.request.id].remaining(command.request.input_tokens)
        keep_at = self._keeper(command.request.id) if self._keeps_answers else None
        order = messages.DecodeOrder(job=self._job(command.attempt), prompt=prompt, params=params, keep_at=keep_at)
        self.supervisor.connections[command.instance].send(order)

    def _keeper(self, request_id: int) -> int | None:
        """The port of the prefill worker that keeps the answer of a request; None where it has just gone down."""
        link = self.supervisor.connections.get(self.coordinator.requests[request_id].prefill_instance.name)
        return None if link is None else link.ready.port

    def run_prefill(self, command: events.RunPrefill) -> None:
        """Tell a worker to compute a prompt, where its prefix is, and where its KVCache goes.

        Raises:
            KeyError: when one of the workers is down.
        """
        request, placement, workers = command.request, command.placement, self.supervisor.connections
        stream, fetch = self.streams[request.id], None
        blocks = blocks_for(placement.reused_tokens, self.spec.block_size_tokens)
        if placement.fetch_from is not None:
            holder = workers.get(placement.fetch_from)  # None where it has just gone down
            fetch = messages.Fetch(placement.fetch_from, None if holder is None else holder.ready.port, blocks)
        elif self.supervisor.shared_store.address is not None and blocks:
            fetch = messages.Fetch(SHARED_STORE, None, blocks)
        prompt, params = stream.remaining(request.input_tokens)
        is_coupled = self.spec.roles[placement.prefill] == "coupled"
        held_blocks = self.coordinator.instances.matched_blocks(placement.prefill, request)
        workers[placement.prefill].send(
            messages.PrefillOrder(
                job=self._job(command.attempt),
                prompt=prompt,
                params=params,
                shown_tokens=request.input_tokens - len(stream.prompt),
                reused_blocks=blocks if blocks < held_blocks else None,
                deliver_to=None if is_coupled else workers[placement.decode].ready.port,
                fetch=fetch,
            )
        )

    def start_decode(self, command: events.StartDecode) -> None:
        """Nothing: a worker decodes as soon as the KVCache is there, and a rejection stops it."""

    def cancel_attempt(self, command: events.CancelAttempt) -> None:
        """Tell a worker to stop an attempt; one that is down has stopped."""
        worker = self.supervisor.connections.get(command.instance)
        if worker is not None:
            worker.send(messages.CancelOrder(self._job(command.attempt)))

    def confirm_instances(self, command: events.ConfirmInstances) -> None:
        """Ask each worker to answer."""
        self.pending_calls.confirm(command.instances)

    def reject(self, command: events.Reject) -> None:
        """End the answer of a request with the reason."""
        assert self.estimate is not None  # noqa: S101  # the cluster is open
        self._clients.reject(command, self.now_s(), self.estimate, is_shut=self._is_shut)

    def finish(self, command: events.Finish) -> None:
        """End the answer of a request."""
        self._clients.finish(command)

    def _job(self, attempt: events.Attempt) -> messages.Job:
        return messages.Job(self._run, attempt.request_id, attempt.n)

    def _cannot_send(self, command: events.PrepareDecode | events.RunPrefill, error: Exception) -> None:
        """A request that cannot be sent to its workers ends, and no other."""
        _LOG.error("request %d cannot be served", command.request.id, exc_info=error)
        self._events += unsent(command, error, self.now_s())

    def _record(self, record: Record) -> None:
        """Write a record of the log; what is cached where stays between the workers and the index."""
        if isinstance(record, CacheChanged):
            return
        try:
            self._write(record)
        except Exception:  # noqa: BLE001  # a full disk, say: requests are served without their log
            _LOG.exception("a record of the run log is lost: %s", record)

    # what workers do

    def _worker_up(self, name: str, worker: WorkerConnection) -> None:
        if self._coordinator is None:
            return  # the first run begins with all workers
        role, tokens = self.spec.roles[name], worker.ready.capacity_tokens
        cache = None if role == "decode" else name
        self.report(
            events.InstanceUp(at_s=self.now_s(), instance=name, role=role, capacity_tokens=tokens, cache=cache)
        )

    def _worker_exit(self, name: str) -> None:
        self.pending_calls.exited(name)
        if self._coordinator is None:  # the first run begins with the workers that are up then
            early = [one for one in self._events if not (isinstance(one, CacheChanged) and one.instance == name)]
            self._events = deque(early)
            return
        self.report(events.InstanceDown(at_s=self.now_s(), instance=name))

    def _time_passes(self, seconds: float) -> None:
        if self._coordinator is None:
            return  # before the first run
        for request_id in self._timers.passed(seconds, self.streams):
            self.report(events.TimerFired(at_s=self.now_s(), request_id=request_id))

    def _shared_store_gone(self) -> None:
        if self._coordinator is not None:  # else the first run begins without what it held
            gone = tuple(self._coordinator.instances.cached(SHARED_STORE))
            self.report(CacheChanged(at_s=self.now_s(), instance=SHARED_STORE, added=(), removed=gone))

    def _heard(self, name: str, message: messages.WorkerMessage) -> None:
        match message:
            case messages.Report():
                self._reported(name, message)
            case messages.CacheUpdate():
                self.damaged_blocks[name] = self.damaged_blocks.get(name, 0) + message.damaged_blocks
                changes = {each: getattr(message, each) for each in ("added", "removed", "promoted", "demoted")}
                self.report(CacheChanged(at_s=self.now_s(), instance=name, **changes))
                if message.shared_added or message.shared_removed:
                    changes = {"added": message.shared_added, "removed": message.shared_removed}
                    self.report(CacheChanged(at_s=self.now_s(), instance=SHARED_STORE, **changes))
            case messages.Pong():
                if self.pending_calls.answered(name, message.number):
                    self.report(events.InstanceConfirmed(at_s=self.now_s(), instance=name))
            case messages.Measured():
                self.pending_calls.measured(name, message)
            case _:
                raise TypeError(f"{name} sends {type(message).__name__}, which is only the first message")

    def _reported(self, name: str, message: messages.Report) -> None:
        """Events of the current run, and tokens: a client gets each when the coordinator counts it as shown."""
        if message.run != self._run:
            return
        for event in message.events:
            match event:
                case events.PrefillDone() | events.ChunkDone() if self.coordinator.is_current(event.attempt):
                    self._clients.note_reuse(event)
                case _:
                    pass
            self.report(self._in_cluster(name, event))
        for request_id, token in message.tokens:
            stream = self.streams.get(request_id)
            if stream is not None and self.coordinator.shown_tokens(request_id) > len(stream.tokens):
                stream.show(token)

    def _in_cluster(self, name: str, event: messages.WorkerEvent) -> Event:
        """An event of a worker in the time of the run; one that failed an attempt names the suspects."""
        changes: dict[str, Any] = {"at_s": event.at_s - self._zero_s}
        if "start_s" in event.__struct_fields__:
            changes["start_s"] = getattr(event, "start_s") - self._zero_s  # noqa: B009  # most events have it
        if isinstance(event, events.AttemptFailed):
            state = self.coordinator.requests.get(event.attempt.request_id)
            if event.retriable and state is not None:
                changes["suspects"] = tuple(worker.name for worker in state.instances)
            changes["reason"] = f"trouble on {name} ({event.reason})"
        return msgspec.structs.replace(event, **changes)

    async def reset_prefix_cache(self) -> None:
        """Empty every cache."""
        await self.pending_calls.drain(messages.ResetPrefixCache)
        await self.pending_calls.drain()
