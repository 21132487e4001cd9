"""A coupled instance in virtual time: prefill and decode on the same GPUs, under any batching policy.

It asks its policy for a plan and runs it as one iteration. Where the policy would plan the same again (the same
decodes, the same piece of a prompt), the iterations up to the next change are one formula and one record, so that
an hour of traffic takes seconds and no token is lost.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import fsum, inf
from typing import Any, NamedTuple, TypeAlias

import simpy

from mooncake_lab.batching import BatchingPolicy, CountedBlocks, Instance, Limits, Plan, Progress, Segment
from mooncake_lab.conductor import DecodeView, PrefillView, ServedView
from mooncake_lab.core import (
    DecodeStretch,
    Finished,
    FirstToken,
    Prefilled,
    Record,
    Rejected,
    Request,
    TracedRequest,
)
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.device_cache import DeviceCache
from mooncake_lab.simulation.device_memory import CachedBlocks
from mooncake_lab.simulation.steady import ROUNDING_S, Steady, pace_of


@dataclass(slots=True, eq=False)
class CoupledRequest:
    """What a coupled instance knows of a request beside its `Progress`. Mutable: tokens are added to it."""

    traced: TracedRequest
    estimated_s: float
    """How long the Conductor expects its prefill to take."""
    served: ServedView
    """The request as the Conductor sees it: when it began to decode here, or is expected to."""
    generated_tokens: int
    """Tokens that its user has, those of the iterations under way left out."""
    shown_tokens: int
    """The part of them that came from an instance that failed."""
    begun: bool = False
    """Whether some of its prompt has been computed since it was admitted."""
    preempted: bool = False
    """Whether it was preempted before.

    A preempted request may find its own blocks again: that saves computation, and is no hit of the workload.
    """

    @property
    def output_tokens(self) -> int:
        """Tokens it generates in all; prefill gives one even where the trace says none."""
        return max(1, self.traced.output_tokens)


Parts: TypeAlias = Sequence[tuple[CoupledRequest, Segment]]
"""The requests of a plan beside their segments."""


class Stretch(NamedTuple):
    """Iterations of one plan: when the first began, how long they take, and how many."""

    start_s: float
    pace: Steady
    steps: int


class CoupledInstance:
    """Serves whole requests with one batching policy.

    Args:
        env: the virtual time.
        name: of the instance.
        model: how long iterations take (its hybrid step), and what beginning a prompt costs.
        policy: what runs next.
        limits: of its iterations and its memory.
        cache: computed prompts in the same memory; None reuses none.
        log: where records go.
        lost: called for each request that was here when the instance failed, with the tokens its user has.
    """

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        model: LatencyModel,
        policy: BatchingPolicy,
        limits: Limits,
        cache: DeviceCache | None,
        log: Callable[[Record], None],
        lost: Callable[[TracedRequest, int], None] | None = None,
    ) -> None:
        self.name = name
        self.cache = cache
        self.alive = True
        self.assigned_requests = 0
        self.capacity_tokens = limits.capacity_blocks * limits.block_size_tokens
        """KVCache tokens that fit."""
        self.horizon_s = inf
        """When the run is cut: iterations that repeat end with the last one before it, as in `DecodeInstance`."""
        self._env = env
        self._model = model
        self._log = log
        self._lost = lost
        self._requests: dict[int, CoupledRequest] = {}
        blocks = (
            CountedBlocks(limits.capacity_blocks)
            if cache is None
            else CachedBlocks(limits.capacity_blocks, limits.block_size_tokens, cache, self._request_of)
        )
        self.instance = Instance(policy, limits, blocks)
        self._loads: tuple[PrefillView, DecodeView] | None = None  # until something changes
        self._under_way: tuple[Plan, Stretch] | None = None
        self._awake: simpy.Event = env.event()
        self._process = env.process(self._live())

    def _request_of(self, request_id: int) -> Request:
        return self._requests[request_id].traced.request

    def _present(self) -> list[tuple[Progress, CoupledRequest]]:
        """Requests here: those that wait, then those that run."""
        progress = (*self.instance.waiting, *self.instance.running.values())
        return [(each, self._requests[each.request_id]) for each in progress]

    def matched_blocks(self, request: Request) -> int:
        """Leading blocks of a prompt that are in its memory."""
        return 0 if self.cache is None else self.cache.matched(request)

    def view(self, matched_blocks: int) -> tuple[PrefillView, DecodeView]:
        """What the Conductor may know of this instance in either pool, as of the last change.

        Requests whose prompt is not computed yet are on their way to decode; they are the prefill backlog, too.
        """
        if self._loads is None:
            self._loads = self._loads_now()
        prefill, decode = self._loads
        return (prefill._replace(matched_blocks=matched_blocks) if matched_blocks else prefill), decode

    def _loads_now(self) -> tuple[PrefillView, DecodeView]:
        queued: list[CoupledRequest] = []
        served: list[ServedView] = []
        tokens = 0
        for progress in (*self.instance.waiting, *self.instance.running.values()):
            request = self._requests[progress.request_id]
            tokens += max(progress.cached_tokens, request.served.input_tokens)
            if request.generated_tokens == request.shown_tokens:
                queued.append(request)
            else:
                served.append(request.served)
        backlog_s = fsum([request.estimated_s for request in queued])
        coming = tuple([request.served for request in queued])
        return (
            PrefillView(self.name, backlog_s, len(queued), self.assigned_requests, 0),
            DecodeView(self.name, len(queued) + len(served), tokens, self.capacity_tokens, tuple(served), coming),
        )

    def tokens_shown(self) -> dict[int, int]:
        """How many tokens each request here has received by now, those of the iterations under way included."""
        shown = {progress.request_id: request.generated_tokens for progress, request in self._present()}
        if self._under_way is not None:
            plan, (start_s, pace, steps) = self._under_way
            done = min(steps, pace.steps_within(self._env.now - start_s - ROUNDING_S))
            for segment in plan.segments:
                shown[segment.request_id] += done * segment.emits
        return {request_id: tokens for request_id, tokens in shown.items() if tokens}

    def submit(
        self,
        traced: TracedRequest,
        *,
        estimated_s: float,
        starts_s: float,
        max_tokens: int,
        shown_tokens: int = 0,
    ) -> None:
        """Queue a placed request; the iteration under way ends first.

        Args:
            traced: the request.
            estimated_s: how long the Conductor expects its prefill to take.
            starts_s: when the Conductor expects it to decode.
            max_tokens: the most tokens of its answer, for policies that reserve room for all of them.
            shown_tokens: tokens that its user has from an instance that failed: they are computed like its prompt.
        """
        request = traced.request
        served = ServedView(request.id, request.input_tokens + shown_tokens, starts_s)
        self._requests[request.id] = CoupledRequest(traced, estimated_s, served, shown_tokens, shown_tokens)
        self.instance.enqueue(
            Progress(
                request_id=request.id,
                arrival=self.assigned_requests,
                prompt_tokens=request.input_tokens,
                generated_tokens=shown_tokens,
                max_new_tokens=max_tokens,
            )
        )
        self.assigned_requests += 1
        self._loads = None
        if not self._awake.triggered:
            self._awake.succeed()

    def die(self) -> None:
        """Stop: a step that decodes ends, as in `DecodeInstance`; one of prompts alone is lost at once.

        The requests here are lost then, the tokens that were shown are not.
        """
        self.alive = False
        self._process.interrupt()

    def _live(self) -> Generator[simpy.Event, Any, None]:
        try:
            yield from self._serve()
        except simpy.Interrupt:
            present = sorted(self._present(), key=lambda pair: pair[0].arrival)
            for _, request in present:
                if self._lost is not None:
                    self._lost(request.traced, request.generated_tokens)
            self.instance.waiting.clear()
            self.instance.running.clear()
            self._requests, self._under_way = {}, None

    def _serve(self) -> Generator[simpy.Event, Any, None]:
        while True:
            self._awake = self._env.event()
            plan = self.instance.plan()
            self._push_out(plan)
            if plan.segments:
                yield from self._run(plan)
            elif plan.is_empty:
                if self.instance.running:
                    running = len(self.instance.running)
                    raise ValueError(f"{self.instance.policy} plans nothing for {running} requests that run")
                yield self._awake

    def _run(self, plan: Plan) -> Generator[simpy.Event, Any, None]:
        """Run a plan once, or as often as it stays the plan."""
        parts = [(self._requests[segment.request_id], segment) for segment in plan.segments]
        begun = sum(segment.kind == "prefill" and not request.begun for request, segment in parts)
        pace, start_s = pace_of(self._model, plan, begun), self._env.now
        steps = pace.steps_before(self._steady_steps(plan, parts), self.horizon_s, start_s)
        self._under_way = plan, Stretch(start_s, pace, steps)
        end = self._env.timeout(pace.seconds(steps))
        try:
            if steps == 1:
                yield end
            else:
                yield end | self._awake
                if not end.processed:  # a request came: the iteration under way is the last
                    steps = min(steps, pace.steps_within(self._env.now - start_s) + 1)
                    yield self._env.timeout(max(0.0, start_s + pace.seconds(steps) - self._env.now))
        except simpy.Interrupt:  # the instance failed
            if all(segment.kind == "prefill" for segment in plan.segments):
                raise
            steps = min(steps, pace.steps_within(self._env.now - start_s) + 1)
            yield self._env.timeout(max(0.0, start_s + pace.seconds(steps) - self._env.now))
            self._close(plan, parts, Stretch(start_s, pace, steps))
            raise
        self._close(plan, parts, Stretch(start_s, pace, steps))

    def _steady_steps(self, plan: Plan, parts: Parts) -> int:
        """How often the plan repeats if no request comes: until the policy changes it, or a request is done."""
        steps = self.instance.steady_steps(plan)
        if steps == 1:
            return 1
        left = [request.output_tokens - request.generated_tokens for request, segment in parts if segment.emits]
        return max(1, min(steps, min(left, default=steps)))

    def _close(self, plan: Plan, parts: Parts, stretch: Stretch) -> None:
        """Write down what was computed and let finished requests go."""
        self._loads = None
        self._under_way = None
        # a recomputation that is complete shows its user one more token, as a decode does
        decoded = [segment.request_id for request, segment in parts if segment.emits and request.generated_tokens]
        if decoded:
            self._log(
                DecodeStretch(
                    at_s=self._env.now,
                    instance=self.name,
                    start_s=stretch.start_s,
                    steps=stretch.steps,
                    first_step_s=stretch.pace.first_s,
                    step_growth_s=stretch.pace.growth_s,
                    request_ids=tuple(decoded),
                )
            )
        self.instance.apply(plan, stretch.steps)
        for request, segment in parts:
            if segment.kind == "prefill":
                self._prefilled(request, segment, stretch)
            if segment.emits:
                self._emitted(request, stretch.steps)

    def _prefilled(self, request: CoupledRequest, segment: Segment, stretch: Stretch) -> None:
        is_first = not (request.begun or request.preempted)
        self._log(
            Prefilled(
                at_s=self._env.now,
                request_id=segment.request_id,
                instance=self.name,
                start_s=stretch.start_s,
                computed_tokens=segment.new_tokens * stretch.steps,
                reused_tokens=segment.cached_tokens if is_first else 0,
            )
        )
        request.begun = True

    def _emitted(self, request: CoupledRequest, steps: int) -> None:
        """A request got its first token, or `steps` more."""
        request_id, now_s = request.traced.request.id, self._env.now
        if request.generated_tokens == request.shown_tokens:
            request.served = request.served._replace(starts_s=now_s)
        if not request.generated_tokens:
            self._log(FirstToken(at_s=now_s, request_id=request_id))
        request.generated_tokens += steps
        if request.generated_tokens >= request.output_tokens:
            self.instance.finish(request_id)
            del self._requests[request_id]
            self._log(Finished(at_s=now_s, request_id=request_id, output_tokens=request.generated_tokens))

    def _push_out(self, plan: Plan) -> None:
        """Write down the requests that can never be served; note the preempted ones."""
        if plan.rejected or plan.preempted or plan.swapped:
            self._loads = None
        # first those that waited
        for refusal in sorted(plan.rejected, key=lambda refusal: self._requests[refusal.request_id].begun):
            request = self._requests.pop(refusal.request_id)
            known_tokens = request.traced.request.input_tokens + request.generated_tokens
            stage = "capacity" if known_tokens > self.capacity_tokens else "batching"
            self._log(
                Rejected(at_s=self._env.now, request_id=refusal.request_id, stage=stage, reason=refusal.reason)
            )
        for request_id in (*plan.preempted, *plan.swapped):
            self._requests[request_id].begun, self._requests[request_id].preempted = False, True
