"""A coupled instance in virtual time: prefill and decode on the same GPUs, under any batching policy.

It asks its policy for a plan and runs it as one iteration. Where the policy would say the same again (the
same decodes, the same piece of a prompt), the iterations up to the next change are one formula and one
record, so that an hour of traffic takes seconds and no token is lost.
"""

from bisect import insort
from collections.abc import Callable, Generator, Mapping
from math import fsum, inf
from typing import Any

import msgspec
import simpy

from mooncake_lab.batching import BatchingPolicy, Limits, Plan, Progress, Segment, decode_stretch_steps
from mooncake_lab.conductor import DecodeView, PrefillView, ServedView
from mooncake_lab.core import DecodeStretch, Finished, FirstToken, Prefilled, Record, Rejected, TracedRequest
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.device_memory import DeviceMemory, Resident
from mooncake_lab.simulation.steady import ROUNDING_S, Parts, Steady, pace_of


class CoupledInstance:
    """Serves whole requests with one batching policy.

    Args:
        env: the virtual time.
        name: of the instance.
        model: how long iterations take (its hybrid step), and what beginning a prompt costs.
        policy: what runs next.
        memory: its KVCache blocks.
        log: where records go.
        lost: told each request that was here when it died, and how many tokens its user has.
    """

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        model: LatencyModel,
        policy: BatchingPolicy,
        memory: DeviceMemory,
        log: Callable[[Record], None],
        lost: Callable[[TracedRequest, int], None] | None = None,
    ) -> None:
        self.name = name
        self.memory = memory
        self.alive = True
        self.assigned_requests = 0
        self.horizon_s = inf
        """When the run is cut: iterations that repeat end with the last one before it, as in `DecodeInstance`."""
        self._env = env
        self._model = model
        self._policy = policy
        self._log = log
        self._lost = lost
        self._waiting: list[Resident] = []
        self._running: list[Resident] = []
        self._loads: tuple[PrefillView, DecodeView] | None = None  # until something changes
        self._under_way: tuple[Parts, float, Steady, int] | None = None
        self._awake: simpy.Event = env.event()
        self._life = env.process(self._live())

    @property
    def residents(self) -> list[Resident]:
        """Requests here: those that wait, then those that run."""
        return [*self._waiting, *self._running]

    def view(self, matched_blocks: int) -> tuple[PrefillView, DecodeView]:
        """What the Conductor may know of this instance in either pool, as of the last change.

        Requests whose prompt is not computed yet are on their way to decode; they are the prefill backlog, too.
        """
        if self._loads is None:
            residents = self.residents
            queued = [r for r in residents if r.is_queued]
            self._loads = (
                PrefillView(self.name, fsum(r.believed_s for r in queued), len(queued), self.assigned_requests, 0),
                DecodeView(
                    self.name,
                    len(residents),
                    sum(max(r.cached_tokens, r.served.input_tokens) for r in residents),
                    self.memory.capacity_tokens,
                    tuple(r.served for r in residents if not r.is_queued),
                    tuple(r.served for r in queued),
                ),
            )
        prefill, decode = self._loads
        return (prefill._replace(matched_blocks=matched_blocks) if matched_blocks else prefill), decode

    def tokens_shown(self) -> dict[int, int]:
        """How many tokens each request here has received by now, those of the iterations under way included."""
        shown = {r.traced.request.id: r.generated_tokens for r in self.residents}
        if self._under_way is not None:
            parts, start_s, pace, steps = self._under_way
            done = min(steps, pace.steps_within(self._env.now - start_s - ROUNDING_S))
            for resident, segment in parts:
                shown[resident.traced.request.id] += done * segment.emits
        return {request_id: tokens for request_id, tokens in shown.items() if tokens}

    def submit(
        self, traced: TracedRequest, *, believed_s: float, starts_s: float, max_tokens: int, shown_tokens: int = 0
    ) -> None:
        """Queue a placed request; the iteration under way ends first.

        Args:
            traced: the request.
            believed_s: how long the Conductor thinks its prefill takes.
            starts_s: when the Conductor expects it to decode.
            max_tokens: the most tokens of its answer, for policies that reserve room for all of them.
            shown_tokens: tokens that its user has from an instance that died: they are computed like its prompt.
        """
        resident = Resident(
            traced,
            self.assigned_requests,
            believed_s,
            ServedView(traced.request.id, traced.request.input_tokens + shown_tokens, starts_s),
            max_tokens,
            generated_tokens=shown_tokens,
            shown_tokens=shown_tokens,
        )
        insort(self._waiting, resident, key=_rank)
        self.assigned_requests += 1
        self._loads = None
        if not self._awake.triggered:
            self._awake.succeed()

    def die(self) -> None:
        """Stop: a step that decodes ends, as in `DecodeInstance`; one of prompts alone is lost at once.

        Whoever is here is lost then, the tokens that were shown are not.
        """
        self.alive = False
        self._life.interrupt()

    def _live(self) -> Generator[simpy.Event, Any, None]:
        try:
            yield from self._serve()
        except simpy.Interrupt:
            for resident in sorted(self.residents, key=_rank):
                if self._lost is not None:
                    self._lost(resident.traced, resident.generated_tokens)
            self._waiting, self._running, self._under_way = [], [], None

    def _serve(self) -> Generator[simpy.Event, Any, None]:
        while True:
            self._awake = self._env.event()
            waiting = [self.memory.progress(r) for r in self._waiting]
            running = [self.memory.progress(r) for r in self._running]
            limits = self.memory.limits_now(self._running)
            plan = self._policy.plan(waiting, running, limits)
            self._push_out(plan)
            if plan.segments:
                yield from self._run(plan, {p.request_id: p for p in (*waiting, *running)}, limits)
            elif self._running and not (plan.rejected or plan.preempted or plan.swapped):
                raise ValueError(f"{self._policy} plans nothing for {len(running)} requests that run")
            elif not plan.rejected:
                yield self._awake

    def _run(self, plan: Plan, known: Mapping[int, Progress], limits: Limits) -> Generator[simpy.Event, Any, None]:
        """Run a plan once, or as often as it stays the plan."""
        parts = self._enter(plan)
        pace = pace_of(self._model, parts)
        start_s = self._env.now
        steps = self._steady_steps(plan, parts, known, limits)
        steps = pace.steps_before(steps, self.horizon_s, start_s)
        self._under_way = parts, start_s, pace, steps
        end = self._env.timeout(pace.seconds(steps))
        try:
            if steps == 1:
                yield end
            else:
                yield end | self._awake
                if not end.processed:  # somebody came: the iteration under way is the last
                    steps = min(steps, pace.steps_within(self._env.now - start_s) + 1)
                    yield self._env.timeout(max(0.0, start_s + pace.seconds(steps) - self._env.now))
        except simpy.Interrupt:  # it died
            if all(segment.kind == "prefill" for _, segment in parts):
                raise
            steps = min(steps, pace.steps_within(self._env.now - start_s) + 1)
            yield self._env.timeout(max(0.0, start_s + pace.seconds(steps) - self._env.now))
            self._close(parts, start_s, pace, steps)
            raise
        self._close(parts, start_s, pace, steps)

    def _enter(self, plan: Plan) -> Parts:
        """The residents of a plan beside their segments; those that waited have a place from now on."""
        here = {r.traced.request.id: r for r in self.residents}
        parts = [(here[segment.request_id], segment) for segment in plan.segments]
        planned = {segment.request_id for segment in plan.segments}
        for resident in [r for r in self._waiting if r.traced.request.id in planned]:
            self._waiting.remove(resident)
            insort(self._running, resident, key=_rank)
            self.memory.enter(resident)
        return parts

    def _steady_steps(self, plan: Plan, parts: Parts, known: Mapping[int, Progress], limits: Limits) -> int:
        """How often the policy would plan the same if nobody came; at least once."""
        pieces = [(r, segment) for r, segment in parts if segment.kind == "prefill"]
        changes = plan.preempted or plan.swapped or plan.rejected
        if changes or len(pieces) > 1 or len(parts) < len(self._running):
            return 1
        steps = min((r.output_tokens - r.generated_tokens for r, s in parts if s.kind == "decode"), default=10**9)
        free = limits.free_blocks
        for resident, segment in pieces:
            if segment.emits or not resident.begun:
                return 1
            progress = known[segment.request_id]
            # within a block of its end a prompt may be cut differently, or not at all
            repeated = (progress.pending_tokens - limits.block_size_tokens) // segment.new_tokens
            steps = min(steps, repeated)
            free -= max(0, -(-progress.known_tokens // limits.block_size_tokens) - progress.held_blocks)
        decoding = [known[segment.request_id] for _, segment in parts if segment.kind == "decode"]
        if decoding:
            room = msgspec.structs.replace(limits, free_blocks=max(0, free))
            steps = min(steps, decode_stretch_steps(decoding, room))
        return max(1, steps)

    def _close(self, parts: Parts, start_s: float, pace: Steady, steps: int) -> None:
        """Write down what was computed and let finished requests go."""
        self._loads = None
        self._under_way = None
        # a recomputation that is complete shows its user one more token, as a decode does
        decoded = tuple(r.traced.request.id for r, segment in parts if r.generated_tokens and segment.emits)
        if decoded:
            self._log(
                DecodeStretch(
                    at_s=self._env.now,
                    instance=self.name,
                    start_s=start_s,
                    steps=steps,
                    first_step_s=pace.first_s,
                    step_growth_s=pace.growth_s,
                    request_ids=decoded,
                )
            )
        for resident, segment in parts:
            resident.cached_tokens += segment.new_tokens * steps
        self.memory.settle(self._running)  # before anybody leaves: the room was needed
        for resident, segment in parts:
            if segment.kind == "prefill":
                self._prefilled(resident, segment, start_s, steps)
            if segment.emits:
                self._emitted(resident, steps)

    def _prefilled(self, resident: Resident, segment: Segment, start_s: float, steps: int) -> None:
        self._log(
            Prefilled(
                at_s=self._env.now,
                request_id=segment.request_id,
                instance=self.name,
                start_s=start_s,
                computed_tokens=segment.new_tokens * steps,
                reused_tokens=0 if resident.begun else resident.reused_tokens,
            )
        )
        resident.begun = True
        if segment.emits:
            self.memory.computed(resident)

    def _emitted(self, resident: Resident, steps: int) -> None:
        """A request got its first token, or `steps` more."""
        request_id, now_s = resident.traced.request.id, self._env.now
        if resident.is_queued:
            resident.served = resident.served._replace(starts_s=now_s)
        if not resident.generated_tokens:
            self._log(FirstToken(at_s=now_s, request_id=request_id))
        resident.generated_tokens += steps
        if resident.generated_tokens >= resident.output_tokens:
            self._running.remove(resident)
            self.memory.leave(resident)
            self._log(Finished(at_s=now_s, request_id=request_id, output_tokens=resident.generated_tokens))

    def _push_out(self, plan: Plan) -> None:
        """Reject what can never be served; put the preempted back among the waiting, with nothing cached."""
        if not (plan.rejected or plan.preempted or plan.swapped):
            return
        self._loads = None
        reasons = {refusal.request_id: refusal.reason for refusal in plan.rejected}
        for resident in [r for r in self.residents if r.traced.request.id in reasons]:
            (self._waiting if resident in self._waiting else self._running).remove(resident)
            self.memory.leave(resident)
            request = resident.traced.request
            known_tokens = request.input_tokens + resident.generated_tokens
            stage = "capacity" if known_tokens > self.memory.capacity_tokens else "batching"
            self._log(Rejected(at_s=self._env.now, request_id=request.id, stage=stage, reason=reasons[request.id]))
        for resident in [r for r in self._running if r.traced.request.id in {*plan.preempted, *plan.swapped}]:
            self._running.remove(resident)
            self.memory.leave(resident)
            insort(self._waiting, resident, key=_rank)


def _rank(resident: Resident) -> int:
    return resident.rank
