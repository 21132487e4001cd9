"""The coordinator: follows each request from its arrival to its last token, in the real and the simulated cluster.

A runtime reports events and carries out the commands that come back. The coordinator does no I/O and reads no
clock: the same events give the same commands and the same run log. The `Phase` of a request says where it is, and
the `InstanceState` of an instance says what it has to do, as far as its events tell. Events lead a request from
one phase to the next:

    RequestArrived, TimerFired  deciding    -> queued: placed; else it is rejected, or it is waiting
    TimerFired                  waiting     -> rejected, when it has waited as long as it may
    PrefillStarted              queued      -> prefilling
    PrefillDone                 prefilling  -> moving
    KVArrived                   moving      -> loading: admitted a second time; else it is rejected
    KVLoaded                    loading     -> joining
    DecodeStarted               joining     -> decoding, with the first token
    RequestDone                 decoding    -> finished
    AttemptFailed, InstanceDown   any placed  -> queued: placed again; or it is unconfirmed, waiting or rejected

An instance may report the end of a phase before another one reports its beginning, so a phase may be skipped. On a
coupled instance, `ChunkDone` takes the place of the prefill events, and no KVCache moves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, assert_never, final

from msgspec.structs import replace

from mooncake_lab.cluster import events
from mooncake_lab.cluster.events import SHARED_STORE, Attempt, Command, Event
from mooncake_lab.cluster.instances import InstanceState, InstanceTable
from mooncake_lab.cluster.spec import ClusterSpec
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
    mistake_in,
    mistake_in_check,
    needs_of,
)
from mooncake_lab.core import (
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
- waiting: no instance can serve it; it is placed when one comes up;
- unconfirmed: an attempt failed; it is placed again when it is known which instances are up;
- queued: it is placed, and its prompt waits at the prefill instance;
- prefilling: its prompt is being computed;
- moving: its KVCache is on the way to the decode instance;
- loading: its KVCache is in the host memory of the decode instance;
- joining: its KVCache is in GPU memory, and it waits for a place in the batch;
- decoding: it is in the batch.
"""

AT_PREFILL: Final[frozenset[Phase]] = frozenset({"queued", "prefilling"})
"""The prompt is not computed yet."""
AT_DECODE: Final[frozenset[Phase]] = frozenset({"joining", "decoding"})
"""The KVCache is in the GPU memory of the decode instance, and no other instance is needed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorRules:
    """The rules of a runtime by which requests go through its cluster."""

    schedule_s: float = 0.0
    """From a request's arrival to its decision."""
    view_age_s: float = 0.0
    """How old the loads may be on which the Conductor decides; 0 is always the present."""
    wait_for_instances: bool = False
    """Whether a request that finds no instance waits for one; else it is rejected."""
    longest_wait_s: float | None = None
    """How long it waits before it is rejected after all; None is no limit."""
    max_inflight_requests: int | None = None
    """One more is rejected; None is no limit."""
    max_attempts: int | None = None
    """How often a request is placed; None is no limit."""
    reject_policy_errors: bool = False
    """Whether a policy that raises, or whose placement no instance could carry out, costs its request alone."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in flight. Mutable: the coordinator follows it."""

    request: Request
    """The request; tokens that a failed attempt has shown are at the end of its prompt."""
    attempt: Attempt
    """The current attempt, or the last; number 0 before the first."""
    phase: Phase = "deciding"
    waits_since_s: float = 0.0
    """When the request began to wait for an instance, in the phase "waiting"."""
    placement: Placement | None = None
    """The placement of the current attempt; None where there is no attempt."""
    prefill_instance: InstanceState = field(init=False)
    decode_instance: InstanceState = field(init=False)
    """The instances of that placement; a coupled instance is both."""
    holder_has_read: bool = False
    """Whether the instance that the prefix comes from has read from its SSD for the current attempt."""
    shown_tokens: int = 0
    """Tokens that the client had when the current attempt began to decode, with the one of prefill."""
    prompt_shown_tokens: int = 0
    """Shown tokens that a failure made part of the prompt."""
    why: str = ""
    """The text before the reason of the next placement in the log."""
    suspects: frozenset[str] = frozenset()
    """Instances that have to be confirmed before it is placed again."""

    @property
    def instances(self) -> tuple[InstanceState, ...]:
        """The instances of the current attempt, each once."""
        if self.placement is None:
            return ()
        return tuple(dict.fromkeys((self.prefill_instance, self.decode_instance)))

    def needs(self, instance: str) -> bool:
        """Whether the current attempt needs this instance to prefill or to decode.

        A prefix that was to come from an instance that is down is computed instead, where the prompt is.
        """
        if self.placement is None:
            return False
        if instance == self.decode_instance.name:
            return True
        return instance == self.prefill_instance.name and self.phase not in AT_DECODE

    def shown_now(self) -> int:
        """Tokens that its client has now."""
        if self.phase != "decoding":
            return self.shown_tokens
        known_tokens = self.decode_instance.decode.tokens_of(self.request.id)
        return self.shown_tokens + known_tokens - self.request.input_tokens


@final
class Coordinator:
    """Turns events into commands, and writes the run log. Mutable: it follows the requests in flight.

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
        self.instances = InstanceTable(rules.view_age_s)
        self.requests: dict[int, RequestState] = {}
        """The requests in flight, by id."""
        needs = needs_of(spec.placement) | needs_of(spec.admission)
        self._history = History(learns_lengths="lengths" in needs)
        self._spec = spec
        self._rules = rules
        self._estimate = estimate
        self._write = write
        self._extend = extend
        self._observe = observe
        self._commands: list[Command] = []  # what the runtime is to do about the event under way
        self._now_s = 0.0  # when the event under way was learned of

    def on(self, event: Event, now_s: float) -> Sequence[Command]:
        """What is to be done about an event that the coordinator learns of now; not re-entrant.

        An event about the work of an instance updates what is known of it, even where the attempt is over.
        Any other event about an attempt that is over, about a request that has ended, or about an unknown instance
        changes nothing, and neither does one that was reported before.
        """
        self._now_s = now_s
        # `isinstance`, here and below: a `match` of classes takes three times as long
        if isinstance(event, DecodeStretch):
            self._decoded(event)
        elif isinstance(event, events.OfWork):
            instance = self.instances.by_name.get(event.instance)
            if instance is not None:
                self._on_work(event, instance, self._current(event.attempt))
        elif isinstance(event, events.OfAttempt):
            state = self._current(event.attempt)
            if state is not None:
                self._on_attempt(event, state)
        elif isinstance(event, events.OfRequest):
            state = self.requests.get(event.request_id)
            if state is not None:
                self._on_request(event, state)
        else:
            self._on_general(event)
        commands = self._commands
        if not commands:  # most events need nothing
            return ()
        self._commands = []
        return tuple(commands)

    def _on_work(self, event: events.WorkEvent, instance: InstanceState, state: RequestState | None) -> None:
        if isinstance(event, events.PrefillStarted):
            self._prefill_started(event, instance, state)
        elif isinstance(event, events.PrefillDone):
            self._prefill_done(event, instance, state)
        elif isinstance(event, events.ChunkDone):
            self._chunk_done(event, instance, state)
        elif isinstance(event, events.Preempted):
            self._preempted(event, instance, state)
        elif isinstance(event, events.PrefillDropped):
            instance.prefill.remove(event.attempt, event.at_s)
        elif isinstance(event, events.FetchStarted):
            self._fetch_started(event, instance)
        elif isinstance(event, events.PrefixFetched):
            self._prefix_fetched(event, instance)
        elif isinstance(event, events.TierRead):
            self._tier_read(event, instance, state)
        elif isinstance(event, events.KVSent):  # pyright: ignore[reportUnnecessaryIsInstance]
            instance.prefill.sent(event.attempt)
        else:
            assert_never(event)

    def _on_attempt(self, event: events.AttemptEvent, state: RequestState) -> None:
        if isinstance(event, events.KVArrived):
            self._kv_arrived(event, state)
        elif isinstance(event, events.KVLoaded):
            if state.phase not in AT_DECODE:
                self._join(state, event.at_s)
        elif isinstance(event, events.DecodeStarted):
            if state.phase != "decoding":
                self._decode_started(event, state)
        elif isinstance(event, events.RequestDone):
            if state.phase == "decoding":
                self._request_done(event, state)
        elif isinstance(event, events.AttemptFailed) and event.retriable:  # pyright: ignore[reportUnnecessaryIsInstance]
            self._place_again(state, event.reason, event.suspects)
        elif isinstance(event, events.AttemptFailed):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._cancel(state)
            self._reject(state, event.stage, event.reason, event.at_s)
        else:
            assert_never(event)

    def _on_request(self, event: events.RequestEvent, state: RequestState) -> None:
        if isinstance(event, events.TimerFired):
            if state.phase == "deciding":
                self._decide(state)
            elif state.phase == "waiting":
                self._stop_waiting(state)
        elif isinstance(event, events.Cancelled):
            self._cancel(state)
            self._reject(state, "client", event.reason, event.at_s)
        elif isinstance(event, events.ClientStopped):  # pyright: ignore[reportUnnecessaryIsInstance]
            tokens = state.shown_now()
            self._cancel(state)
            self._finish(state, tokens, event.at_s)
        else:
            assert_never(event)

    def _on_general(self, event: events.GeneralEvent) -> None:
        if isinstance(event, CacheChanged):
            self._cache_changed(event)
        elif isinstance(event, events.RequestArrived):
            self._request_arrived(event)
        elif isinstance(event, events.AnswerKept):
            self._moved(event, event.source, event.instance)
        elif isinstance(event, events.PrefillSlotFree):
            self.instances.free_slot(event)
        elif isinstance(event, events.InstanceUp):
            self._instance_up(event)
        elif isinstance(event, events.InstanceDown):
            self._instance_down(event)
        elif isinstance(event, events.InstanceConfirmed):
            self._confirmed(event)
        elif isinstance(event, RunEnded):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._run_ended(event)
        else:
            assert_never(event)

    def view(self, request: Request, now_s: float) -> ClusterView:
        """What the Conductor may know about a request now; looking changes nothing in the cluster."""
        return self.instances.view(request, now_s, self._history)

    def is_current(self, attempt: Attempt) -> bool:
        """Whether a request is in this attempt now."""
        return self._current(attempt) is not None

    def shown_tokens(self, request_id: int) -> int:
        """Tokens that the client of a request in flight has now."""
        return self.requests[request_id].shown_now()

    def _current(self, attempt: Attempt) -> RequestState | None:
        """The request of an attempt, unless it has ended or is in another attempt."""
        state = self.requests.get(attempt.request_id)
        is_current = state is not None and state.placement is not None and state.attempt.n == attempt.n
        return state if is_current else None

    # a request arrives

    def _request_arrived(self, event: events.RequestArrived) -> None:
        request, requests = event.request, self.requests
        if request.id in requests:
            return
        self._record(
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
            self._reject(state, "frontdoor", refusal, self._now_s)
        elif self._rules.schedule_s:
            self._commands.append(events.SetTimer(request.id, self._rules.schedule_s))
        else:
            self._decide(state)

    # placement

    def _decide(self, state: RequestState) -> None:
        """Ask the Conductor about a request now; after its first placement, admission is not asked again."""
        request = state.request
        view = self.instances.view(request, self._now_s, self._history)
        decision: Decision
        if view.prefill and view.decode:
            decision = self._decision(request, view, is_first=not state.attempt.n)
        elif self._rules.wait_for_instances:
            self._wait(state)
            return
        else:
            up = f"{len(view.prefill)} prefill and {len(view.decode)} decode instances live"
            decision = Rejection(request_id=request.id, stage="capacity", reason=f"{up}; one of each is needed")
        if isinstance(decision, Rejection):
            self._reject(state, decision.stage, state.why + decision.reason, self._now_s)
        else:
            self._place(state, decision)

    def _wait(self, state: RequestState) -> None:
        """Let a request wait for an instance; a change that still leaves it none does not begin the wait anew."""
        if state.phase == "waiting":
            return
        state.phase, state.waits_since_s = "waiting", self._now_s
        if self._rules.longest_wait_s is not None:
            self._commands.append(events.SetTimer(state.request.id, self._rules.longest_wait_s))

    def _stop_waiting(self, state: RequestState) -> None:
        """Reject a request that has waited as long as it may; the timer may be of an earlier wait."""
        longest_s = self._rules.longest_wait_s
        if longest_s is None:
            return
        left_s = state.waits_since_s + longest_s - self._now_s
        if left_s > 0:
            self._commands.append(events.SetTimer(state.request.id, left_s))
            return
        view = self.instances.view(state.request, self._now_s, self._history)
        up = f"{len(view.prefill)} prefill and {len(view.decode)} decode workers are up"
        self._reject(state, "capacity", f"{up}; one of each did not come up within {longest_s:g} s", self._now_s)

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
        if self._rules.reject_policy_errors and (mistake := mistake_in(decision, request, view)):
            return self._policy_mistake(request, mistake)
        return decision

    def _double_check(self, state: RequestState) -> Rejection | None:
        """Ask admission again when the KVCache of a request is at its decode instance (arXiv §3, step 4)."""
        spec = self._spec
        try:
            refusal = spec.admission.double_check(
                state.request, state.decode_instance.decode.view(), estimate=self._estimate, slo=spec.slo
            )
        except Exception as error:  # noqa: BLE001  # a policy may raise anything
            return self._policy_failed(state.request, error)
        if self._rules.reject_policy_errors and (mistake := mistake_in_check(refusal)):
            return self._policy_mistake(state.request, mistake)
        return refusal

    def _policy_failed(self, request: Request, error: Exception) -> Rejection:
        if not self._rules.reject_policy_errors:
            raise error
        return self._policy_mistake(request, f"failed: {error!r}")

    def _policy_mistake(self, request: Request, mistake: str) -> Rejection:
        reason = f"the placement or admission policy {mistake}"
        return Rejection(request_id=request.id, stage="failed", reason=reason)

    def _place(self, state: RequestState, placement: Placement) -> None:
        """Begin the next attempt, and reserve on its instances."""
        request, prefill_instance = state.request, self.instances.by_name[placement.prefill]
        is_coupled = prefill_instance.role == "coupled"
        decode_instance = prefill_instance if is_coupled else self.instances.by_name[placement.decode]
        self._write(
            Placed(
                at_s=self._now_s,
                request_id=request.id,
                prefill_instance=prefill_instance.name,
                decode_instance=decode_instance.name,
                reused_tokens=placement.reused_tokens,
                fetched_tokens=placement.fetched_tokens,
                reason=state.why + placement.reason,
            )
        )
        attempt = state.attempt = Attempt(request.id, state.attempt.n + 1)
        state.prefill_instance, state.decode_instance = prefill_instance, decode_instance
        state.placement, state.phase, state.holder_has_read = placement, "queued", False
        decode_instance.decode.expect(request, self._now_s + placement.expected_ttft_s)
        estimated_s = self._estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        if placement.ssd_tokens:
            estimated_s = self._estimate.beside_ssd_s(estimated_s, placement.ssd_tokens)
        if placement.fetch_from is not None and self._estimate.fetches_by_layer:
            moving_s = self._estimate.transfer_s(placement.fetched_tokens, 0)  # other transfers end meanwhile
            estimated_s = self._estimate.beside_load_s(estimated_s, moving_s)
        prefill_instance.prefill.add(attempt, estimated_s)
        if placement.fetch_from is not None:
            self.instances.begin_fetch(attempt, request, placement)
        if not is_coupled:
            self._commands.append(events.PrepareDecode(attempt, decode_instance.name, request))
        self._commands.append(events.RunPrefill(attempt, request, placement))

    # prefill

    def _fetch_started(self, event: events.FetchStarted, instance: InstanceState) -> None:
        """A prefill instance fetches blocks of a shared store from the instance on which they lie."""
        source = self.instances.by_name.get(event.source)
        if source is not None and source.up and instance.prefill.is_news(event.attempt, "fetches", source.name):
            begun = source.prefill.reading if event.from_ssd else source.prefill.sending
            begun[event.attempt] = event.instance

    def _prefix_fetched(self, event: events.PrefixFetched, instance: InstanceState) -> None:
        source = self.instances.by_name.get(event.source)
        if source is None and event.source != SHARED_STORE:
            return
        is_sent = source is not None and source.prefill.end_sending(event.attempt)
        is_news = instance.prefill.is_news(event.attempt, "fetched", event.source) or is_sent
        if is_news and event.bytes:
            self._moved(event, event.source, event.instance)

    def _tier_read(self, event: events.TierRead, instance: InstanceState, state: RequestState | None) -> None:
        is_news = instance.prefill.read_tier(event.attempt)
        if state is not None and state.placement is not None and state.placement.fetch_from == instance.name:
            # the holder may be heard later than the fetch, and may have demoted blocks without a report so far
            is_news, state.holder_has_read = is_news or not state.holder_has_read, True
        if is_news:
            self._moved(event, f"{event.instance}/ssd", f"{event.instance}/dram")

    def _prefill_started(
        self, event: events.PrefillStarted, instance: InstanceState, state: RequestState | None
    ) -> None:
        if instance.prefill.start(event.attempt, event.at_s) and state is not None and state.phase == "queued":
            state.phase = "prefilling"

    def _prefill_done(
        self, event: events.PrefillDone, instance: InstanceState, state: RequestState | None
    ) -> None:
        if not instance.prefill.remove(event.attempt, event.at_s):
            return
        self._prefilled(event)
        if state is not None:
            if state.phase in AT_PREFILL:
                state.phase = "moving"
                instance.prefill.sending[event.attempt] = state.decode_instance.name
            if self._spec.first_shown_by == "prefill" and not state.shown_tokens:
                self._show_first(state, event.at_s)

    def _prefilled(self, event: events.PrefillDone | events.ChunkDone) -> None:
        self._write(
            Prefilled(
                at_s=event.at_s,
                request_id=event.attempt.request_id,
                instance=event.instance,
                start_s=event.start_s,
                computed_tokens=event.computed_tokens,
                reused_tokens=event.reused_tokens,
            )
        )

    # a coupled instance

    def _chunk_done(self, event: events.ChunkDone, instance: InstanceState, state: RequestState | None) -> None:
        if event.start_s < instance.up_s or not instance.is_news(event):
            return
        self._prefilled(event)
        if state is not None:
            if state.phase == "queued":
                state.phase = "prefilling"
            instance.decode.hold(state.request.id, max(event.context_tokens, state.request.input_tokens))

    def _preempted(self, event: events.Preempted, instance: InstanceState, state: RequestState | None) -> None:
        if instance.is_news(event) and state is not None:
            if state.phase == "prefilling":
                state.phase = "queued"
            instance.decode.hold(state.request.id, max(event.context_tokens, state.request.input_tokens))

    # from prefill to decode

    def _kv_arrived(self, event: events.KVArrived, state: RequestState) -> None:
        """Once the KVCache is at the decode instance, admission is asked again (arXiv §3, step 4)."""
        if state.phase not in AT_PREFILL and state.phase != "moving":
            return
        self._moved(event, state.prefill_instance.name, state.decode_instance.name)
        if not event.is_last:
            return
        state.prefill_instance.prefill.end_sending(event.attempt)
        refusal = None if state.prompt_shown_tokens else self._double_check(state)
        if refusal is not None:
            self._cancel(state)
            self._reject(state, refusal.stage, refusal.reason, self._now_s)
            return
        state.phase = "loading"
        state.decode_instance.decode.join(state.request.id, event.at_s)
        shows_computed = state.prompt_shown_tokens > 0 or not state.shown_tokens
        self._commands.append(
            events.StartDecode(event.attempt, state.decode_instance.name, state.shown_tokens, shows_computed)
        )

    def _moved(
        self,
        event: events.PrefixFetched | events.TierRead | events.KVArrived | events.AnswerKept,
        source: str,
        destination: str,
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
        if state.phase != "joining":
            self._join(state, event.at_s)
        state.phase = "decoding"
        instance, request_id, coupled = (
            state.decode_instance,
            state.request.id,
            state.decode_instance is state.prefill_instance,
        )
        instance.decode.start(request_id)
        if coupled:
            instance.prefill.remove(event.attempt, event.at_s)
        if not state.shown_tokens:
            self._show_first(state, event.at_s)
        elif state.prompt_shown_tokens and not coupled:
            state.shown_tokens += 1
            self._write(
                DecodeStretch(
                    at_s=event.at_s,
                    instance=instance.name,
                    start_s=event.at_s,
                    steps=1,
                    first_step_s=0.0,
                    step_growth_s=0.0,
                    request_ids=(request_id,),
                )
            )

    def _show_first(self, state: RequestState, at_s: float) -> None:
        state.shown_tokens = 1
        self._record(FirstToken(at_s=at_s, request_id=state.request.id))

    def _decoded(self, event: DecodeStretch) -> None:
        instance = self.instances.by_name.get(event.instance)
        if instance is None or event.start_s < instance.decode.stepped_until_s:
            return
        here = instance.decode.started
        if not here.issuperset(event.request_ids):  # some attempts are over
            event = replace(event, request_ids=tuple(filter(here.__contains__, event.request_ids)))
        if event.request_ids:
            self._write(event)
        instance.decode.step(event.request_ids, event.steps, event.at_s)

    def _request_done(self, event: events.RequestDone, state: RequestState) -> None:
        tokens = state.shown_now()
        self._release(state)
        self._finish(state, tokens, event.at_s)

    # an attempt fails, or a request ends

    def _place_again(self, state: RequestState, reason: str, suspects: Sequence[str] = ()) -> None:
        """An attempt came to nothing: the prompt and the tokens shown are prefilled anew, elsewhere or later."""
        shown, joined = state.shown_now(), state.phase in AT_DECODE
        self._cancel(state)
        state.shown_tokens = shown
        if joined and shown > state.prompt_shown_tokens:
            longer = self._extend(state.request, shown - state.prompt_shown_tokens)
            if longer is None:
                self._finish(state, shown, self._now_s)
                return
            state.request, state.prompt_shown_tokens = longer, shown
        if state.attempt.n == self._rules.max_attempts:
            reason = f"{state.attempt.n} attempts came to nothing, the last because {reason}"
            self._reject(state, "failed", reason, self._now_s)
            return
        state.why = f"placed again after {reason}: "
        state.suspects = frozenset(instance.name for instance in self.instances.up if instance.name in suspects)
        if state.suspects:
            state.phase = "unconfirmed"
            self._commands.append(events.ConfirmInstances(tuple(sorted(state.suspects))))
        else:
            self._decide(state)

    def _join(self, state: RequestState, at_s: float) -> None:
        """A request's KVCache is where it decodes."""
        state.prefill_instance.prefill.end_sending(state.attempt)
        state.decode_instance.decode.join(state.request.id, at_s)
        state.phase = "joining"

    def _cancel(self, state: RequestState) -> None:
        """Release what an attempt has reserved, and tell those of its instances that are up."""
        instances = state.instances
        self._release(state)
        self._commands += [
            events.CancelAttempt(state.attempt, instance.name) for instance in instances if instance.up
        ]

    def _release(self, state: RequestState) -> None:
        """An attempt is over: its instances have nothing reserved for it any more.

        A prompt stays in the backlog of its prefill instance until that reports that it dropped or computed it.
        """
        if state.placement is not None:
            state.prefill_instance.prefill.end_sending(state.attempt)
            state.decode_instance.decode.release(state.request.id)
            state.placement = None

    def _reject(self, state: RequestState, stage: str, reason: str, at_s: float) -> None:
        """End a request that is not served, or no longer."""
        request_id = state.request.id
        del self.requests[request_id]
        self._record(Rejected(at_s=at_s, request_id=request_id, stage=stage, reason=reason))
        self._commands.append(events.Reject(request_id, stage, reason))

    def _finish(self, state: RequestState, output_tokens: int, at_s: float) -> None:
        """End a request that has all its tokens."""
        request_id = state.request.id
        del self.requests[request_id]
        self._record(Finished(at_s=at_s, request_id=request_id, output_tokens=output_tokens))
        self._commands.append(events.Finish(request_id))

    def _record(self, record: Arrived | FirstToken | Finished | Rejected) -> None:
        """Write a record of which views show something later."""
        self._write(record)
        self._history.note(record)

    # instances

    def _cache_changed(self, event: CacheChanged) -> None:
        if self.instances.cache_changed(event):
            moves = event.promoted or event.demoted
            self._write(replace(event, promoted=(), demoted=()) if moves else event)

    def _instance_up(self, event: events.InstanceUp) -> None:
        self.instances.add(event)
        for state in self._by_arrival():
            if state.phase == "waiting":
                state.why = state.why or f"placed when {event.instance} was up: "
                self._decide(state)

    def _instance_down(self, event: events.InstanceDown) -> None:
        """The requests that need the instance are placed again, but for those that its last step still serves."""
        instance = self.instances.remove(event.instance)
        if instance is None:
            return
        for state in self._by_arrival():
            in_step = event.finishes_step and (instance.role == "coupled" or state.phase in AT_DECODE)
            if state.needs(instance.name) and not in_step:
                self._place_again(state, f"{instance.name} failed")
        self._confirmed(event)

    def _confirmed(self, event: events.InstanceConfirmed | events.InstanceDown) -> None:
        """Place requests again whose suspects are all known to be up or down."""
        for state in self._by_arrival():
            if state.phase == "unconfirmed":
                state.suspects -= {event.instance}
                if not state.suspects:
                    self._decide(state)

    def _run_ended(self, event: RunEnded) -> None:
        """The log is cut: requests in flight stay open in it, and go on if the runtime does."""
        others = [state for id_, state in self.requests.items() if id_ not in event.tokens and state.shown_tokens]
        shown = {state.request.id: state.shown_now() for state in others}
        self._write(RunEnded(at_s=event.at_s, tokens=shown | event.tokens))

    def _by_arrival(self) -> list[RequestState]:
        """The requests in flight, in the order in which they are placed again."""
        return sorted(self.requests.values(), key=lambda state: (state.request.arrival_s, state.request.id))
