"""The coordinator: follows each request from its arrival to its last token, in the real and the simulated cluster.

A runtime reports events and carries out the commands that come back. The coordinator does no I/O and reads no
clock: the same events give the same commands and the same run log. Where a request is, is its `Phase`; what a worker
has to do, as far as its events tell, is its `WorkerState`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, final

from mooncake_lab.cluster import events
from mooncake_lab.cluster.commands import (
    CancelAttempt,
    Command,
    ConfirmWorkers,
    Finish,
    PrepareDecode,
    Reject,
    RunPrefill,
    SetTimer,
    StartDecode,
)
from mooncake_lab.cluster.events import Attempt, Event
from mooncake_lab.cluster.request_state import Phase, RequestState
from mooncake_lab.cluster.worker_state import WorkerState
from mooncake_lab.cluster.worker_table import WorkerTable
from mooncake_lab.conductor import (
    AdmissionPolicy,
    AdmitAll,
    ClusterView,
    Decision,
    Estimator,
    Experience,
    Placement,
    PlacementPolicy,
    Rejection,
    decide,
)
from mooncake_lab.core import (
    SLO,
    Arrived,
    CacheChanged,
    DecodeStretch,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Record,
    Rejected,
    Request,
    RunEnded,
)

_NONE: Final[tuple[Command, ...]] = ()
_BEFORE_ARRIVAL: Final = frozenset({Phase.QUEUED, Phase.PREFILLING, Phase.MOVING})
"""Placed, and the KVCache is not at the decode worker yet."""
_AT_DECODE: Final = frozenset({Phase.JOINING, Phase.DECODING})
"""The KVCache is in the GPU memory of the decode worker, and no other worker is needed any more."""


@final
class Coordinator:
    """Turns events into commands, and writes the run log.

    Args:
        placement: where requests go.
        admission: which of them are served.
        slo: the limits that admission keeps.
        estimate: what the Conductor believes about time.
        write: gets each record of the run log.
        extend: the request of a failed attempt, with tokens that were shown in it at the end of its prompt; None
            where no token is left to generate.
        schedule_s: from a request's arrival to its decision.
        view_age_s: how old the loads may be on which the Conductor decides; 0 is always the present.
        first_shown_by: which stage shows the first token.
        wait_for_workers: whether a request that finds no worker waits for one, or is rejected.
        max_inflight_requests: one more is rejected; None is no limit.
        max_attempts: how often a request is placed; None is no limit.
        observe: told each view that a decision is made on.
    """

    def __init__(
        self,
        *,
        placement: PlacementPolicy,
        admission: AdmissionPolicy,
        slo: SLO,
        estimate: Estimator,
        write: Callable[[Record], None],
        extend: Callable[[Request, int], Request | None],
        schedule_s: float = 0.0,
        view_age_s: float = 0.0,
        first_shown_by: Literal["decode", "prefill"] = "decode",
        wait_for_workers: bool = False,
        max_inflight_requests: int | None = None,
        max_attempts: int | None = None,
        observe: Callable[[Request, ClusterView], None] | None = None,
    ) -> None:
        self.workers = WorkerTable(view_age_s)
        self.requests: dict[int, RequestState] = {}
        """Those in flight."""
        self._placement = placement
        self._admission = admission
        self._slo = slo
        self._estimate = estimate
        self._write = write
        self._extend = extend
        self._schedule_s = schedule_s
        self._first_shown_by = first_shown_by
        self._wait_for_workers = wait_for_workers
        self._max_inflight_requests = max_inflight_requests
        self._max_attempts = max_attempts
        self._observe = observe
        self._history = Experience()
        self._in_transit: dict[int, RequestState] = {}  # placed, and not at the decode worker yet
        self._unplaced: dict[int, RequestState] = {}  # waiting for workers, or for word of them
        self._handlers: dict[type, Callable[[Any, float], Sequence[Command]]] = {
            events.RequestArrived: self._request_arrived,
            events.TimerFired: self._timer_fired,
            events.PrefixFetched: self._prefix_fetched,
            events.TierRead: self._tier_read,
            events.PrefillStarted: self._prefill_started,
            events.PrefillSlotFree: self._prefill_slot_free,
            events.PrefillDropped: self._prefill_dropped,
            events.PrefillDone: self._prefill_done,
            events.KVArrived: self._kv_arrived,
            events.KVLoaded: self._kv_loaded,
            events.DecodeStarted: self._decode_started,
            events.StepDone: self._step_done,
            events.RequestDone: self._request_done,
            events.AttemptFailed: self._attempt_failed,
            events.Cancelled: self._cancelled,
            events.ClientStopped: self._client_stopped,
            CacheChanged: self._cache_changed,
            events.TierChanged: self._tier_changed,
            events.WorkerUp: self._worker_up,
            events.WorkerDown: self._worker_down,
            events.WorkerConfirmed: self._worker_confirmed,
            RunEnded: self._run_ended,
        }

    def on(self, event: Event, now_s: float) -> Sequence[Command]:
        """What is to be done about an event that the coordinator learns of now; not re-entrant."""
        return self._handlers[type(event)](event, now_s)

    def view(self, request: Request, now_s: float) -> ClusterView:
        """What the Conductor may know about a request now; looking changes nothing in the cluster."""
        return self.workers.view(request, now_s, self._history)

    # a request arrives, and is placed

    def _request_arrived(self, event: events.RequestArrived, now_s: float) -> Sequence[Command]:
        request = event.request
        if request.id in self.requests:
            return _NONE
        state = RequestState(request)
        self._learn(Arrived(at_s=event.at_s, request_id=request.id, input_tokens=request.input_tokens))
        count, most = len(self.requests), self._max_inflight_requests
        self.requests[request.id] = state
        if most is not None and count >= most:
            return self._reject(state, "frontdoor", f"{count} requests are in flight; allowed are {most}", now_s)
        if self._schedule_s:
            return (SetTimer(request.id, self._schedule_s),)
        return self._decide(state, now_s)

    def _timer_fired(self, event: events.TimerFired, now_s: float) -> Sequence[Command]:
        state = self.requests.get(event.request_id)
        if state is None or state.phase is not Phase.DECIDING:
            return _NONE
        return self._decide(state, now_s)

    def _decide(self, state: RequestState, now_s: float) -> Sequence[Command]:
        """Ask the Conductor about a request now; after its first placement, admission is not asked again."""
        request = state.request
        view = self.view(request, now_s)
        if self._observe is not None:
            self._observe(request, view)
        decision: Decision
        if view.prefill and view.decode:
            decision = decide(
                request,
                view,
                placement=self._placement,
                admission=AdmitAll() if state.attempt.n else self._admission,
                estimate=self._estimate,
                slo=self._slo,
            )
        elif self._wait_for_workers:
            state.phase = Phase.WAITING
            self._unplaced[request.id] = state
            return _NONE
        else:
            up = f"{len(view.prefill)} prefill and {len(view.decode)} decode instances live"
            decision = Rejection(request_id=request.id, stage="capacity", reason=f"{up}; one of each is needed")
        self._unplaced.pop(request.id, None)
        if isinstance(decision, Rejection):
            return self._reject(state, decision.stage, state.why + decision.reason, now_s)
        self._write(
            Placed(
                at_s=now_s,
                request_id=request.id,
                prefill_instance=decision.prefill,
                decode_instance=decision.decode,
                reused_tokens=decision.reused_tokens,
                fetched_tokens=decision.fetched_tokens,
                reason=state.why + decision.reason,
            )
        )
        return self._place(state, decision, now_s)

    def _place(self, state: RequestState, placement: Placement, now_s: float) -> Sequence[Command]:
        """Begin the next attempt, and reserve on its workers."""
        request = state.request
        attempt = state.attempt = Attempt(request.id, state.attempt.n + 1)
        prefill, decode = self.workers[placement.prefill], self.workers[placement.decode]
        state.placement, state.prefill, state.decode = placement, prefill, decode
        state.phase, state.prefix_fetched = Phase.QUEUED, False
        self._in_transit[request.id] = state
        decode.expect(request, now_s + placement.expected_ttft_s)
        prefill.add_prompt(
            attempt, self._estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        )
        if placement.fetch_from is not None:
            self.workers.begin_fetch(attempt, request, placement)
        return (PrepareDecode(attempt, decode.name, request), RunPrefill(attempt, request, placement))

    # prefill

    def _prefix_fetched(self, event: events.PrefixFetched, now_s: float) -> Sequence[Command]:
        del now_s
        attempt, source = event.attempt, self.workers.get(event.source)
        if source is None or (source.sending.pop(attempt, None) or source.reading.pop(attempt, None)) is None:
            return _NONE
        if event.bytes:
            state = self._current(attempt)
            if state is not None:
                state.prefix_fetched = True
            self._moved(attempt.request_id, event.source, event.worker, event)
        return _NONE

    def _tier_read(self, event: events.TierRead, now_s: float) -> Sequence[Command]:
        del now_s
        worker = self.workers.get(event.worker)
        if worker is not None and worker.read_tier(event.attempt):
            self._moved(event.attempt.request_id, f"{event.worker}/ssd", f"{event.worker}/dram", event)
        return _NONE

    def _prefill_started(self, event: events.PrefillStarted, now_s: float) -> Sequence[Command]:
        del now_s
        worker = self.workers.get(event.worker)
        if worker is not None and worker.start_prompt(event.attempt, event.at_s):
            state = self._current(event.attempt)
            if state is not None and state.phase is Phase.QUEUED:
                state.phase = Phase.PREFILLING
        return _NONE

    def _prefill_slot_free(self, event: events.PrefillSlotFree, now_s: float) -> Sequence[Command]:
        del now_s
        worker = self.workers.get(event.worker)
        if worker is not None:
            worker.free_slot(event.at_s)
        return _NONE

    def _prefill_dropped(self, event: events.PrefillDropped, now_s: float) -> Sequence[Command]:
        del now_s
        worker = self.workers.get(event.worker)
        if worker is not None:
            worker.remove_prompt(event.attempt, event.at_s)
        return _NONE

    def _prefill_done(self, event: events.PrefillDone, now_s: float) -> Sequence[Command]:
        """A prompt is computed. It is recorded for an attempt that was given up, too: the work was done."""
        del now_s
        attempt, worker = event.attempt, self.workers.get(event.worker)
        if worker is None or not worker.remove_prompt(attempt, event.at_s):
            return _NONE
        self._write(
            Prefilled(
                at_s=event.at_s,
                request_id=attempt.request_id,
                instance=event.worker,
                start_s=event.start_s,
                computed_tokens=event.computed_tokens,
                reused_tokens=event.reused_tokens,
            )
        )
        state = self._current(attempt)
        if state is None or state.decode is None:
            return _NONE
        if state.phase is Phase.QUEUED or state.phase is Phase.PREFILLING:
            state.phase = Phase.MOVING
            worker.sending[attempt] = state.decode.name
        if self._first_shown_by == "prefill" and not state.shown_tokens:
            self._show_first(state, event.at_s)
        return _NONE

    # from prefill to decode

    def _kv_arrived(self, event: events.KVArrived, now_s: float) -> Sequence[Command]:
        """The KVCache is at the decode worker, which is asked again whether it serves the request (arXiv §3)."""
        state = self._current(event.attempt)
        if state is None or state.phase not in _BEFORE_ARRIVAL:
            return _NONE
        request, prefill, decode = state.request, state.prefill, state.decode
        assert prefill is not None and decode is not None  # noqa: S101, PT018  # it is placed
        prefill.sending.pop(event.attempt, None)
        self._moved(request.id, prefill.name, decode.name, event)
        if not state.resumes:
            refusal = self._admission.double_check(
                request, decode.decode_view(), estimate=self._estimate, slo=self._slo
            )
            if refusal is not None:
                commands = self._end_attempt(state)
                return (*commands, *self._reject(state, refusal.stage, refusal.reason, now_s))
        state.phase = Phase.LOADING
        shows_computed = state.resumes or not state.shown_tokens
        return (StartDecode(event.attempt, decode.name, state.shown_tokens, shows_computed),)

    def _kv_loaded(self, event: events.KVLoaded, now_s: float) -> Sequence[Command]:
        del now_s
        state = self._current(event.attempt)
        if state is not None and state.phase not in _AT_DECODE:
            self._join(state, event.at_s)
        return _NONE

    def _join(self, state: RequestState, at_s: float) -> None:
        """A request is where it decodes."""
        assert state.prefill is not None and state.decode is not None  # noqa: S101, PT018  # it is placed
        del self._in_transit[state.request.id]
        state.prefill.sending.pop(state.attempt, None)
        state.decode.join(state.request.id, at_s)
        state.phase = Phase.JOINING

    # decode

    def _decode_started(self, event: events.DecodeStarted, now_s: float) -> Sequence[Command]:
        """The token that prefill computed is shown: the first, or after a failure the next."""
        del now_s
        state = self._current(event.attempt)
        if state is None or state.phase is Phase.DECODING or state.decode is None:
            return _NONE
        if state.phase is not Phase.JOINING:
            self._join(state, event.at_s)
        state.phase = Phase.DECODING
        state.decode.started.add(state.request.id)
        if state.resumes:
            self._write(
                DecodeStretch(
                    at_s=event.at_s,
                    instance=state.decode.name,
                    start_s=event.at_s,
                    steps=1,
                    first_step_s=0.0,
                    step_growth_s=0.0,
                    request_ids=(state.request.id,),
                )
            )
            state.shown_tokens += 1
        elif not state.shown_tokens:
            self._show_first(state, event.at_s)
        return _NONE

    def _step_done(self, event: events.StepDone, now_s: float) -> Sequence[Command]:
        del now_s
        worker = self.workers.get(event.worker)
        if worker is None or event.start_s < worker.stepped_until_s:
            return _NONE
        request_ids = event.request_ids
        if not all(map(worker.started.__contains__, request_ids)):  # attempts that were given up
            request_ids = tuple(filter(worker.started.__contains__, request_ids))
        if request_ids:
            self._write(
                DecodeStretch(
                    at_s=event.at_s,
                    instance=event.worker,
                    start_s=event.start_s,
                    steps=event.steps,
                    first_step_s=event.first_step_s,
                    step_growth_s=event.step_growth_s,
                    request_ids=request_ids,
                )
            )
        worker.step(request_ids, event.steps, event.at_s)
        return _NONE

    def _request_done(self, event: events.RequestDone, now_s: float) -> Sequence[Command]:
        del now_s
        state = self._current(event.attempt)
        if state is None or state.phase is not Phase.DECODING:
            return _NONE
        tokens = self._shown(state)
        self._release(state)
        return self._finish(state, tokens, event.at_s)

    # an attempt fails, a client leaves

    def _attempt_failed(self, event: events.AttemptFailed, now_s: float) -> Sequence[Command]:
        state = self._current(event.attempt)
        if state is None:
            return _NONE
        if not event.retriable:
            commands = self._end_attempt(state)
            return (*commands, *self._reject(state, event.stage, event.reason, event.at_s))
        return self._place_again(state, event.reason, now_s, event.suspects)

    def _place_again(
        self, state: RequestState, reason: str, now_s: float, suspects: Sequence[str] = ()
    ) -> Sequence[Command]:
        """An attempt came to nothing: its prompt and the tokens that it has shown are prefilled anew."""
        shown, joined = self._shown(state), state.phase in _AT_DECODE
        commands = list(self._end_attempt(state))
        state.shown_tokens = shown
        if joined and shown > state.prompt_shown_tokens:
            longer = self._extend(state.request, shown - state.prompt_shown_tokens)
            if longer is None:
                commands += self._finish(state, shown, now_s)
                return commands
            state.request, state.prompt_shown_tokens = longer, shown
        if state.attempt.n == self._max_attempts:
            reason = f"{state.attempt.n} attempts came to nothing, the last because {reason}"
            commands += self._reject(state, "failed", reason, now_s)
            return commands
        state.why = f"placed again after {reason}: "
        state.suspects = {name for name in suspects if self.workers.is_up(name)}
        if state.suspects:
            state.phase = Phase.UNCONFIRMED
            self._unplaced[state.request.id] = state
            commands.append(ConfirmWorkers(tuple(sorted(state.suspects))))
        else:
            commands += self._decide(state, now_s)
        return commands

    def _cancelled(self, event: events.Cancelled, now_s: float) -> Sequence[Command]:
        del now_s
        state = self.requests.get(event.request_id)
        if state is None:
            return _NONE
        commands = self._end_attempt(state)
        return (*commands, *self._reject(state, "client", event.reason, event.at_s))

    def _client_stopped(self, event: events.ClientStopped, now_s: float) -> Sequence[Command]:
        del now_s
        state = self.requests.get(event.request_id)
        if state is None:
            return _NONE
        tokens = self._shown(state)
        commands = self._end_attempt(state)
        return (*commands, *self._finish(state, tokens, event.at_s))

    # workers

    def _cache_changed(self, event: CacheChanged, now_s: float) -> Sequence[Command]:
        del now_s
        if self.workers.cache_changed(event):
            self._write(event)
        return _NONE

    def _tier_changed(self, event: events.TierChanged, now_s: float) -> Sequence[Command]:
        del now_s
        self.workers.tier_changed(event)
        return _NONE

    def _worker_up(self, event: events.WorkerUp, now_s: float) -> Sequence[Command]:
        self.workers.add(event)
        commands = list[Command]()
        for state in self._in_order(Phase.WAITING):
            state.why = state.why or f"placed when {event.worker} was up: "
            commands += self._decide(state, now_s)
        return commands

    def _worker_down(self, event: events.WorkerDown, now_s: float) -> Sequence[Command]:
        """The requests that need the worker are placed again, in order of arrival."""
        name = event.worker
        if not self.workers.remove(name):
            return _NONE
        interrupted = [state for state in self._in_transit.values() if _needs(state, name)]
        if not event.finishes_step:
            interrupted += [
                state
                for state in self.requests.values()
                if state.phase in _AT_DECODE and state.decode is not None and state.decode.name == name
            ]
        commands = list[Command]()
        for state in sorted(interrupted, key=_arrival):
            commands += self._place_again(state, f"{name} died", now_s)
        return [*commands, *self._confirmed(name, now_s)]

    def _worker_confirmed(self, event: events.WorkerConfirmed, now_s: float) -> Sequence[Command]:
        return self._confirmed(event.worker, now_s)

    def _confirmed(self, worker: str, now_s: float) -> Sequence[Command]:
        """It is known of a worker whether it is up."""
        commands = list[Command]()
        for state in self._in_order(Phase.UNCONFIRMED):
            state.suspects.discard(worker)
            if not state.suspects:
                commands += self._decide(state, now_s)
        return commands

    def _run_ended(self, event: RunEnded, now_s: float) -> Sequence[Command]:
        """The run is cut: requests in flight stay open in the log."""
        del now_s
        tokens = {key: state.shown_tokens for key, state in self._in_transit.items() if state.shown_tokens}
        self._write(RunEnded(at_s=event.at_s, tokens=tokens | event.tokens))
        commands = list[Command]()
        for state in self.requests.values():
            commands += self._end_attempt(state)
        self.requests.clear()
        self._unplaced.clear()
        return commands

    # what several of them do

    def _current(self, attempt: Attempt) -> RequestState | None:
        """The request of an attempt, unless it has ended or is in another attempt."""
        state = self.requests.get(attempt.request_id)
        return state if state is not None and state.decode is not None and state.attempt.n == attempt.n else None

    def _in_order(self, phase: Phase) -> list[RequestState]:
        return sorted((state for state in self._unplaced.values() if state.phase is phase), key=_arrival)

    def _shown(self, state: RequestState) -> int:
        """Tokens that the client of a request has now."""
        if state.phase is not Phase.DECODING or state.decode is None:
            return state.shown_tokens
        return state.shown_tokens + state.decode.contexts[state.request.id] - state.request.input_tokens

    def _show_first(self, state: RequestState, at_s: float) -> None:
        state.shown_tokens = 1
        self._learn(FirstToken(at_s=at_s, request_id=state.request.id))

    def _release(self, state: RequestState) -> None:
        """The attempt of a request is over: its workers have nothing reserved for it any more."""
        if state.prefill is None or state.decode is None:
            return
        self._in_transit.pop(state.request.id, None)
        state.prefill.sending.pop(state.attempt, None)
        state.decode.release(state.request.id)
        state.placement = state.prefill = state.decode = None

    def _end_attempt(self, state: RequestState) -> Sequence[Command]:
        """Release what an attempt has reserved, and tell those of its workers that are up."""
        workers: list[WorkerState] = []
        if state.prefill is not None and state.decode is not None:
            workers = [state.prefill] if state.prefill is state.decode else [state.prefill, state.decode]
        self._release(state)
        return [CancelAttempt(state.attempt, worker.name) for worker in workers if worker.up]

    def _reject(self, state: RequestState, stage: str, reason: str, at_s: float) -> Sequence[Command]:
        request_id = state.request.id
        self._forget(request_id)
        self._learn(Rejected(at_s=at_s, request_id=request_id, stage=stage, reason=reason))
        return (Reject(request_id, stage, reason),)

    def _finish(self, state: RequestState, output_tokens: int, at_s: float) -> Sequence[Command]:
        request_id = state.request.id
        self._forget(request_id)
        self._learn(Finished(at_s=at_s, request_id=request_id, output_tokens=output_tokens))
        return (Finish(request_id),)

    def _forget(self, request_id: int) -> None:
        del self.requests[request_id]
        self._unplaced.pop(request_id, None)

    def _learn(self, record: Record) -> None:
        """Write a record that history is made of."""
        self._write(record)
        self._history.note(record)

    def _moved(
        self,
        request_id: int,
        source: str,
        destination: str,
        event: events.PrefixFetched | events.TierRead | events.KVArrived,
    ) -> None:
        self._write(
            Moved(
                at_s=event.at_s,
                request_id=request_id,
                source=source,
                destination=destination,
                start_s=event.start_s,
                bytes=event.bytes,
            )
        )


def _needs(state: RequestState, worker: str) -> bool:
    """Whether a request that is on the way to its decode worker still needs this one."""
    placement = state.placement
    return placement is not None and (
        worker == placement.prefill
        or worker == placement.decode
        or (worker == placement.fetch_from and not state.prefix_fetched)
    )


def _arrival(state: RequestState) -> tuple[float, int]:
    return state.request.arrival_s, state.request.id
