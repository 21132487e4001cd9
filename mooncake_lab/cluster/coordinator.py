"""The coordinator: follows each request from its arrival to its last token, in the real and the simulated cluster.

A runtime reports events and carries out the commands that come back. The coordinator does no I/O and reads no
clock: the same events give the same commands and the same run log. Where a request is, is its `Phase`; what a
worker has to do, as far as its events tell, is its `WorkerState`.

An event about an attempt that is over only updates what is known of its worker, and what was computed or moved for
it is recorded. An event that was reported before, or that is about an unknown worker, changes nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, final

from mooncake_lab.cluster import events
from mooncake_lab.cluster.attempts import AT_DECODE, NO_COMMANDS, Attempts, arrival
from mooncake_lab.cluster.commands import Command, SetTimer, StartDecode
from mooncake_lab.cluster.events import Attempt, Event
from mooncake_lab.cluster.request_state import Phase, RequestState
from mooncake_lab.cluster.run_logger import RunLogger
from mooncake_lab.cluster.spec import CoordinatorSpec
from mooncake_lab.cluster.worker_table import WorkerTable
from mooncake_lab.conductor import ClusterView, Decided, Estimator
from mooncake_lab.core import CacheChanged, Record, Request, RunEnded

_AT_PREFILL: Final[frozenset[Phase]] = frozenset({"queued", "prefilling"})
_BEFORE_ARRIVAL: Final[frozenset[Phase]] = frozenset({"queued", "prefilling", "moving"})
"""Placed, and the KVCache is not at the decode worker yet."""


@final
class Coordinator:
    """Turns events into commands, and writes the run log.

    Args:
        spec: policies and rules.
        estimate: what the Conductor believes about time.
        write: gets each record of the run log.
        extend: the request of a failed attempt, with as many tokens of its answer at the end of its prompt; None
            where no token is left to generate.
        observe: told each decision, and the view that it is made on.
    """

    def __init__(
        self,
        spec: CoordinatorSpec,
        estimate: Estimator,
        *,
        write: Callable[[Record], None],
        extend: Callable[[Request, int], Request | None],
        observe: Callable[[Decided], None] | None = None,
    ) -> None:
        self.workers = WorkerTable(spec.view_age_s)
        self._spec = spec
        self._log = RunLogger(write)
        self._attempts = Attempts(spec, estimate, self.workers, self._log, extend, observe)
        self._handlers: dict[type, Callable[[Any, float], Sequence[Command]]] = {
            events.RequestArrived: self._request_arrived,
            events.TimerFired: self._timer_fired,
            events.PrefixFetched: self._prefix_fetched,
            events.TierRead: self._tier_read,
            events.PrefillStarted: self._prefill_started,
            events.PrefillSlotFree: self._prefill_slot_free,
            events.PrefillDropped: self._prefill_dropped,
            events.PrefillDone: self._prefill_done,
            events.ChunkDone: self._chunk_done,
            events.Preempted: self._preempted,
            events.KVSent: self._kv_sent,
            events.KVPartArrived: self._kv_part_arrived,
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
        return self.workers.view(request, now_s, self._log.history)

    @property
    def requests(self) -> dict[int, RequestState]:
        """The requests in flight, by id."""
        return self._attempts.requests

    def is_current(self, attempt: Attempt) -> bool:
        """Whether a request is in this attempt now."""
        return self._attempts.current(attempt) is not None

    def shown_tokens(self, request_id: int) -> int:
        """Tokens that the client of a request in flight has now."""
        return self._attempts.shown_tokens(self._attempts.requests[request_id])

    # a request arrives

    def _request_arrived(self, event: events.RequestArrived, now_s: float) -> Sequence[Command]:
        request, requests = event.request, self._attempts.requests
        if request.id in requests:
            return NO_COMMANDS
        self._log.arrived(event)
        count, most = len(requests), self._spec.max_inflight_requests
        state = requests[request.id] = RequestState(request)
        if most is not None and count >= most:
            reason = f"{count} requests are in flight; allowed are {most}"
            return self._attempts.reject(state, "frontdoor", reason, now_s)
        if event.refusal:
            return self._attempts.reject(state, "frontdoor", event.refusal, now_s)
        if self._spec.schedule_s:
            return (SetTimer(request.id, self._spec.schedule_s),)
        return self._attempts.decide(state, now_s)

    def _timer_fired(self, event: events.TimerFired, now_s: float) -> Sequence[Command]:
        state = self._attempts.requests.get(event.request_id)
        if state is None or state.phase != "deciding":
            return NO_COMMANDS
        return self._attempts.decide(state, now_s)

    # prefill

    def _prefix_fetched(self, event: events.PrefixFetched, _now_s: float) -> Sequence[Command]:
        attempt, source = event.attempt, self.workers.get(event.source)
        if source is None or not source.end_sending(attempt):
            return NO_COMMANDS
        if event.bytes:
            state = self._attempts.current(attempt)
            if state is not None:
                state.prefix_fetched = True
            self._log.moved(event, event.source, event.worker)
        return NO_COMMANDS

    def _tier_read(self, event: events.TierRead, _now_s: float) -> Sequence[Command]:
        worker = self.workers.get(event.worker)
        if worker is not None and worker.read_tier(event.attempt):
            self._log.moved(event, f"{event.worker}/ssd", f"{event.worker}/dram")
        return NO_COMMANDS

    def _prefill_started(self, event: events.PrefillStarted, _now_s: float) -> Sequence[Command]:
        worker = self.workers.get(event.worker)
        if worker is not None and worker.start_prompt(event.attempt, event.at_s):
            state = self._attempts.current(event.attempt)
            if state is not None and state.phase == "queued":
                state.phase = "prefilling"
        return NO_COMMANDS

    def _prefill_slot_free(self, event: events.PrefillSlotFree, _now_s: float) -> Sequence[Command]:
        worker = self.workers.get(event.worker)
        if worker is not None:
            worker.free_slot(event.at_s)
        return NO_COMMANDS

    def _prefill_dropped(self, event: events.PrefillDropped, _now_s: float) -> Sequence[Command]:
        worker = self.workers.get(event.worker)
        if worker is not None:
            worker.remove_prompt(event.attempt, event.at_s)
        return NO_COMMANDS

    def _prefill_done(self, event: events.PrefillDone, _now_s: float) -> Sequence[Command]:
        """A prompt is computed."""
        attempt, worker = event.attempt, self.workers.get(event.worker)
        if worker is None or not worker.remove_prompt(attempt, event.at_s):
            return NO_COMMANDS
        self._log.prefilled(event)
        state = self._attempts.current(attempt)
        if state is None or state.decode is None:
            return NO_COMMANDS
        if state.phase in _AT_PREFILL:
            state.phase = "moving"
            worker.sending[attempt] = state.decode.name
        if self._spec.first_shown_by == "prefill" and not state.shown_tokens:
            self._show_first(state, event.at_s)
        return NO_COMMANDS

    # a coupled worker

    def _chunk_done(self, event: events.ChunkDone, _now_s: float) -> Sequence[Command]:
        worker = self.workers.get(event.worker)
        if worker is None or event.start_s < worker.up_s or not worker.is_news(event):
            return NO_COMMANDS
        self._log.prefilled(event)
        state = self._attempts.current(event.attempt)
        if state is not None:
            if state.phase == "queued":
                state.phase = "prefilling"
            worker.hold(state.request.id, max(event.context_tokens, state.request.input_tokens))
        return NO_COMMANDS

    def _preempted(self, event: events.Preempted, _now_s: float) -> Sequence[Command]:
        worker = self.workers.get(event.worker)
        if worker is None or not worker.is_news(event):
            return NO_COMMANDS
        state = self._attempts.current(event.attempt)
        if state is not None:
            if state.phase == "prefilling":
                state.phase = "queued"
            worker.hold(state.request.id, max(event.context_tokens, state.request.input_tokens))
        return NO_COMMANDS

    # from prefill to decode

    def _kv_sent(self, event: events.KVSent, _now_s: float) -> Sequence[Command]:
        worker = self.workers.get(event.worker)
        if worker is not None:
            worker.sent(event.attempt)
        return NO_COMMANDS

    def _kv_part_arrived(self, event: events.KVPartArrived, _now_s: float) -> Sequence[Command]:
        state = self._attempts.current(event.attempt)
        if state is not None and state.phase in _BEFORE_ARRIVAL:
            assert state.prefill is not None and state.decode is not None  # noqa: S101, PT018  # it is placed
            self._log.moved(event, state.prefill.name, state.decode.name)
        return NO_COMMANDS

    def _kv_arrived(self, event: events.KVArrived, now_s: float) -> Sequence[Command]:
        """The KVCache is at the decode worker; admission is asked again now (arXiv §3, step 4)."""
        state = self._attempts.current(event.attempt)
        if state is None or state.phase not in _BEFORE_ARRIVAL:
            return NO_COMMANDS
        prefill, decode = state.prefill, state.decode
        assert prefill is not None and decode is not None  # noqa: S101, PT018  # it is placed
        prefill.end_sending(event.attempt)
        self._log.moved(event, prefill.name, decode.name)
        refusal = None if state.resumes else self._attempts.double_check(state, decode)
        if refusal is not None:
            commands = self._attempts.end_attempt(state)
            return (*commands, *self._attempts.reject(state, refusal.stage, refusal.reason, now_s))
        state.phase = "loading"
        shows_computed = state.resumes or not state.shown_tokens
        return (StartDecode(event.attempt, decode.name, state.shown_tokens, shows_computed),)

    def _kv_loaded(self, event: events.KVLoaded, _now_s: float) -> Sequence[Command]:
        state = self._attempts.current(event.attempt)
        if state is not None and state.phase not in AT_DECODE:
            self._attempts.join(state, event.at_s)
        return NO_COMMANDS

    # decode

    def _decode_started(self, event: events.DecodeStarted, _now_s: float) -> Sequence[Command]:
        """The token that prefill computed is shown: the first, or after a failure the next."""
        state = self._attempts.current(event.attempt)
        if state is None or state.phase == "decoding" or state.decode is None:
            return NO_COMMANDS
        if state.phase != "joining":
            self._attempts.join(state, event.at_s)
        state.phase = "decoding"
        state.decode.started.add(state.request.id)
        coupled = state.decode is state.prefill
        if coupled:
            state.decode.remove_prompt(event.attempt, event.at_s)
        if not state.shown_tokens:
            self._show_first(state, event.at_s)
        elif state.resumes and not coupled:
            state.shown_tokens += 1
            self._log.next_token(state.request.id, state.decode.name, event.at_s)
        return NO_COMMANDS

    def _show_first(self, state: RequestState, at_s: float) -> None:
        state.shown_tokens = 1
        self._log.first_token(state.request.id, at_s)

    def _step_done(self, event: events.StepDone, _now_s: float) -> Sequence[Command]:
        worker = self.workers.get(event.worker)
        if worker is None or event.start_s < worker.stepped_until_s:
            return NO_COMMANDS
        request_ids, here = event.request_ids, worker.started
        if not here.issuperset(request_ids):  # some attempts are over
            request_ids = tuple(filter(here.__contains__, request_ids))
        if request_ids:
            self._log.stepped(event, request_ids)
        worker.step(request_ids, event.steps, event.at_s)
        return NO_COMMANDS

    def _request_done(self, event: events.RequestDone, _now_s: float) -> Sequence[Command]:
        state = self._attempts.current(event.attempt)
        if state is None or state.phase != "decoding":
            return NO_COMMANDS
        tokens = self._attempts.shown_tokens(state)
        self._attempts.release(state)
        return self._attempts.finish(state, tokens, event.at_s)

    # an attempt fails, a client leaves

    def _attempt_failed(self, event: events.AttemptFailed, now_s: float) -> Sequence[Command]:
        state = self._attempts.current(event.attempt)
        if state is None:
            return NO_COMMANDS
        if event.retriable:
            return self._attempts.place_again(state, event.reason, now_s, event.suspects)
        commands = self._attempts.end_attempt(state)
        return (*commands, *self._attempts.reject(state, event.stage, event.reason, event.at_s))

    def _cancelled(self, event: events.Cancelled, _now_s: float) -> Sequence[Command]:
        state = self._attempts.requests.get(event.request_id)
        if state is None:
            return NO_COMMANDS
        commands = self._attempts.end_attempt(state)
        return (*commands, *self._attempts.reject(state, "client", event.reason, event.at_s))

    def _client_stopped(self, event: events.ClientStopped, _now_s: float) -> Sequence[Command]:
        state = self._attempts.requests.get(event.request_id)
        if state is None:
            return NO_COMMANDS
        tokens = self._attempts.shown_tokens(state)
        commands = self._attempts.end_attempt(state)
        return (*commands, *self._attempts.finish(state, tokens, event.at_s))

    # workers

    def _cache_changed(self, event: CacheChanged, _now_s: float) -> Sequence[Command]:
        if self.workers.cache_changed(event):
            self._log.cache_changed(event)
        return NO_COMMANDS

    def _tier_changed(self, event: events.TierChanged, _now_s: float) -> Sequence[Command]:
        self.workers.tier_changed(event)
        return NO_COMMANDS

    def _worker_up(self, event: events.WorkerUp, now_s: float) -> Sequence[Command]:
        self.workers.add(event)
        commands = list[Command]()
        for state in self._attempts.unplaced("waiting"):
            state.why = state.why or f"placed when {event.worker} was up: "
            commands += self._attempts.decide(state, now_s)
        return commands

    def _worker_down(self, event: events.WorkerDown, now_s: float) -> Sequence[Command]:
        """The requests that need the worker are placed again, in order of arrival."""
        name, worker = event.worker, self.workers.get(event.worker)
        if worker is None or not self.workers.remove(name):
            return NO_COMMANDS
        interrupted = list[RequestState]()
        if not (event.finishes_step and worker.role == "coupled"):
            interrupted += [state for state in self._attempts.in_transit.values() if state.needs(name)]
        if not event.finishes_step:
            interrupted += [
                state
                for state in self._attempts.requests.values()
                if state.phase in AT_DECODE and state.decode is not None and state.decode.name == name
            ]
        commands = list[Command]()
        for state in sorted(interrupted, key=arrival):
            commands += self._attempts.place_again(state, f"{name} died", now_s)
        return [*commands, *self._confirmed(name, now_s)]

    def _worker_confirmed(self, event: events.WorkerConfirmed, now_s: float) -> Sequence[Command]:
        return self._confirmed(event.worker, now_s)

    def _confirmed(self, worker: str, now_s: float) -> Sequence[Command]:
        """It is known of a worker whether it is up."""
        commands = list[Command]()
        for state in self._attempts.unplaced("unconfirmed"):
            state.suspects -= {worker}
            if not state.suspects:
                commands += self._attempts.decide(state, now_s)
        return commands

    def _run_ended(self, event: RunEnded, _now_s: float) -> Sequence[Command]:
        """The log is cut: requests in flight stay open in it, and go on if the runtime does."""
        in_transit = self._attempts.in_transit.items()
        shown = {request_id: state.shown_tokens for request_id, state in in_transit if state.shown_tokens}
        for request_id in shown.keys() & event.tokens.keys():  # of a request in the queue of a coupled worker
            del shown[request_id]
        self._log.run_ended(event.at_s, shown | event.tokens)
        return NO_COMMANDS
