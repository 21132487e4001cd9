"""A model in pipeline stages, several micro-batches in flight, each planned by a batching policy (SARATHI §5.3).

A micro-batch keeps its requests until they are done. When it is back from the last stage and the first one is
free, its policy plans the next iteration, which passes the stages in order: on stage `s`, the `k`-th iteration
starts at `max(end[s-1,k] + hop, end[s,k-1])`. Nothing overtakes, so only entering and leaving are events.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

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
    env = simpy.Environment()
    pipeline = _Pipeline(env, spec, requests)
    env.run()
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


class _Pipeline:
    """The moving parts."""

    def __init__(self, env: simpy.Environment, spec: PipelineSpec, requests: Sequence[TracedRequest]) -> None:
        self._env, self._spec = env, spec
        ordered = sorted(requests, key=lambda traced: (traced.request.arrival_s, traced.request.id))
        self._seats = [Seat.of(rank, traced) for rank, traced in enumerate(ordered)]
        self._coming = deque(self._seats)
        self._queue: list[Seat] = []
        self._entry = simpy.Resource(env)
        self._awake = env.event()
        self._free_s = [0.0] * spec.clock.stages
        self._log = _Log()
        self._rejected: list[int] = []
        env.process(self._arrive())
        for index in range(spec.micro_batches):
            env.process(self._live(index, MicroBatch(spec.policy, spec.limits)))

    def _arrive(self) -> Generator[simpy.Event, Any, None]:
        while self._coming:
            arrival_s = self._coming[0].arrival_s
            if arrival_s > self._env.now:
                yield self._env.timeout(arrival_s - self._env.now)
            while self._coming and self._coming[0].arrival_s <= self._env.now:
                self._queue.append(self._coming.popleft())
            awake, self._awake = self._awake, self._env.event()
            awake.succeed()

    def _live(self, index: int, batch: MicroBatch) -> Generator[simpy.Event, Any, None]:
        starved = False
        while True:
            with self._entry.request() as turn:
                yield turn
                plan = batch.plan(self._queue, self._env.now)
                self._rejected += [refusal.request_id for refusal in plan.rejected]
                passage = self._enter(index, plan, starved=starved) if plan.segments else None
                if passage is not None:
                    yield self._env.timeout(passage[0] - self._env.now)
            starved = passage is None
            if passage is not None:
                _, done_s, gap_s = passage
                yield self._env.timeout(max(done_s - self._env.now, 0.0))
                batch.finish(plan, done_s, gap_s)
            elif not (plan.rejected or plan.preempted or plan.swapped):
                if not self._coming:
                    self._require_none_left(batch)
                    return
                yield self._awake

    def _require_none_left(self, batch: MicroBatch) -> None:
        if self._queue:
            raise ValueError(
                f"{batch.policy} takes none of {len(self._queue)} waiting requests into an empty micro-batch"
            )

    def _enter(self, index: int, plan: Plan, *, starved: bool) -> tuple[float, float, float]:
        """Pass the stages; when the first is left, when the last, and how long stages stood idle before."""
        stage_s, hop_s = self._spec.clock.stage_s(plan), self._spec.clock.hop_s(plan)
        starts, ends = passage(self._free_s, self._env.now, stage_s, hop_s)
        gap_s = sum(starts) - sum(self._free_s)
        self._free_s = ends
        first = not self._log.starved
        self._log.add(starts, ends, index, plan, starved=starved)
        return ends[0], ends[-1], 0.0 if first else gap_s

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
