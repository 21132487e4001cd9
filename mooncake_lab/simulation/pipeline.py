"""A model in pipeline stages, several micro-batches in flight, each planned by a batching policy (SARATHI §5.3).

A micro-batch is an `Instance` that keeps its requests until they are done; all take them from one queue. When
a micro-batch is back from the last stage and the first one is free, its policy plans the next iteration, which
passes the stages in order: on stage `s`, the `k`-th iteration starts at `max(end[s-1,k] + hop, end[s,k-1])`. No
iteration overtakes another, so entering is the only event, and a heap of micro-batches by the time at which they
are back is all the calendar there is. While no request waits and all of a micro-batch decode, its plan stays until
one is done, and the policy is not asked again.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import simpy

from mooncake_lab.batching import BatchingPolicy, CountedBlocks, Instance, Limits, Plan, Progress
from mooncake_lab.core import TracedRequest, sum_in_order
from mooncake_lab.perf import CppGroup, IterationCost, LinkLatency, chunk_seconds


def plan_s(cost: IterationCost, plan: Plan) -> float:
    """Seconds of one planned iteration: all tokens through the matrices together, attention one by one."""
    tokens = context = decodes = 0
    attention_s = 0.0
    for segment in plan.segments:
        tokens += segment.new_tokens
        if segment.kind == "decode":
            decodes += 1
            context += segment.cached_tokens + 1
        else:
            attention_s += cost.chunk_attention_s(segment.new_tokens, segment.cached_tokens)
    beside_s = cost.beside_s if 0 < decodes < len(plan.segments) else 0.0
    decode_s = cost.decode_attention_s(context) + cost.decodes_s(decodes)
    return cost.linear.seconds(tokens) + attention_s + decode_s + beside_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageClock:
    """A model cut into stages of equally many layers, and the links between them.

    Raises:
        ValueError: when there is no stage, or a cost is negative.
    """

    cost: IterationCost
    """One iteration over all layers, on the devices of one stage."""
    stages: int
    link: LinkLatency
    """From a stage to the next; it works beside the stages."""
    hop_bytes_per_token: float
    """Activations of a token at a boundary."""
    overhead_s: float = 0.0
    """Added to every iteration, over all layers."""
    collective_s_per_token: float = 0.0
    """What the devices of a stage exchange for a token, over all layers (tensor parallelism)."""
    apart: bool = False
    """Whether the prompts and the decodes of a plan run one after the other and share nothing."""

    def __post_init__(self) -> None:
        costs = (self.hop_bytes_per_token, self.overhead_s, self.collective_s_per_token)
        if self.stages < 1 or min(costs) < 0:
            raise ValueError(f"{self} has no stage or a negative cost; at least 1 stage and 0 s are needed")

    def stage_s(self, plan: Plan) -> float:
        """Seconds of a plan on one stage."""
        parts = [plan]
        if self.apart and plan.prefills and plan.decodes:
            parts = [Plan(segments=plan.prefills), Plan(segments=plan.decodes)]
        whole_s = sum_in_order(plan_s(self.cost, part) + self.overhead_s for part in parts)
        return (whole_s + self.collective_s_per_token * plan.new_tokens) / self.stages

    def growth_s(self, plan: Plan) -> float:
        """Seconds by which a plan of decodes takes longer each time: every context has grown by a token."""
        return self.cost.per_context_token_s * len(plan.segments) / self.stages

    def hop_s(self, plan: Plan) -> float:
        """Seconds until the activations of a plan are on the next stage."""
        return self.link.seconds(self.hop_bytes_per_token * plan.new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """A pipeline and how it is driven.

    Raises:
        ValueError: when there is no micro-batch.
    """

    clock: StageClock
    policy: BatchingPolicy
    limits: Limits
    """The places of each micro-batch and its share of the KVCache."""
    micro_batches: int

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(
                f"a pipeline with {self.micro_batches} micro-batches runs nothing; 1 or more are needed"
            )


@dataclass(slots=True, eq=False)
class PipelineRequest:
    """One request in a pipeline, and what became of it. Mutable: a run fills it."""

    request_id: int
    arrival_s: float
    output_tokens: int
    scheduled_s: float | None = None
    """When its first iteration was planned; None before."""
    bubble_s: float = 0.0
    """Time for which stages stood idle in front of the iterations that carried it (SARATHI Fig. 12a)."""
    token_s: list[float] = field(default_factory=list[float])
    """When each of its tokens appeared."""


@dataclass(slots=True, eq=False)
class PipelineRun:
    """What happened: a column entry per iteration, in the order in which they entered. Mutable: a run fills it."""

    requests: Sequence[PipelineRequest]
    """In the order of their ids."""
    start_s: list[list[float]] = field(default_factory=list[list[float]])
    """When each iteration began on each stage."""
    end_s: list[list[float]] = field(default_factory=list[list[float]])
    """When each iteration ended on each stage."""
    micro_batch: list[int] = field(default_factory=list[int])
    """Which micro-batch it was."""
    prompt_tokens: list[int] = field(default_factory=list[int])
    """Tokens of prompts in it."""
    decodes: list[int] = field(default_factory=list[int])
    """Decodes in it."""
    starved: list[bool] = field(default_factory=list[bool])
    """Whether its micro-batch had nothing to do just before."""
    rejected: list[int] = field(default_factory=list[int])
    """Requests that the policy refused."""

    @property
    def makespan_s(self) -> float:
        """When the last stage is done with the last iteration."""
        return self.end_s[-1][-1] if self.end_s else 0.0


def run_pipeline(spec: PipelineSpec, requests: Sequence[TracedRequest]) -> PipelineRun:
    """Serve requests until all are done or refused.

    Raises:
        ValueError: when a policy plans nothing while its requests run or wait, or a request generates nothing: a
            pipeline serves it until its last token.
    """
    pipeline = _Pipeline(spec, requests)
    pipeline.play()
    return pipeline.run


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
class _MicroBatch:
    """An instance and what it has in the pipeline. Mutable: it comes back and enters again."""

    index: int
    instance: Instance
    plan: Plan = field(default_factory=Plan)
    again: int = 0
    """How often the plan may enter again as it is."""
    stage_s: float = 0.0
    hop_s: float = 0.0
    done_s: list[float] = field(default_factory=list[float])
    """When the iterations of the plan were back that are not applied yet."""
    gap_s: float = 0.0
    """How long stages stood idle before the first of them."""
    starved: bool = False


class _Pipeline:
    """The moving parts."""

    def __init__(self, spec: PipelineSpec, requests: Sequence[TracedRequest]) -> None:
        self._spec = spec
        ordered = sorted(requests, key=lambda traced: (traced.request.arrival_s, traced.request.id))
        self._requests = {traced.request.id: _arriving(traced) for traced in ordered}
        self._coming = deque(
            Progress(
                request_id=traced.request.id,
                arrival=rank,
                prompt_tokens=traced.request.input_tokens,
                max_new_tokens=traced.request.max_tokens,
            )
            for rank, traced in enumerate(ordered)
        )
        self._waiting: list[Progress] = []
        self._free_s = [0.0] * spec.clock.stages
        blocks = spec.limits.capacity_blocks
        self._batches = [
            _MicroBatch(index, Instance(spec.policy, spec.limits, CountedBlocks(blocks), self._waiting))
            for index in range(spec.micro_batches)
        ]
        self.run = PipelineRun(sorted(self._requests.values(), key=lambda request: request.request_id))

    def play(self) -> None:
        """Let micro-batches enter in the order in which they are back, until none comes again."""
        back = [(0.0, batch.index, batch.index) for batch in self._batches]
        for turn in count(len(back)):
            if not back:
                return
            at_s, _, index = heappop(back)
            again_s = self._turn(self._batches[index], max(at_s, self._free_s[0]))
            if again_s is not None:
                heappush(back, (again_s, turn, index))

    def _turn(self, batch: _MicroBatch, now_s: float) -> float | None:
        """A micro-batch has the first stage; when it is back, or None where nothing is left for it to do.

        Raises:
            ValueError: when its policy plans nothing for requests that run, or none of those that wait.
        """
        while self._coming and self._requests[self._coming[0].request_id].arrival_s <= now_s:
            batch.instance.enqueue(self._coming.popleft())
        if batch.again and not self._waiting:
            batch.again -= 1
            batch.stage_s += self._spec.clock.growth_s(batch.plan)
            return self._enter(batch, now_s)
        self._apply(batch)
        plan = batch.plan = batch.instance.plan()
        self.run.rejected += [refusal.request_id for refusal in plan.rejected]
        if plan.segments:
            batch.again = self._repeats(batch)
            for request in (self._requests[segment.request_id] for segment in plan.segments):
                if request.scheduled_s is None:
                    request.scheduled_s = now_s
            batch.stage_s, batch.hop_s = self._spec.clock.stage_s(plan), self._spec.clock.hop_s(plan)
            return self._enter(batch, now_s)
        batch.starved = True
        if not plan.is_empty:
            return now_s
        if batch.instance.running:
            running = len(batch.instance.running)
            raise ValueError(f"{self._spec.policy} plans nothing for {running} requests that run")
        if self._coming:
            return self._requests[self._coming[0].request_id].arrival_s
        if self._waiting:
            left = f"{len(self._waiting)} waiting requests"
            raise ValueError(f"{self._spec.policy} takes none of {left} into an empty micro-batch")
        return None

    def _apply(self, batch: _MicroBatch) -> None:
        """The iterations of a plan are back: their tokens are known, and requests that are done leave."""
        if batch.done_s:
            batch.instance.apply(batch.plan, len(batch.done_s))
            for segment in batch.plan.segments:
                request = self._requests[segment.request_id]
                request.bubble_s += batch.gap_s
                if segment.emits:
                    request.token_s += batch.done_s
                    if len(request.token_s) >= request.output_tokens:
                        batch.instance.finish(segment.request_id)
        batch.done_s, batch.gap_s = [], 0.0

    def _repeats(self, batch: _MicroBatch) -> int:
        """How often a plan of decodes stays the plan after its first iteration, while no request comes."""
        segments = batch.plan.segments
        if self._waiting or any(segment.kind == "prefill" for segment in segments):
            return 0
        requests = [self._requests[segment.request_id] for segment in segments]
        left = min(request.output_tokens - len(request.token_s) for request in requests)
        return min(left, batch.instance.steady_steps(batch.plan)) - 1

    def _enter(self, batch: _MicroBatch, now_s: float) -> float:
        """Pass the stages; when the last one is left."""
        starts, ends = passage(self._free_s, now_s, batch.stage_s, batch.hop_s)
        if self.run.starved:  # no stage was idle for lack of work before the first iteration
            batch.gap_s += sum_in_order(starts) - sum_in_order(self._free_s)
        self._free_s = ends
        prompt_tokens = sum(piece.new_tokens for piece in batch.plan.segments if piece.kind == "prefill")
        self.run.start_s.append(starts)
        self.run.end_s.append(ends)
        self.run.micro_batch.append(batch.index)
        self.run.prompt_tokens.append(prompt_tokens)
        self.run.decodes.append(batch.plan.new_tokens - prompt_tokens)
        self.run.starved.append(batch.starved)
        batch.starved = False
        batch.done_s.append(ends[-1])
        return ends[-1]


def _arriving(traced: TracedRequest) -> PipelineRequest:
    request = traced.request
    return PipelineRequest(request.id, request.arrival_s, traced.output_tokens)


def simulate_cpp(group: CppGroup, sizes: Sequence[int], reused_tokens: int = 0) -> list[list[float]]:
    """When each node is done with each chunk, `[node][chunk]`: chunked pipeline parallelism, event by event.

    Nodes and links are resources, chunks are processes. It knows nothing of the recurrence in `perf.cpp_finish_s`;
    the two check each other.

    Args:
        group: the nodes.
        sizes: tokens of the chunks, in order.
        reused_tokens: leading tokens whose KVCache exists.
    """
    env = simpy.Environment()
    nodes = [simpy.Resource(env) for _ in range(group.nodes)]
    links = [simpy.Resource(env) for _ in range(group.nodes - 1)]
    finish: list[list[float]] = [[0.0] * len(sizes) for _ in nodes]
    seconds = chunk_seconds(group, sizes, reused_tokens)

    def load(node: int) -> Generator[simpy.Event, Any, None]:
        with nodes[node].request() as turn:
            yield turn
            constant_s = 0.0 if node else group.prefill.constant_s
            share = group.layer_shares[node]
            yield env.timeout(constant_s + share * group.prefill.load_s_per_token * reused_tokens)

    def pass_through(chunk: int) -> Generator[simpy.Event, Any, None]:
        for node, share in enumerate(group.layer_shares):
            if node:
                with links[node - 1].request() as turn:
                    yield turn
                    yield env.timeout(group.hop_bytes(sizes[chunk]) / group.link.bytes_per_s)
                yield env.timeout(group.link.latency_s)
            with nodes[node].request() as turn:
                yield turn
                yield env.timeout(share * seconds[chunk])
                finish[node][chunk] = env.now

    for node in range(group.nodes):
        env.process(load(node))
    for chunk in range(len(sizes)):
        env.process(pass_through(chunk))
    env.run()
    return finish
