"""A model in pipeline stages, several micro-batches in flight, each planned by a batching policy (SARATHI §5.3).

A micro-batch keeps its requests until they are done. When it is back from the last stage and the first one is
free, its policy plans the next iteration, which passes the stages in order: on stage `s`, the `k`-th iteration
starts at `max(end[s-1,k] + hop, end[s,k-1])`. Nothing overtakes, so entering is the only event, and a heap of
micro-batches by the time at which they are back is all the calendar there is. While nobody waits and all of a
micro-batch decode, its plan stays until somebody is done, and is not asked for again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np
import numpy.typing as npt

from mooncake_lab.batching import BatchingPolicy, Limits, Plan
from mooncake_lab.core import TracedRequest
from mooncake_lab.simulation.pipeline_batch import MicroBatch, Seat
from mooncake_lab.simulation.pipeline_clock import StageClock

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """A pipeline and how it is driven.

    Raises:
        ValueError: when there is no micro-batch.
    """

    clock: StageClock
    policy: BatchingPolicy
    limits: Limits
    """Of each micro-batch: its places and its share of the KVCache."""
    micro_batches: int

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(
                f"a pipeline with {self.micro_batches} micro-batches runs nothing; 1 or more are needed"
            )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PipelineRun:
    """What happened: iterations in the order in which they entered, requests in the order of their ids."""

    start_s: Floats
    """Shape (iterations, stages)."""
    end_s: Floats
    """Shape (iterations, stages)."""
    micro_batch: npt.NDArray[np.int64]
    """Shape (iterations,): which micro-batch it was."""
    prompt_tokens: npt.NDArray[np.int64]
    """Shape (iterations,): tokens of prompts in it."""
    decodes: npt.NDArray[np.int64]
    """Shape (iterations,): decodes in it."""
    starved: npt.NDArray[np.bool_]
    """Shape (iterations,): whether its micro-batch had nothing to do just before."""
    seats: Sequence[Seat]
    """One a request."""
    rejected: Sequence[int]
    """Requests that their policy refused."""

    @property
    def makespan_s(self) -> float:
        """When the last stage is done with the last iteration."""
        return float(self.end_s.max()) if len(self.end_s) else 0.0


@dataclass(slots=True)
class _Log:
    """Columns in the making. Mutable: a run fills it."""

    start_s: list[list[float]] = field(default_factory=list[list[float]])
    end_s: list[list[float]] = field(default_factory=list[list[float]])
    micro_batch: list[int] = field(default_factory=list[int])
    prompt_tokens: list[int] = field(default_factory=list[int])
    decodes: list[int] = field(default_factory=list[int])
    starved: list[bool] = field(default_factory=list[bool])

    def add(self, starts: list[float], ends: list[float], index: int, plan: Plan, *, starved: bool) -> None:
        """One iteration has entered."""
        prompt_tokens = sum(piece.new_tokens for piece in plan.segments if piece.kind == "prefill")
        self.start_s.append(starts)
        self.end_s.append(ends)
        self.micro_batch.append(index)
        self.prompt_tokens.append(prompt_tokens)
        self.decodes.append(plan.new_tokens - prompt_tokens)
        self.starved.append(starved)


def run_pipeline(spec: PipelineSpec, requests: Sequence[TracedRequest]) -> PipelineRun:
    """Serve requests until all are done or refused.

    Raises:
        ValueError: when a policy plans nothing while its requests run, or requests wait that nobody takes.
    """
    pipeline = _Pipeline(spec, requests)
    pipeline.play()
    return pipeline.result()


def passage(
    free_s: Sequence[float], ready_s: float, stage_s: float, hop_s: float
) -> tuple[list[float], list[float]]:
    """When one iteration starts and ends on each stage, each stage being free from some time on."""
    starts, ends = list[float](), list[float]()
    for free in free_s:
        start_s = max(ready_s, free)
        starts.append(start_s)
        ends.append(start_s + stage_s)
        ready_s = ends[-1] + hop_s
    return starts, ends


@dataclass(slots=True)
class _Flight:
    """A micro-batch and what it has in the pipeline. Mutable: it comes back and enters again."""

    index: int
    batch: MicroBatch
    plan: Plan = field(default_factory=Plan)
    again: int = 0
    """How often the plan may enter again as it is."""
    stage_s: float = 0.0
    hop_s: float = 0.0
    done_s: list[float] = field(default_factory=list[float])
    """When the iterations of the plan were back that its requests do not yet know of."""
    gap_s: float = 0.0
    starved: bool = False

    def settle(self) -> None:
        """Tell the requests of the iterations that are back."""
        if self.done_s:
            self.batch.finish(self.plan, self.done_s, self.gap_s)
        self.done_s, self.gap_s = [], 0.0


class _Pipeline:
    """The moving parts."""

    def __init__(self, spec: PipelineSpec, requests: Sequence[TracedRequest]) -> None:
        self._spec = spec
        ordered = sorted(requests, key=lambda traced: (traced.request.arrival_s, traced.request.id))
        self._seats = [Seat.of(rank, traced) for rank, traced in enumerate(ordered)]
        self._coming = deque(self._seats)
        self._queue: list[Seat] = []
        self._free_s = [0.0] * spec.clock.stages
        self._log = _Log()
        self._rejected: list[int] = []
        self._flights = [_Flight(i, MicroBatch(spec.policy, spec.limits)) for i in range(spec.micro_batches)]

    def play(self) -> None:
        """Let micro-batches enter in the order in which they are back, until none comes again."""
        back = [(0.0, flight.index, flight.index) for flight in self._flights]
        for turn in count(len(back)):
            if not back:
                return
            at_s, _, index = heappop(back)
            again_s = self._turn(self._flights[index], max(at_s, self._free_s[0]))
            if again_s is not None:
                heappush(back, (again_s, turn, index))

    def _turn(self, flight: _Flight, now_s: float) -> float | None:
        """A micro-batch has the first stage; when it is back, or None where nothing is left for it to do."""
        while self._coming and self._coming[0].arrival_s <= now_s:
            self._queue.append(self._coming.popleft())
        if flight.again and not self._queue:
            flight.again -= 1
            flight.stage_s += self._spec.clock.growth_s(flight.plan)
            return self._enter(flight, now_s)
        flight.settle()
        plan = flight.plan = flight.batch.plan(self._queue, now_s)
        self._rejected += [refusal.request_id for refusal in plan.rejected]
        flight.again = flight.batch.steady_steps(plan) - 1 if not self._queue and plan.segments else 0
        if plan.segments:
            flight.stage_s, flight.hop_s = self._spec.clock.stage_s(plan), self._spec.clock.hop_s(plan)
            return self._enter(flight, now_s)
        flight.starved = True
        if plan.rejected or plan.preempted or plan.swapped:
            return now_s
        if self._coming:
            return self._coming[0].arrival_s
        if self._queue:
            left = f"{len(self._queue)} waiting requests"
            raise ValueError(f"{flight.batch.policy} takes none of {left} into an empty micro-batch")
        return None

    def _enter(self, flight: _Flight, now_s: float) -> float:
        """Pass the stages; when the last one is left."""
        starts, ends = passage(self._free_s, now_s, flight.stage_s, flight.hop_s)
        if self._log.starved:  # nothing stood idle for want of work before the first
            flight.gap_s += sum(starts) - sum(self._free_s)
        self._free_s = ends
        self._log.add(starts, ends, flight.index, flight.plan, starved=flight.starved)
        flight.starved = False
        flight.done_s.append(ends[-1])
        return ends[-1]

    def result(self) -> PipelineRun:
        """All of it, once nothing happens any more."""
        log, stages = self._log, self._spec.clock.stages
        return PipelineRun(
            start_s=np.asarray(log.start_s, dtype=np.float64).reshape(-1, stages),
            end_s=np.asarray(log.end_s, dtype=np.float64).reshape(-1, stages),
            micro_batch=np.asarray(log.micro_batch, dtype=np.int64),
            prompt_tokens=np.asarray(log.prompt_tokens, dtype=np.int64),
            decodes=np.asarray(log.decodes, dtype=np.int64),
            starved=np.asarray(log.starved, dtype=np.bool_),
            seats=sorted(self._seats, key=lambda seat: seat.request_id),
            rejected=tuple(self._rejected),
        )
