"""The cluster in real time: worker messages become events of the coordinator, its commands become messages.

The coordinator (`mooncake_lab.cluster`) follows each request, as in the simulator. Here are the clients' streams
of tokens, the messages, and the order in which both are handled. All of it belongs to one event loop.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Self, final

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.cluster import (
    Attempt,
    AttemptFailed,
    CancelAttempt,
    Cancelled,
    ChunkDone,
    ClientStopped,
    ConfirmWorkers,
    Coordinator,
    CoordinatorSpec,
    Event,
    Finish,
    PrefillDone,
    PrefillDropped,
    PrepareDecode,
    Reject,
    RequestArrived,
    RunPrefill,
    StartDecode,
    WorkerConfirmed,
    WorkerDown,
    WorkerState,
    WorkerUp,
)
from mooncake_lab.conductor import ClusterView, Decided, Estimator, LatencyEstimator
from mooncake_lab.core import CacheChanged, Record, Request, block_keys
from mooncake_lab.perf import LatencyModel
from mooncake_lab.serving.budget import Budget
from mooncake_lab.serving.calibration import latency_model
from mooncake_lab.serving.launch import Launcher, WorkerError
from mooncake_lab.serving.messages import (
    CacheUpdate,
    CancelOrder,
    DecodeOrder,
    Fetch,
    Generation,
    Job,
    Measure,
    Measured,
    Ping,
    Pong,
    PrefillOrder,
    Ready,
    Report,
    ResetPrefixCache,
    WorkerEvent,
    WorkerMessage,
)
from mooncake_lab.serving.spec import LiveSpec
from mooncake_lab.serving.stream import End, FailedError, RejectedError, RequestStream
from mooncake_lab.serving.supervisor import Callbacks, Link, Supervisor

_LOG: Final = logging.getLogger(__name__)
_SHUT: Final = "the cluster is shut down"
_MEASURE_S: Final = 120.0


@final
class ClusterRuntime:
    """Workers, the coordinator, and the streams of all requests in flight. Mutable.

    Args:
        spec: workers and policies.
        model: how long everything takes, as the Conductor estimates; None measures it when the workers are ready.
        estimate: what the Conductor estimates instead.
        pool: where workers come from; None makes one for this cluster alone.
        write: gets each record as the cluster learns of it.
        decided: told each decision.
        heard: told each event, and the time at which the coordinator learned of it.
    """

    def __init__(
        self,
        spec: LiveSpec,
        model: LatencyModel | None = None,
        estimate: Estimator | None = None,
        *,
        pool: Launcher | None = None,
        write: Callable[[Record], None],
        decided: Callable[[Decided], None] | None = None,
        heard: Callable[[Event, float], None] | None = None,
    ) -> None:
        self.spec = spec
        self.model = model
        self.streams: dict[int, RequestStream] = {}
        """The answers to requests in flight, by request id."""
        self.damaged_blocks: dict[str, int] = {}
        """Blocks that the workers of each name have found damaged in their stores."""
        callbacks = Callbacks(worker_up=self._worker_up, message=self._heard, worker_exit=self._worker_exit)
        self.supervisor = Supervisor(spec, callbacks, pool)
        self._estimate = estimate
        self._coordinator: Coordinator | None = None
        self._run = 0
        self._zero_s = time.monotonic()
        self._events: deque[Event] = deque()
        self._handling = False
        self._write, self._decided, self._tell = write, decided, heard
        self._is_shut = False
        self._ids = itertools.count()
        self._probes = itertools.count(-1, -1)  # those of the supervisor count up
        self._probe_of: dict[str, int] = {}  # the latest ping of a worker that has to be confirmed
        self._measured: dict[str, asyncio.Future[Measured]] = {}
        self._pongs: dict[int, tuple[set[str], asyncio.Event]] = {}
        self._actions: dict[type, Callable[[Any], None]] = {
            PrepareDecode: self._prepare_decode,
            RunPrefill: self._run_prefill,
            StartDecode: _nothing,  # the worker decodes as soon as KVCache is there; a refusal cancels
            CancelAttempt: self._cancel_attempt,
            ConfirmWorkers: self._confirm_workers,
            Reject: self._reject,
            Finish: self._finish,
        }

    async def __aenter__(self) -> Self:
        try:
            await self.supervisor.start()
            if self.model is None:
                _LOG.info("timing the workers for the Conductor's latency model")
                self.model = await self.calibrate()
                if (pacer := self.spec.metronome) is not None:
                    pace = {name: getattr(pacer, name) for name in pacer.__struct_fields__}
                    self.model = replace(self.model, **pace)
            self._estimate = self._estimate or LatencyEstimator(self.model)
        except BaseException:
            await self.close()
            raise
        self.begin_run()
        self.supervisor.keep_spares()  # only now, so that they disturb neither the start nor the timing
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every request in flight, and every worker."""
        self.shut()
        await self.supervisor.close()

    def shut(self) -> None:
        """End every request in flight, and accept no more; clients are told why."""
        self._is_shut = True
        for request_id in list(self.streams):
            self.report(Cancelled(at_s=self.now_s(), request_id=request_id, reason=_SHUT))

    def begin_run(self) -> None:
        """Time 0 is now, and history begins anew; requests in flight are let go, workers keep their caches.

        A request that is let go is cancelled at its workers, and the log does not say that it ended.
        """
        assert self._estimate is not None  # noqa: S101  # the cluster is open
        before, streams = self._coordinator, list(self.streams.values())
        caches = {} if before is None else {each.name: before.workers.cached(each.name) for each in self.workers}
        if before is not None:
            for state in before.requests.values():
                for worker in (state.prefill, state.decode):
                    if worker is not None:
                        self._cancel_attempt(CancelAttempt(state.attempt, worker.name))
        self.streams.clear()
        for stream in streams:
            stream.close(End("cancelled"))
        self._run, self._zero_s = self._run + 1, time.monotonic()
        self._budget = Budget(self.spec, self.streams, lambda: self.workers)
        self._probe_of.clear()
        self._coordinator = Coordinator(
            _rules(self.spec), self._estimate, write=self._record, extend=self._extend, observe=self._decided
        )
        early = list(self._events)  # what workers found in their caches before the first run
        self._events.clear()
        for name in self.spec.roles:
            if name in self.supervisor.links:
                self._worker_up(name, self.supervisor.links[name])
            if caches.get(name):
                self.report(CacheChanged(at_s=0.0, instance=name, added=tuple(caches[name])))
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
    def workers(self) -> list[WorkerState]:
        """What the cluster knows about the workers that are up."""
        return self.coordinator.workers.up

    # what clients do

    def submit(
        self,
        prompt: npt.NDArray[np.int32],
        asked: Generation,
        *,
        request_id: int | None = None,
        arrival_s: float = 0.0,
        session: str | None = None,
        priority: int = 0,
        completion_id: str | None = None,
    ) -> RequestStream:
        """Accept a request and place it; its tokens come through the stream.

        Args:
            prompt: token ids, shape (n,).
            asked: what is wanted; its prompt field is filled in later.
            request_id: its id in the log; None takes the next free number.
            arrival_s: for policies, the moment since the run began at which it was to arrive.
            session: the conversation it belongs to, for policies.
            priority: how urgent it is, for policies.
            completion_id: its id for its client, for the log.

        Raises:
            ValueError: when it can never be served.
            RejectedError: when the cluster does not accept it now.
            FailedError: when the cluster is shut down.
        """
        if self._is_shut:
            raise FailedError(_SHUT)
        self._check(prompt, asked)
        request = Request(
            id=next(self._ids) if request_id is None else request_id,
            arrival_s=arrival_s,
            input_tokens=len(prompt),
            block_keys=self._keys(prompt),
            block_size_tokens=self.spec.block_size_tokens,
            session=session,
            priority=priority,
        )
        if request.id in self.streams:
            raise ValueError(f"request {request.id} is in flight already")
        stream = RequestStream(request_id=request.id, prompt=prompt, asked=asked)
        refusal = self._budget.refusal(stream)
        self.streams[request.id] = stream
        wall_s = None if completion_id is None else time.time()
        self.report(
            RequestArrived(
                at_s=self.now_s(), request=request, refusal=refusal, completion_id=completion_id, wall_s=wall_s
            )
        )
        if stream.end is not None and stream.end.error is not None:
            raise stream.end.error
        return stream

    def cancel(self, stream: RequestStream, reason: str = "the client went away") -> None:
        """End a request, unless it has ended."""
        if stream.end is None:
            self.report(Cancelled(at_s=self.now_s(), request_id=stream.request_id, reason=reason))

    def stop(self, stream: RequestStream) -> None:
        """A client has all that it wants of an answer that has not ended."""
        if stream.end is None:
            self.report(ClientStopped(at_s=self.now_s(), request_id=stream.request_id))

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about a request now; looking changes nothing."""
        return self.coordinator.view(request, self.now_s())

    def max_model_len(self) -> int:
        """The most tokens that a prompt and its answer may have together: the window, or an engine's KVCache."""
        rooms = (each.capacity_tokens for each in self.workers if each.role != "prefill")
        return min((self._ready.window, *rooms))

    def _check(self, prompt: npt.NDArray[np.int32], asked: Generation) -> None:
        if len(prompt) < 1 or asked.max_new_tokens < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {asked.max_new_tokens} new ones; at least 1 each is needed"
            )
        tokens, most = len(prompt) + asked.max_new_tokens - 1, self.max_model_len()  # the last one is not computed
        if tokens > most:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {asked.max_new_tokens} new ones are too many;"
                f" together they may be {most + 1}"
            )
        lowest, highest, known = int(prompt.min()), int(prompt.max()), self._ready.shape.vocabulary
        if lowest < 0 or highest >= known:
            raise ValueError(f"the prompt holds tokens {lowest} to {highest}; the model knows 0 to {known - 1}")

    def _keys(self, prompt: npt.NDArray[np.int32]) -> tuple[bytes, ...]:
        """The keys of a prompt's blocks."""
        return tuple(block_keys(prompt, self.spec.block_size_tokens, namespace=self._ready.fingerprint))

    @property
    def _ready(self) -> Ready:
        """What the latest worker to come up said about the model, which all of them run."""
        return self.supervisor.ready

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
        if self._tell is not None:
            self._tell(event, now_s)
        for command in coordinator.on(event, now_s):
            try:
                self._actions[type(command)](command)
            except Exception as error:
                if not isinstance(command, (PrepareDecode, RunPrefill)):
                    raise
                self._cannot_send(command, error)

    def _cannot_send(self, command: PrepareDecode | RunPrefill, error: Exception) -> None:
        """A request that cannot be sent to its workers ends, and no other."""
        _LOG.error("request %d cannot be served", command.request.id, exc_info=error)
        now_s, attempt = self.now_s(), command.attempt
        if isinstance(command, RunPrefill):
            self._events.append(PrefillDropped(at_s=now_s, attempt=attempt, worker=command.placement.prefill))
        reason = f"the request cannot be served: {error!r}"
        self._events.append(AttemptFailed(at_s=now_s, attempt=attempt, reason=reason, retriable=False))

    def _record(self, record: Record) -> None:
        """Write a record of the log; what is cached where stays between the workers and the index."""
        if isinstance(record, CacheChanged):
            return
        try:
            self._write(record)
        except Exception:  # noqa: BLE001  # a full disk, say: requests are served without their log
            _LOG.exception("a record of the run log is lost: %s", record)

    def _extend(self, request: Request, tokens: int) -> Request | None:
        """The request with tokens of its answer at the end of its prompt; None where its answer is complete."""
        stream = self.streams[request.id]
        if stream.complete_by(self._ready.end_tokens) is not None:
            return None
        grown = request.input_tokens + tokens
        known = np.concatenate([stream.prompt, np.asarray(stream.tokens, dtype=np.int32)])[:grown]
        return replace(request, input_tokens=grown, block_keys=self._keys(known))

    def _prepare_decode(self, command: PrepareDecode) -> None:
        asked = self.streams[command.request.id].remaining(command.request.input_tokens)
        self._link(command.worker).send(DecodeOrder(job=self._job(command.attempt), asked=asked))

    def _run_prefill(self, command: RunPrefill) -> None:
        request, placement = command.request, command.placement
        stream, fetch = self.streams[request.id], None
        if placement.fetch_from is not None:
            blocks = -(-placement.reused_tokens // self.spec.block_size_tokens)
            fetch = Fetch(placement.fetch_from, self._link(placement.fetch_from).ready.port, blocks)
        is_coupled = placement.prefill == placement.decode
        self._link(placement.prefill).send(
            PrefillOrder(
                job=self._job(command.attempt),
                asked=stream.remaining(request.input_tokens),
                shown_tokens=request.input_tokens - len(stream.prompt),
                deliver_to=None if is_coupled else self._link(placement.decode).ready.port,
                fetch=fetch,
            )
        )

    def _cancel_attempt(self, command: CancelAttempt) -> None:
        link = self.supervisor.links.get(command.worker)
        if link is not None:
            link.send(CancelOrder(self._job(command.attempt)))

    def _confirm_workers(self, command: ConfirmWorkers) -> None:
        """Ping each worker; one that is down was reported, or will be."""
        for name in command.workers:
            link = self.supervisor.links.get(name)
            if link is not None:
                self._probe_of[name] = next(self._probes)
                link.send(Ping(self._probe_of[name]))

    def _reject(self, command: Reject) -> None:
        stream = self.streams.pop(command.request_id)
        if command.stage == "client":
            stream.close(End("cancelled", FailedError(command.reason) if self._is_shut else None))
        elif command.stage == "failed":
            stream.close(End("failed", FailedError(command.reason)))
        else:
            retry_after_s = self._retry_after_s(stream)
            stream.close(End("rejected", RejectedError(command.stage, command.reason, retry_after_s)))
        if command.stage != "frontdoor":
            self._budget.note_end(stream, self.now_s())

    def _retry_after_s(self, stream: RequestStream) -> float:
        """When a client that was refused may find room, and a shorter queue than now."""
        assert self._estimate is not None  # noqa: S101  # the cluster is open
        now_s = self.now_s()
        backlogs = [each.prefill_view(0, now_s).backlog_s for each in self.workers if each.role != "decode"]
        shortest_s = float(math.ceil(min(backlogs, default=0.0)))
        return max(shortest_s, self._budget.retry_after_s(stream, now_s, self._estimate))

    def _finish(self, command: Finish) -> None:
        stream = self.streams.pop(command.request_id)
        stream.close(End(stream.complete_by(self._ready.end_tokens) or "stop"))
        self._budget.note_end(stream, self.now_s())

    def _job(self, attempt: Attempt) -> Job:
        return Job(self._run, attempt.request_id, attempt.n)

    def _link(self, name: str) -> Link:
        return self.supervisor.links[name]

    # what workers do

    def _worker_up(self, name: str, link: Link) -> None:
        if self._coordinator is None:
            return  # the first run begins with all workers
        role = self.spec.roles[name]
        self.report(
            WorkerUp(
                at_s=self.now_s(),
                worker=name,
                role=role,
                capacity_tokens=link.ready.capacity_tokens,
                cache=None if role == "decode" else name,
            )
        )

    def _worker_exit(self, name: str, reason: str) -> None:
        for waiting, everybody in self._pongs.values():
            waiting.discard(name)
            if not waiting:
                everybody.set()
        if name in self._measured:
            self._measured.pop(name).set_exception(WorkerError(f"{name} died while it was measured: {reason}"))
        self.report(WorkerDown(at_s=self.now_s(), worker=name))

    def _heard(self, name: str, message: WorkerMessage) -> None:
        match message:
            case Report():
                self._reported(name, message)
            case CacheUpdate():
                self.damaged_blocks[name] = self.damaged_blocks.get(name, 0) + message.damaged_blocks
                changed = CacheChanged(
                    at_s=self.now_s(), instance=name, added=message.added, removed=message.removed
                )
                self.report(changed)
            case Pong():
                self._answered(name, message.number)
            case Measured():
                self._measured.pop(name).set_result(message)
            case _:
                raise TypeError(f"{name} sends {type(message).__name__}, which is only the first message")

    def _reported(self, name: str, message: Report) -> None:
        """Events of the current run, and tokens: a client gets each when the coordinator counts it as shown."""
        if message.run != self._run:
            return
        for event in message.events:
            if isinstance(event, (PrefillDone, ChunkDone)):
                self._note_reuse(event)
            self.report(self._in_cluster(name, event))
        for request_id, token in message.tokens:
            stream = self.streams.get(request_id)
            if stream is not None and self.coordinator.shown_tokens(request_id) > len(stream.tokens):
                stream.show(token)

    def _in_cluster(self, name: str, event: WorkerEvent) -> Event:
        """An event of a worker in the time of the run; one that failed an attempt names the suspects."""
        changes: dict[str, Any] = {"at_s": event.at_s - self._zero_s}
        if "start_s" in event.__struct_fields__:
            changes["start_s"] = getattr(event, "start_s") - self._zero_s  # noqa: B009  # most events have it
        if isinstance(event, AttemptFailed):
            state = self.coordinator.requests.get(event.attempt.request_id)
            if event.retriable and state is not None and state.prefill is not None and state.decode is not None:
                changes["suspects"] = tuple(dict.fromkeys((state.prefill.name, state.decode.name)))
            changes["reason"] = f"trouble on {name} ({event.reason})"
        return msgspec.structs.replace(event, **changes)

    def _note_reuse(self, event: PrefillDone | ChunkDone) -> None:
        """The first prefill says what was reused: a later one, after a failure, finds what the first computed."""
        stream = self.streams.get(event.attempt.request_id)
        if stream is not None and stream.cached_tokens is None and self.coordinator.is_current(event.attempt):
            stream.cached_tokens = min(event.reused_tokens, len(stream.prompt))

    def _answered(self, name: str, number: int) -> None:
        if number in self._pongs:
            waiting, everybody = self._pongs[number]
            waiting.discard(name)
            if not waiting:
                everybody.set()
        elif self._probe_of.get(name) == number:
            self.report(WorkerConfirmed(at_s=self.now_s(), worker=name))

    # between runs

    async def calibrate(self) -> LatencyModel:
        """Let one worker of each role time itself, one after the other while nothing else runs.

        Raises:
            ValueError: when what was timed fits no latency model.
        """
        links, found = self.supervisor.links, list[Measured]()
        names = {role: name for name, role in reversed(self.spec.roles.items())}
        for role, name in names.items():
            port = links[names["decode"]].ready.port if role == "prefill" else None
            self._measured[name] = asyncio.get_running_loop().create_future()
            links[name].send(Measure(port))
            found.append(await asyncio.wait_for(self._measured[name], _MEASURE_S))
        shape = self._ready.shape
        return latency_model(shape, found, f"{shape.name} on {self._ready.device}, measured at start")

    async def drain(self, order: type[Ping | ResetPrefixCache] = Ping) -> None:
        """Return when everything that workers have reported so far is handled, and the order is done."""
        waiting = set(self.supervisor.links)
        if waiting:
            everybody = asyncio.Event()
            number = self.supervisor.ask_everybody(order)
            self._pongs[number] = waiting, everybody
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(everybody.wait(), self.spec.silence_s)
            self._pongs.pop(number, None)

    async def reset_prefix_cache(self) -> None:
        """Empty every cache."""
        await self.drain(ResetPrefixCache)
        await self.drain()


def _rules(spec: LiveSpec) -> CoordinatorSpec:
    """The rules of the live cluster: its requests wait for workers, and a policy's error costs one request."""
    return CoordinatorSpec(
        placement=spec.places,
        admission=spec.admission,
        slo=spec.slo,
        first_shown_by=spec.first_shown_by,
        wait_for_workers=True,
        max_inflight_requests=spec.most_under_way,
        max_attempts=spec.most_attempts,
        reject_policy_errors=True,
    )


def _nothing(_: StartDecode) -> None:
    pass
