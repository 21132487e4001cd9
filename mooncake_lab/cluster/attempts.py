"""Requests in flight: the phase of each, and its attempts, one after the other until one comes to an end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final, Literal, TypeAlias, final

from mooncake_lab.cluster import events
from mooncake_lab.cluster.events import Attempt, Command
from mooncake_lab.cluster.spec import ClusterSpec
from mooncake_lab.cluster.workers import WorkerState, WorkerTable
from mooncake_lab.conductor import (
    AdmitAll,
    ClusterView,
    Decided,
    Decision,
    Estimator,
    History,
    Placement,
    Rejection,
    decide,
    needs_of,
)
from mooncake_lab.core import Arrived, Finished, FirstToken, Placed, Record, Rejected, Request

Phase: TypeAlias = Literal[
    "deciding",
    "waiting",
    "unconfirmed",
    "queued",
    "prefilling",
    "moving",
    "loading",
    "joining",
    "decoding",
]
"""Where a request in flight is.

- deciding: it arrived, and the Conductor has not decided yet;
- waiting: no worker can serve it; it is placed when one comes up;
- unconfirmed: an attempt failed; it is placed again when it is known which workers are up;
- queued: it is placed, and its prompt waits at the prefill worker;
- prefilling: its prompt is being computed;
- moving: its KVCache is on the way to the decode worker;
- loading: its KVCache is in the host memory of the decode worker;
- joining: its KVCache is in GPU memory, and it waits for a place in the batch;
- decoding: it is in the batch.
"""

AT_PREFILL: Final[frozenset[Phase]] = frozenset({"queued", "prefilling"})
"""The prompt is not computed yet."""
AT_DECODE: Final[frozenset[Phase]] = frozenset({"joining", "decoding"})
"""The KVCache is in the GPU memory of the decode worker, and no other worker is needed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorRules:
    """The rules of a runtime by which requests go through its cluster."""

    schedule_s: float = 0.0
    """From a request's arrival to its decision."""
    view_age_s: float = 0.0
    """How old the loads may be on which the Conductor decides; 0 is always the present."""
    wait_for_workers: bool = False
    """Whether a request that finds no worker waits for one; else it is rejected."""
    longest_wait_s: float | None = None
    """How long it waits before it is rejected after all; None is no limit."""
    max_inflight_requests: int | None = None
    """One more is rejected; None is no limit."""
    max_attempts: int | None = None
    """How often a request is placed; None is no limit."""
    reject_policy_errors: bool = False
    """Whether a policy that raises, or whose placement no worker could carry out, costs its request alone."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in flight. Mutable: the coordinator follows it."""

    request: Request
    """Its prompt is extended by the tokens that a failed attempt has shown."""
    attempt: Attempt
    """The current one, or the last; number 0 before the first."""
    phase: Phase = "deciding"
    waits_since_s: float = 0.0
    """When it began to wait for a worker, in the phase "waiting"."""
    placement: Placement | None = None
    """The placement of the current attempt; None while it has none."""
    prefill: WorkerState = field(init=False)
    decode: WorkerState = field(init=False)
    """The workers of that placement; a coupled worker is both."""
    holder_has_read: bool = False
    """Whether the worker that its prefix comes from has read from its SSD for the current attempt."""
    shown_tokens: int = 0
    """Tokens that its client had when the current attempt began to decode, with the one that prefill computed."""
    prompt_shown_tokens: int = 0
    """Those of them that a failure made part of the prompt."""
    why: str = ""
    """What stands before the reason of its next placement in the log."""
    suspects: frozenset[str] = frozenset()
    """Workers that have to be confirmed before it is placed again."""

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """The workers of the current attempt, each once."""
        if self.placement is None:
            return ()
        return (self.prefill,) if self.prefill is self.decode else (self.prefill, self.decode)

    @property
    def resumes(self) -> bool:
        """Whether it decoded in an earlier attempt, so that its prefill computes the token after those shown."""
        return self.prompt_shown_tokens > 0

    def needs(self, worker: str) -> bool:
        """Whether the current attempt needs this worker to prefill or to decode.

        A prefix that was to come from a worker that is down is computed instead, where the prompt is.
        """
        if self.placement is None:
            return False
        return worker == self.decode.name or (self.phase not in AT_DECODE and worker == self.prefill.name)

    def shown_now(self) -> int:
        """Tokens that its client has now."""
        if self.phase != "decoding":
            return self.shown_tokens
        return self.shown_tokens + self.decode.tokens_of(self.request.id) - self.request.input_tokens


@final
class Attempts:
    """The requests in flight, and where each is placed. Mutable: it is the state of a cluster.

    Args:
        spec: the policies.
        rules: of the runtime.
        estimate: what the Conductor believes about time.
        workers: what it believes about workers.
        write: gets each record of the run log.
        extend: see `Coordinator`.
        observe: see `Coordinator`.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        rules: CoordinatorRules,
        estimate: Estimator,
        workers: WorkerTable,
        write: Callable[[Record], None],
        extend: Callable[[Request, int], Request | None],
        observe: Callable[[Decided], None] | None,
    ) -> None:
        self.requests: dict[int, RequestState] = {}
        """Those in flight."""
        needs = needs_of(spec.placement) | needs_of(spec.admission)
        self.history = History(learns_lengths="lengths" in needs)
        self.commands: list[Command] = []
        """What the runtime is to do about the event under way."""
        self._spec = spec
        self._rules = rules
        self._estimate = estimate
        self._workers = workers
        self._write = write
        self._extend = extend
        self._observe = observe

    def current(self, attempt: Attempt) -> RequestState | None:
        """The request of an attempt, unless it has ended or is in another attempt."""
        state = self.requests.get(attempt.request_id)
        return (
            state if state is not None and state.placement is not None and state.attempt.n == attempt.n else None
        )

    def by_arrival(self) -> list[RequestState]:
        """The requests in flight, in the order in which they are placed again."""
        return sorted(self.requests.values(), key=lambda state: (state.request.arrival_s, state.request.id))

    def record(self, record: Arrived | FirstToken | Finished | Rejected) -> None:
        """Write a record of which views show something later."""
        self._write(record)
        self.history.note(record)

    def decide(self, state: RequestState, now_s: float) -> None:
        """Ask the Conductor about a request now; after its first placement, admission is not asked again."""
        request = state.request
        view = self._workers.view(request, now_s, self.history)
        decision: Decision
        if view.prefill and view.decode:
            decision = self._decision(request, view, is_first=not state.attempt.n)
        elif self._rules.wait_for_workers:
            self._wait(state, now_s)
            return
        else:
            up = f"{len(view.prefill)} prefill and {len(view.decode)} decode instances live"
            decision = Rejection(request_id=request.id, stage="capacity", reason=f"{up}; one of each is needed")
        if isinstance(decision, Rejection):
            self.reject(state, decision.stage, state.why + decision.reason, now_s)
        else:
            self._place(state, decision, now_s)

    def _wait(self, state: RequestState, now_s: float) -> None:
        """Let a request wait for a worker; a change that still leaves it none does not begin the wait anew."""
        if state.phase == "waiting":
            return
        state.phase, state.waits_since_s = "waiting", now_s
        if self._rules.longest_wait_s is not None:
            self.commands.append(events.SetTimer(state.request.id, self._rules.longest_wait_s))

    def stop_waiting(self, state: RequestState, now_s: float) -> None:
        """Reject a request that has waited for a worker as long as it may; the timer may be of an earlier wait."""
        longest_s = self._rules.longest_wait_s
        if longest_s is None:
            return
        left_s = state.waits_since_s + longest_s - now_s
        if left_s > 0:
            self.commands.append(events.SetTimer(state.request.id, left_s))
            return
        view = self._workers.view(state.request, now_s, self.history)
        up = f"{len(view.prefill)} prefill and {len(view.decode)} decode workers are up"
        self.reject(state, "capacity", f"{up}; one of each did not come up within {longest_s:g} s", now_s)

    def _decision(self, request: Request, view: ClusterView, *, is_first: bool) -> Decision:
        spec = self._spec
        try:
            decision = decide(
                request,
                view,
                placement=spec.placement,
                admission=spec.admission if is_first else AdmitAll(),
                estimate=self._estimate,
                slo=spec.slo,
            )
        except Exception as error:  # noqa: BLE001  # a policy may raise anything
            return self._policy_failed(request, error)
        if self._observe is not None:
            self._observe(Decided(request, view, decision, is_first))
        if self._rules.reject_policy_errors and isinstance(decision, Placement):
            mistake = self._mistake(request, decision, view)
            if mistake:
                return Rejection(request_id=request.id, stage="failed", reason=f"the placement policy {mistake}")
        return decision

    def _mistake(self, request: Request, placement: Any, view: ClusterView) -> str:
        """Why no worker can carry out the placement of a user's policy; empty where one can."""
        prefill, decode = ([one.name for one in pool] for pool in (view.prefill, view.decode))
        coupled = placement.prefill in decode  # it decodes what it prefills, and fetches nothing
        for field_name, allowed in (
            ("prefill", prefill),
            ("decode", [placement.decode] if coupled else decode),
            ("fetch_from", [None] if coupled else [None, *prefill]),
        ):
            name = getattr(placement, field_name)
            if name not in allowed:
                return f"sets {field_name} to {name!r}; allowed are {', '.join(map(str, allowed))}"
        fetched, reused, on_ssd = placement.fetched_tokens, placement.reused_tokens, placement.ssd_tokens
        if any(type(one) is not int for one in (fetched, reused, on_ssd)) or not (
            0 <= fetched <= reused <= request.input_tokens and 0 <= on_ssd <= reused
        ):
            return (
                f"sets reused_tokens to {reused!r}, fetched_tokens to {fetched!r} and ssd_tokens to {on_ssd!r};"
                f" allowed are Python ints, the first from 0 to {request.input_tokens}, the others up to the first"
            )
        if on_ssd and not any(one.matched_on_ssd for one in view.prefill):
            return f"sets ssd_tokens to {on_ssd!r}; no worker has blocks of this prompt on an SSD"
        expected_s, reason = placement.expected_ttft_s, placement.reason
        if not isinstance(expected_s, Real) or not isinstance(reason, str):
            return (
                f"sets expected_ttft_s to {expected_s!r} and reason to {reason!r}; allowed are a number and a str"
            )
        return ""

    def double_check(self, state: RequestState) -> Rejection | None:
        """Ask admission again when the KVCache of a request is at its decode worker (arXiv §3, step 4)."""
        spec = self._spec
        try:
            return spec.admission.double_check(
                state.request, state.decode.decode_view(), estimate=self._estimate, slo=spec.slo
            )
        except Exception as error:  # noqa: BLE001  # a policy may raise anything
            return self._policy_failed(state.request, error)

    def _policy_failed(self, request: Request, error: Exception) -> Rejection:
        if not self._rules.reject_policy_errors:
            raise error
        reason = f"the placement or admission policy failed: {error!r}"
        return Rejection(request_id=request.id, stage="failed", reason=reason)

    def _place(self, state: RequestState, placement: Placement, now_s: float) -> None:
        """Begin the next attempt, and reserve on its workers."""
        request, prefill = state.request, self._workers[placement.prefill]
        decode = prefill if prefill.role == "coupled" else self._workers[placement.decode]
        self._write(
            Placed(
                at_s=now_s,
                request_id=request.id,
                prefill_instance=prefill.name,
                decode_instance=decode.name,
                reused_tokens=placement.reused_tokens,
                fetched_tokens=placement.fetched_tokens,
                reason=state.why + placement.reason,
            )
        )
        attempt = state.attempt = Attempt(request.id, state.attempt.n + 1)
        state.prefill, state.decode = prefill, decode
        state.placement, state.phase, state.holder_has_read = placement, "queued", False
        decode.expect(request, now_s + placement.expected_ttft_s)
        estimated_s = self._estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        if placement.ssd_tokens:
            estimated_s = self._estimate.beside_ssd_s(estimated_s, placement.ssd_tokens)
        if placement.fetch_from is not None and self._estimate.fetches_by_layer:
            moving_s = self._estimate.transfer_s(placement.fetched_tokens, 0)  # other transfers end meanwhile
            estimated_s = self._estimate.beside_load_s(estimated_s, moving_s)
        prefill.add_prompt(attempt, estimated_s)
        if placement.fetch_from is not None:
            self._workers.begin_fetch(attempt, request, placement)
        if prefill is not decode:
            self.commands.append(events.PrepareDecode(attempt, decode.name, request))
        self.commands.append(events.RunPrefill(attempt, request, placement))

    def fetch_started(self, event: events.FetchStarted) -> None:
        """A prefill worker fetches blocks of a shared store from the worker on which they lie."""
        worker, source = self._workers.get(event.worker), self._workers.get(event.source)
        if worker is None or source is None or not source.up:
            return
        if worker.fetch_from(event.attempt, source.name):
            (source.reading if event.from_ssd else source.sending)[event.attempt] = event.worker

    def place_again(self, state: RequestState, reason: str, now_s: float, suspects: Sequence[str] = ()) -> None:
        """An attempt came to nothing: the prompt and the tokens shown are prefilled anew, elsewhere or later."""
        shown, joined = state.shown_now(), state.phase in AT_DECODE
        self.cancel(state)
        state.shown_tokens = shown
        if joined and shown > state.prompt_shown_tokens:
            longer = self._extend(state.request, shown - state.prompt_shown_tokens)
            if longer is None:
                self.finish(state, shown, now_s)
                return
            state.request, state.prompt_shown_tokens = longer, shown
        if state.attempt.n == self._rules.max_attempts:
            reason = f"{state.attempt.n} attempts came to nothing, the last because {reason}"
            self.reject(state, "failed", reason, now_s)
            return
        state.why = f"placed again after {reason}: "
        state.suspects = frozenset(filter(self._workers.is_up, suspects))
        if state.suspects:
            state.phase = "unconfirmed"
            self.commands.append(events.ConfirmWorkers(tuple(sorted(state.suspects))))
        else:
            self.decide(state, now_s)

    def join(self, state: RequestState, at_s: float) -> None:
        """A request's KVCache is where it decodes."""
        state.prefill.end_sending(state.attempt)
        state.decode.join(state.request.id, at_s)
        state.phase = "joining"

    def cancel(self, state: RequestState) -> None:
        """Release what an attempt has reserved, and tell those of its workers that are up."""
        workers = state.workers
        self.release(state)
        self.commands += [events.CancelAttempt(state.attempt, worker.name) for worker in workers if worker.up]

    def release(self, state: RequestState) -> None:
        """An attempt is over: its workers have nothing reserved for it any more.

        A prompt stays in the backlog of its prefill worker until that worker says that it dropped or computed it.
        """
        if state.placement is not None:
            state.prefill.end_sending(state.attempt)
            state.decode.release(state.request.id)
            state.placement = None

    def reject(self, state: RequestState, stage: str, reason: str, at_s: float) -> None:
        """End a request that is not served, or no longer."""
        request_id = state.request.id
        del self.requests[request_id]
        self.record(Rejected(at_s=at_s, request_id=request_id, stage=stage, reason=reason))
        self.commands.append(events.Reject(request_id, stage, reason))

    def finish(self, state: RequestState, output_tokens: int, at_s: float) -> None:
        """End a request that has all its tokens."""
        request_id = state.request.id
        del self.requests[request_id]
        self.record(Finished(at_s=at_s, request_id=request_id, output_tokens=output_tokens))
        self.commands.append(events.Finish(request_id))
