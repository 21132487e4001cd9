"""The coordinator: follows each request from its arrival to its last token, in the real and the simulated cluster.

A runtime reports events and carries out the commands that come back. The coordinator does no I/O and reads no
clock: the same events give the same commands and the same run log. Where a request is, is its `Phase`; what a
worker has to do, as far as its events tell, is its `WorkerState`. `Attempts` begins and ends the attempts of
requests; the handlers here say which event leads from one phase to the next:

    RequestArrived, TimerFired  deciding    -> queued: placed; else it is rejected, or it is waiting
    TimerFired                  waiting     -> rejected, when it has waited as long as it may
    PrefillStarted              queued      -> prefilling
    PrefillDone                 prefilling  -> moving
    KVArrived                   moving      -> loading: admitted a second time; else it is rejected
    KVLoaded                    loading     -> joining
    DecodeStarted               joining     -> decoding, with the first token
    RequestDone                 decoding    -> finished
    AttemptFailed, WorkerDown   any placed  -> queued: placed again; or it is unconfirmed, waiting or rejected

A worker may report the end of a phase before another worker reports its beginning, so a phase may be skipped. On a
coupled worker, `ChunkDone` takes the place of the prefill events, and no KVCache moves.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, final

from msgspec.structs import replace

from mooncake_lab.cluster import events
from mooncake_lab.cluster.attempts import AT_DECODE, AT_PREFILL, Attempts, CoordinatorRules, RequestState
from mooncake_lab.cluster.events import POOL, Attempt, Command, Event
from mooncake_lab.cluster.spec import ClusterSpec
from mooncake_lab.cluster.workers import WorkerState, WorkerTable
from mooncake_lab.conductor import ClusterView, Decided, Estimator
from mooncake_lab.core import (
    Arrived,
    CacheChanged,
    DecodeStretch,
    FirstToken,
    Moved,
    Prefilled,
    Record,
    Request,
    RunEnded,
)

_Subject: TypeAlias = Literal["request", "attempt", "work", "cluster"]
"""What an event is about: a request in flight, its current attempt, work of a worker for any attempt, or none."""


@final
class Coordinator:
    """Turns events into commands, and writes the run log.

    Args:
        spec: the policies.
        estimate: what the Conductor believes about time.
        rules: of the runtime.
        write: gets each record of the run log.
        extend: the request of a failed attempt, with as many tokens of its answer at the end of its prompt; None
            where no token is left to generate.
        observe: told each decision, and the view that it is made on.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        estimate: Estimator,
        rules: CoordinatorRules,
        *,
        write: Callable[[Record], None],
        extend: Callable[[Request, int], Request | None],
        observe: Callable[[Decided], None] | None = None,
    ) -> None:
        self.workers = WorkerTable(rules.view_age_s)
        self._rules = rules
        self._prefill_shows_first = spec.first_shown_by == "prefill"
        self._write = write
        self._attempts = Attempts(spec, rules, estimate, self.workers, write, extend, observe)
        self._commands = self._attempts.commands
        self.requests = self._attempts.requests
        """The requests in flight, by id."""
        self._now_s = 0.0  # when the event under way was learned of
        self._handlers: dict[type, tuple[_Subject, Callable[..., None]]] = {
            events.PrefixFetched: ("work", self._prefix_fetched),
            events.TierRead: ("work", self._tier_read),
            events.PrefillStarted: ("work", self._prefill_started),
            events.PrefillDropped: ("work", self._prefill_dropped),
            events.PrefillDone: ("work", self._prefill_done),
            events.ChunkDone: ("work", self._chunk_done),
            events.Preempted: ("work", self._preempted),
            events.KVSent: ("work", self._kv_sent),
            events.KVArrived: ("attempt", self._kv_arrived),
            events.KVLoaded: ("attempt", self._kv_loaded),
            events.DecodeStarted: ("attempt", self._decode_started),
            events.RequestDone: ("attempt", self._request_done),
            events.AttemptFailed: ("attempt", self._attempt_failed),
            events.TimerFired: ("request", self._timer_fired),
            events.Cancelled: ("request", self._cancelled),
            events.ClientStopped: ("request", self._client_stopped),
            events.RequestArrived: ("cluster", self._request_arrived),
            DecodeStretch: ("cluster", self._decoded),
            events.FetchStarted: ("cluster", self._attempts.fetch_started),
            events.PrefillSlotFree: ("cluster", self.workers.free_slot),
            events.WorkerUp: ("cluster", self._worker_up),
            events.WorkerDown: ("cluster", self._worker_down),
            events.WorkerConfirmed: ("cluster", self._confirmed),
            CacheChanged: ("cluster", self._cache_changed),
            RunEnded: ("cluster", self._run_ended),
        }

    def on(self, event: Event, now_s: float) -> Sequence[Command]:
        """What is to be done about an event that the coordinator learns of now; not re-entrant.

        An event about the work of a worker updates what is known of that worker, even where its attempt is over.
        Any other event about an attempt that is over, about a request that has ended, or about an unknown worker
        changes nothing, and neither does one that was reported before.
        """
        self._now_s = now_s
        told: Any = event
        subject, handle = self._handlers[type(told)]
        if subject == "cluster":
            handle(told)
        elif subject == "attempt":
            state = self._attempts.current(told.attempt)
            if state is not None:
                handle(told, state)
        elif subject == "work":
            worker = self.workers.get(told.worker)
            if worker is not None:
                handle(told, worker, self._attempts.current(told.attempt))
        else:
            state = self.requests.get(told.request_id)
            if state is not None:
                handle(told, state)
        commands = self._commands
        if not commands:  # most events need nothing
            return ()
        asked = tuple(commands)
        commands.clear()
        return asked

    def view(self, request: Request, now_s: float) -> ClusterView:
        """What the Conductor may know about a request now; looking changes nothing in the cluster."""
        return self.workers.view(request, now_s, self._attempts.history)

    def is_current(self, attempt: Attempt) -> bool:
        """Whether a request is in this attempt now."""
        return self._attempts.current(attempt) is not None

    def shown_tokens(self, request_id: int) -> int:
        """Tokens that the client of a request in flight has now."""
        return self.requests[request_id].shown_now()

    # a request arrives

    def _request_arrived(self, event: events.RequestArrived) -> None:
        request, requests = event.request, self.requests
        if request.id in requests:
            return
        self._attempts.record(
            Arrived(
                at_s=event.at_s,
                request_id=request.id,
                input_tokens=request.input_tokens,
                completion_id=event.completion_id,
                wall_s=event.wall_s,
            )
        )
        count, most, refusal = len(requests), self._rules.max_inflight_requests, event.refusal
        state = requests[request.id] = RequestState(request, Attempt(request.id, 0))
        if most is not None and count >= most:
            refusal = f"{count} requests are in flight; allowed are {most}"
        if refusal:
            self._attempts.reject(state, "frontdoor", refusal, self._now_s)
        elif self._rules.schedule_s:
            self._commands.append(events.SetTimer(request.id, self._rules.schedule_s))
        else:
            self._attempts.decide(state, self._now_s)

    def _timer_fired(self, _: events.TimerFired, state: RequestState) -> None:
        if state.phase == "deciding":
            self._attempts.decide(state, self._now_s)
        elif state.phase == "waiting":
            self._attempts.stop_waiting(state, self._now_s)

    # prefill

    def _prefix_fetched(self, event: events.PrefixFetched, worker: WorkerState, _: RequestState | None) -> None:
        source = self.workers.get(event.source)
        if source is None and event.source != POOL:
            return
        is_sent = source is not None and source.end_sending(event.attempt)
        is_news = worker.fetched(event.attempt, event.source) or is_sent
        if is_news and event.bytes:
            self._moved(event, event.source, event.worker)

    def _tier_read(self, event: events.TierRead, worker: WorkerState, state: RequestState | None) -> None:
        is_news = worker.read_tier(event.attempt)
        if state is not None and state.placement is not None and state.placement.fetch_from == worker.name:
            # the holder may be heard later than the fetch, and may have demoted blocks without a report so far
            is_news, state.holder_has_read = is_news or not state.holder_has_read, True
        if is_news:
            self._moved(event, f"{event.worker}/ssd", f"{event.worker}/dram")

    def _prefill_started(
        self, event: events.PrefillStarted, worker: WorkerState, state: RequestState | None
    ) -> None:
        if worker.start_prompt(event.attempt, event.at_s) and state is not None and state.phase == "queued":
            state.phase = "prefilling"

    def _prefill_dropped(self, event: events.PrefillDropped, worker: WorkerState, _: RequestState | None) -> None:
        worker.remove_prompt(event.attempt, event.at_s)

    def _prefill_done(self, event: events.PrefillDone, worker: WorkerState, state: RequestState | None) -> None:
        if not worker.remove_prompt(event.attempt, event.at_s):
            return
        self._prefilled(event)
        if state is not None:
            if state.phase in AT_PREFILL:
                state.phase = "moving"
                worker.sending[event.attempt] = state.decode.name
            if self._prefill_shows_first and not state.shown_tokens:
                self._show_first(state, event.at_s)

    def _prefilled(self, event: events.PrefillDone | events.ChunkDone) -> None:
        self._write(
            Prefilled(
                at_s=event.at_s,
                request_id=event.attempt.request_id,
                instance=event.worker,
                start_s=event.start_s,
                computed_tokens=event.computed_tokens,
                reused_tokens=event.reused_tokens,
            )
        )

    # a coupled worker

    def _chunk_done(self, event: events.ChunkDone, worker: WorkerState, state: RequestState | None) -> None:
        if event.start_s < worker.up_s or not worker.is_news(event):
            return
        self._prefilled(event)
        if state is not None:
            if state.phase == "queued":
                state.phase = "prefilling"
            worker.hold(state.request.id, max(event.context_tokens, state.request.input_tokens))

    def _preempted(self, event: events.Preempted, worker: WorkerState, state: RequestState | None) -> None:
        if worker.is_news(event) and state is not None:
            if state.phase == "prefilling":
                state.phase = "queued"
            worker.hold(state.request.id, max(event.context_tokens, state.request.input_tokens))

    # from prefill to decode

    def _kv_sent(self, event: events.KVSent, worker: WorkerState, _: RequestState | None) -> None:
        worker.sent(event.attempt)

    def _kv_arrived(self, event: events.KVArrived, state: RequestState) -> None:
        """Once the KVCache is at the decode worker, admission is asked again (arXiv §3, step 4)."""
        if state.phase not in AT_PREFILL and state.phase != "moving":
            return
        self._moved(event, state.prefill.name, state.decode.name)
        if not event.is_last:
            return
        state.prefill.end_sending(event.attempt)
        refusal = None if state.resumes else self._attempts.double_check(state)
        if refusal is not None:
            self._attempts.cancel(state)
            self._attempts.reject(state, refusal.stage, refusal.reason, self._now_s)
            return
        state.phase = "loading"
        state.decode.join(state.request.id, event.at_s)
        shows_computed = state.resumes or not state.shown_tokens
        self._commands.append(
            events.StartDecode(event.attempt, state.decode.name, state.shown_tokens, shows_computed)
        )

    def _kv_loaded(self, event: events.KVLoaded, state: RequestState) -> None:
        if state.phase not in AT_DECODE:
            self._attempts.join(state, event.at_s)

    def _moved(
        self, event: events.PrefixFetched | events.TierRead | events.KVArrived, source: str, destination: str
    ) -> None:
        self._write(
            Moved(
                at_s=event.at_s,
                request_id=event.attempt.request_id,
                source=source,
                destination=destination,
                start_s=event.start_s,
                bytes=event.bytes,
            )
        )

    # decode

    def _decode_started(self, event: events.DecodeStarted, state: RequestState) -> None:
        """The token that prefill computed is shown: the first, or after a failure the next."""
        if state.phase == "decoding":
            return
        if state.phase != "joining":
            self._attempts.join(state, event.at_s)
        state.phase = "decoding"
        worker, request_id, coupled = state.decode, state.request.id, state.decode is state.prefill
        worker.start(request_id)
        if coupled:
            worker.remove_prompt(event.attempt, event.at_s)
        if not state.shown_tokens:
            self._show_first(state, event.at_s)
        elif state.resumes and not coupled:
            state.shown_tokens += 1
            self._write(
                DecodeStretch(
                    at_s=event.at_s,
                    instance=worker.name,
                    start_s=event.at_s,
                    steps=1,
                    first_step_s=0.0,
                    step_growth_s=0.0,
                    request_ids=(request_id,),
                )
            )

    def _show_first(self, state: RequestState, at_s: float) -> None:
        state.shown_tokens = 1
        self._attempts.record(FirstToken(at_s=at_s, request_id=state.request.id))

    def _decoded(self, event: DecodeStretch) -> None:
        worker = self.workers.get(event.instance)
        if worker is None or event.start_s < worker.stepped_until_s:
            return
        here = worker.started
        if not here.issuperset(event.request_ids):  # some attempts are over
            event = replace(event, request_ids=tuple(filter(here.__contains__, event.request_ids)))
        if event.request_ids:
            self._write(event)
        worker.step(event.request_ids, event.steps, event.at_s)

    def _request_done(self, event: events.RequestDone, state: RequestState) -> None:
        if state.phase == "decoding":
            tokens = state.shown_now()
            self._attempts.release(state)
            self._attempts.finish(state, tokens, event.at_s)

    # an attempt fails, a client leaves

    def _attempt_failed(self, event: events.AttemptFailed, state: RequestState) -> None:
        if event.retriable:
            self._attempts.place_again(state, event.reason, self._now_s, event.suspects)
        else:
            self._attempts.cancel(state)
            self._attempts.reject(state, event.stage, event.reason, event.at_s)

    def _cancelled(self, event: events.Cancelled, state: RequestState) -> None:
        self._attempts.cancel(state)
        self._attempts.reject(state, "client", event.reason, event.at_s)

    def _client_stopped(self, event: events.ClientStopped, state: RequestState) -> None:
        tokens = state.shown_now()
        self._attempts.cancel(state)
        self._attempts.finish(state, tokens, event.at_s)

    # workers

    def _cache_changed(self, event: CacheChanged) -> None:
        if self.workers.cache_changed(event):
            moves = event.promoted or event.demoted
            self._write(replace(event, promoted=(), demoted=()) if moves else event)

    def _worker_up(self, event: events.WorkerUp) -> None:
        self.workers.add(event)
        for state in self._attempts.by_arrival():
            if state.phase == "waiting":
                state.why = state.why or f"placed when {event.worker} was up: "
                self._attempts.decide(state, self._now_s)

    def _worker_down(self, event: events.WorkerDown) -> None:
        """The requests that need the worker are placed again, but for those that its last step still serves."""
        worker = self.workers.remove(event.worker)
        if worker is None:
            return
        for state in self._attempts.by_arrival():
            in_step = event.finishes_step and (worker.role == "coupled" or state.phase in AT_DECODE)
            if state.needs(worker.name) and not in_step:
                self._attempts.place_again(state, f"{worker.name} failed", self._now_s)
        self._confirmed(event)

    def _confirmed(self, event: events.WorkerConfirmed | events.WorkerDown) -> None:
        """It is known of a worker whether it is up."""
        for state in self._attempts.by_arrival():
            if state.phase == "unconfirmed":
                state.suspects -= {event.worker}
                if not state.suspects:
                    self._attempts.decide(state, self._now_s)

    def _run_ended(self, event: RunEnded) -> None:
        """The log is cut: requests in flight stay open in it, and go on if the runtime does."""
        others = [state for id_, state in self.requests.items() if id_ not in event.tokens and state.shown_tokens]
        shown = {state.request.id: state.shown_now() for state in others}
        self._write(RunEnded(at_s=event.at_s, tokens=shown | event.tokens))
