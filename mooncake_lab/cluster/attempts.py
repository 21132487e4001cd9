"""Placing requests: ask the Conductor, begin an attempt, end it, and ask again when it came to nothing."""

from collections.abc import Callable, Sequence
from typing import Final, final

from mooncake_lab.cluster.commands import (
    CancelAttempt,
    Command,
    ConfirmWorkers,
    Finish,
    PrepareDecode,
    Reject,
    RunPrefill,
)
from mooncake_lab.cluster.events import Attempt
from mooncake_lab.cluster.request_state import Phase, RequestState
from mooncake_lab.cluster.run_logger import RunLogger
from mooncake_lab.cluster.spec import CoordinatorSpec
from mooncake_lab.cluster.worker_state import WorkerState
from mooncake_lab.cluster.worker_table import WorkerTable
from mooncake_lab.conductor import (
    AdmitAll,
    ClusterView,
    Decided,
    Decision,
    Estimator,
    Placement,
    Rejection,
    decide,
)
from mooncake_lab.core import Request

NO_COMMANDS: Final[tuple[Command, ...]] = ()
AT_DECODE: Final[frozenset[Phase]] = frozenset({"joining", "decoding"})
"""The KVCache is in the GPU memory of the decode worker, and no other worker is needed any more."""


@final
class Attempts:
    """The requests in flight, and where each is placed. Mutable: it is the state of a cluster.

    Args:
        spec: policies and rules.
        estimate: what the Conductor believes about time.
        workers: what it believes about workers.
        log: the run log.
        extend: see `Coordinator`.
        observe: see `Coordinator`.
    """

    def __init__(
        self,
        spec: CoordinatorSpec,
        estimate: Estimator,
        workers: WorkerTable,
        log: RunLogger,
        extend: Callable[[Request, int], Request | None],
        observe: Callable[[Decided], None] | None,
    ) -> None:
        self.requests: dict[int, RequestState] = {}
        """Those in flight."""
        self.in_transit: dict[int, RequestState] = {}
        """Those of them that are placed, and whose KVCache is not in the GPU memory of the decode worker yet."""
        self._unplaced: dict[
            int, RequestState
        ] = {}  # those that wait for a worker to come up, or for a check of one
        self._spec = spec
        self._estimate = estimate
        self._workers = workers
        self._log = log
        self._extend = extend
        self._observe = observe

    def current(self, attempt: Attempt) -> RequestState | None:
        """The request of an attempt, unless it has ended or is in another attempt."""
        state = self.requests.get(attempt.request_id)
        return state if state is not None and state.decode is not None and state.attempt.n == attempt.n else None

    def unplaced(self, phase: Phase) -> list[RequestState]:
        """Requests that wait for a worker to come up, or for a check of one, in order of arrival."""
        return sorted((state for state in self._unplaced.values() if state.phase == phase), key=arrival)

    def decide(self, state: RequestState, now_s: float) -> Sequence[Command]:
        """Ask the Conductor about a request now; after its first placement, admission is not asked again."""
        request = state.request
        view = self._workers.view(request, now_s, self._log.history)
        decision: Decision
        if view.prefill and view.decode:
            decision = self._decision(request, view, is_first=not state.attempt.n)
        elif self._spec.wait_for_workers:
            self._wait(state, "waiting")
            return NO_COMMANDS
        else:
            up = f"{len(view.prefill)} prefill and {len(view.decode)} decode instances live"
            decision = Rejection(request_id=request.id, stage="capacity", reason=f"{up}; one of each is needed")
        self._unplaced.pop(request.id, None)
        if isinstance(decision, Rejection):
            return self.reject(state, decision.stage, state.why + decision.reason, now_s)
        self._log.placed(decision, now_s, state.why)
        return self._place(state, decision, now_s)

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
        if spec.reject_policy_errors and isinstance(decision, Placement):
            named = (decision.prefill, decision.decode, decision.fetch_from)
            unknown = [name for name in named if name is not None and not self._workers.is_up(name)]
            if unknown:
                reason = f"the placement policy names worker {unknown[0]!r}, which is not up"
                return Rejection(request_id=request.id, stage="failed", reason=reason)
        return decision

    def double_check(self, state: RequestState, decode: WorkerState) -> Rejection | None:
        """Ask admission again when the KVCache of a request is at its decode worker (arXiv §3, step 4)."""
        spec = self._spec
        try:
            return spec.admission.double_check(
                state.request, decode.decode_view(), estimate=self._estimate, slo=spec.slo
            )
        except Exception as error:  # noqa: BLE001  # a policy may raise anything
            return self._policy_failed(state.request, error)

    def _policy_failed(self, request: Request, error: Exception) -> Rejection:
        if not self._spec.reject_policy_errors:
            raise error
        reason = f"the placement or admission policy failed: {error!r}"
        return Rejection(request_id=request.id, stage="failed", reason=reason)

    def _place(self, state: RequestState, placement: Placement, now_s: float) -> Sequence[Command]:
        """Begin the next attempt, and reserve on its workers."""
        request = state.request
        attempt = state.attempt = Attempt(request.id, state.attempt.n + 1)
        prefill = self._workers[placement.prefill]
        decode = prefill if prefill.role == "coupled" else self._workers[placement.decode]
        state.placement, state.prefill, state.decode = placement, prefill, decode
        state.phase, state.prefix_fetched = "queued", False
        self.in_transit[request.id] = state
        decode.expect(request, now_s + placement.expected_ttft_s)
        prefill.add_prompt(
            attempt, self._estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        )
        if placement.fetch_from is not None:
            self._workers.begin_fetch(attempt, request, placement)
        compute = RunPrefill(attempt, request, placement)
        return (compute,) if prefill is decode else (PrepareDecode(attempt, decode.name, request), compute)

    def place_again(
        self, state: RequestState, reason: str, now_s: float, suspects: Sequence[str] = ()
    ) -> Sequence[Command]:
        """An attempt came to nothing: the prompt and the tokens shown are prefilled anew, elsewhere or later."""
        shown, joined = self.shown_tokens(state), state.phase in AT_DECODE
        commands = list(self.end_attempt(state))
        state.shown_tokens = shown
        if joined and shown > state.prompt_shown_tokens:
            longer = self._extend(state.request, shown - state.prompt_shown_tokens)
            if longer is None:
                commands += self.finish(state, shown, now_s)
                return commands
            state.request, state.prompt_shown_tokens = longer, shown
        if state.attempt.n == self._spec.max_attempts:
            reason = f"{state.attempt.n} attempts came to nothing, the last because {reason}"
            commands += self.reject(state, "failed", reason, now_s)
            return commands
        state.why = f"placed again after {reason}: "
        state.suspects = frozenset(filter(self._workers.is_up, suspects))
        if state.suspects:
            self._wait(state, "unconfirmed")
            commands.append(ConfirmWorkers(tuple(sorted(state.suspects))))
        else:
            commands += self.decide(state, now_s)
        return commands

    def _wait(self, state: RequestState, phase: Phase) -> None:
        state.phase = phase
        self._unplaced[state.request.id] = state

    def join(self, state: RequestState, at_s: float) -> None:
        """A request's KVCache is where it decodes."""
        assert state.prefill is not None and state.decode is not None  # noqa: S101, PT018  # it is placed
        del self.in_transit[state.request.id]
        state.prefill.end_sending(state.attempt)
        state.decode.join(state.request.id, at_s)
        state.phase = "joining"

    def shown_tokens(self, state: RequestState) -> int:
        """Tokens that the client of a request has now."""
        if state.phase != "decoding" or state.decode is None:
            return state.shown_tokens
        return state.shown_tokens + state.decode.contexts[state.request.id] - state.request.input_tokens

    def end_attempt(self, state: RequestState) -> Sequence[Command]:
        """Release what an attempt has reserved, and tell those of its workers that are up."""
        if state.prefill is None or state.decode is None:
            return NO_COMMANDS
        workers = [state.prefill] if state.prefill is state.decode else [state.prefill, state.decode]
        self.release(state)
        return [CancelAttempt(state.attempt, worker.name) for worker in workers if worker.up]

    def release(self, state: RequestState) -> None:
        """An attempt is over: its workers have nothing reserved for it any more.

        A prompt stays in the backlog of its prefill worker until that worker says that it dropped or computed it.
        """
        if state.prefill is not None and state.decode is not None:
            if self.in_transit.pop(state.request.id, None) is not None:
                state.prefill.end_sending(state.attempt)
            state.decode.release(state.request.id)
            state.placement = state.prefill = state.decode = None

    def reject(self, state: RequestState, stage: str, reason: str, at_s: float) -> Sequence[Command]:
        """End a request that is not served, or no longer."""
        request_id = state.request.id
        self._forget(request_id)
        self._log.rejected(request_id, stage, reason, at_s)
        return (Reject(request_id, stage, reason),)

    def finish(self, state: RequestState, output_tokens: int, at_s: float) -> Sequence[Command]:
        """End a request that has all its tokens."""
        request_id = state.request.id
        self._forget(request_id)
        self._log.finished(request_id, output_tokens, at_s)
        return (Finish(request_id),)

    def _forget(self, request_id: int) -> None:
        del self.requests[request_id]
        self._unplaced.pop(request_id, None)


def arrival(state: RequestState) -> tuple[float, int]:
    """The order in which requests are placed again."""
    return state.request.arrival_s, state.request.id
