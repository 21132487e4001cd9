"""A micro-batch of a pipeline: its requests, what its policy sees of them, and what a plan does to them."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_lab.batching import BatchingPolicy, Limits, Plan, Progress, decode_stretch_steps
from mooncake_lab.core import TracedRequest


@dataclass(slots=True, eq=False)
class Seat:
    """One request in a pipeline, and what became of it. Mutable: its progress is what a run is about."""

    request_id: int
    rank: int
    """In the order of arrival."""
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    scheduled_s: float | None = None
    """When its first iteration was planned; None before."""
    bubble_s: float = 0.0
    """Time for which stages stood idle in front of the iterations that carried it (SARATHI Fig. 12a)."""
    token_s: list[float] = field(default_factory=list[float])
    """When each of its tokens appeared."""
    max_tokens: int | None = None
    """The most tokens of its answer, where its client states it; else the window is the limit."""

    @classmethod
    def of(cls, rank: int, traced: TracedRequest) -> "Seat":
        """A request that has not begun.

        Raises:
            ValueError: when it generates nothing: a pipeline serves it until its last token.
        """
        request = traced.request
        if traced.output_tokens < 1:
            raise ValueError(f"request {request.id} has no output tokens; a pipeline needs at least 1")
        return cls(
            request_id=request.id,
            rank=rank,
            arrival_s=request.arrival_s,
            prompt_tokens=request.input_tokens,
            output_tokens=traced.output_tokens,
            max_tokens=request.max_tokens,
        )

    @property
    def done(self) -> bool:
        """Whether it has its last token."""
        return self.generated_tokens >= self.output_tokens

    def progress(self, block_tokens: int) -> Progress:
        """What a policy may know."""
        return Progress(
            request_id=self.request_id,
            arrival=self.rank,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            held_blocks=-(-self.cached_tokens // block_tokens),
            max_new_tokens=self.max_tokens,
        )


class MicroBatch:
    """Requests that pass the stages together. Mutable: requests come and go.

    Args:
        policy: what runs next.
        limits: places and KVCache of this micro-batch.
    """

    def __init__(self, policy: BatchingPolicy, limits: Limits) -> None:
        self.policy = policy
        self.limits = limits
        self.running: list[Seat] = []

    def plan(self, queue: list[Seat], now_s: float) -> Plan:
        """The next iteration; requests that it begins leave the queue, those that it pushes out go back to it.

        Raises:
            ValueError: when nothing is planned for requests that run.
        """
        block = self.limits.block_size_tokens
        running = [seat.progress(block) for seat in self.running]
        # nobody can take more of the queue than there are places, whoever is refused on the way
        waiting = [seat.progress(block) for seat in queue[: self.limits.max_requests + 1]]
        plan = self.policy.plan(waiting, running, self._limits_now(running))
        if running and not (plan.segments or plan.rejected or plan.preempted or plan.swapped):
            raise ValueError(f"{self.policy} plans nothing for {len(running)} requests that run")
        if plan.rejected or plan.preempted or plan.swapped:
            self._push_out(plan, queue)
        planned = {segment.request_id for segment in plan.segments}
        begun = [seat for seat in queue[: len(waiting)] if seat.request_id in planned]
        for seat in begun:
            queue.remove(seat)
            insort(self.running, seat, key=_rank)
            seat.scheduled_s = now_s if seat.scheduled_s is None else seat.scheduled_s
        return plan

    def steady_steps(self, plan: Plan) -> int:
        """For how many iterations a plan of all its requests, each decoding, is the plan while nobody comes."""
        if any(segment.kind != "decode" for segment in plan.segments) or len(plan.segments) < len(self.running):
            return 1
        running = [seat.progress(self.limits.block_size_tokens) for seat in self.running]
        left = min(seat.output_tokens - seat.generated_tokens for seat in self.running)
        return max(1, min(left, decode_stretch_steps(running, self._limits_now(running))))

    def finish(self, plan: Plan, done_s: Sequence[float], gap_s: float) -> None:
        """Iterations are back from the last stage: their tokens are known, and who is done leaves.

        Args:
            plan: of each of them.
            done_s: when each was back.
            gap_s: how long stages stood idle before the first.
        """
        seats, steps = {seat.request_id: seat for seat in self.running}, len(done_s)
        for segment in plan.segments:
            seat = seats[segment.request_id]
            seat.cached_tokens += segment.new_tokens * steps
            seat.bubble_s += gap_s
            if segment.emits:
                seat.generated_tokens += steps
                seat.token_s += done_s
        self.running = [seat for seat in self.running if not seat.done]

    def _limits_now(self, running: Sequence[Progress]) -> Limits:
        limits = self.limits
        held = sum(request.held_blocks for request in running)
        return Limits(
            max_batch_tokens=limits.max_batch_tokens,
            max_requests=limits.max_requests,
            block_size_tokens=limits.block_size_tokens,
            capacity_blocks=limits.capacity_blocks,
            free_blocks=limits.capacity_blocks - held,
            max_request_tokens=limits.max_request_tokens,
        )

    def _push_out(self, plan: Plan, queue: list[Seat]) -> None:
        refused = {refusal.request_id for refusal in plan.rejected}
        queue[:] = [seat for seat in queue if seat.request_id not in refused]
        pushed = {*plan.preempted, *plan.swapped}
        for seat in self.running:
            if seat.request_id in pushed:
                seat.cached_tokens = seat.cached_tokens if seat.request_id in plan.swapped else 0
                insort(queue, seat, key=_rank)
        self.running = [seat for seat in self.running if seat.request_id not in refused | pushed]


def _rank(seat: Seat) -> int:
    return seat.rank
