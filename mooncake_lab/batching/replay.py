"""Steps a policy through a set of requests, with no clock and no model: the log is a Gantt chart.

Here, and only here, the output lengths are known. They decide when a request is done; no policy sees them.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from mooncake_lab.batching.check import check_plan
from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration of an instance: what the policy saw, what it decided, who was done."""

    index: int
    waiting: tuple[Progress, ...]
    running: tuple[Progress, ...]
    limits: Limits
    plan: Plan
    finished: tuple[int, ...]
    """Requests that got their last token, in the order of the plan."""


@dataclass(slots=True)
class _Instance:
    """The state between iterations. Mutable: it is what the plans act on."""

    limits: Limits
    output_tokens: Mapping[int, int]
    waiting: list[Progress] = field(default_factory=list[Progress])
    running: list[Progress] = field(default_factory=list[Progress])

    def enqueue(self, request: Progress) -> None:
        insort(self.waiting, request, key=_order)

    def limits_now(self) -> Limits:
        held = sum(request.held_blocks for request in self.running)
        return msgspec.structs.replace(self.limits, free_blocks=self.limits.capacity_blocks - held)

    def act(self, plan: Plan) -> list[int]:
        """Do what the plan says; who got the last token."""
        refused = {refusal.request_id for refusal in plan.rejected}
        pushed_out = {*plan.preempted, *plan.swapped}
        progress = {segment.request_id: segment for segment in plan.segments}
        held = {request.request_id: request for request in (*self.waiting, *self.running)}
        self.waiting = [r for r in self.waiting if r.request_id not in progress and r.request_id not in refused]
        for request_id in (*plan.preempted, *plan.swapped):
            cached = held[request_id].cached_tokens if request_id in plan.swapped else 0
            self.enqueue(msgspec.structs.replace(held[request_id], cached_tokens=cached, held_blocks=0))
        stay = [r for r in self.running if not {r.request_id} & (refused | pushed_out | progress.keys())]
        finished: list[int] = []
        for request_id, segment in progress.items():
            request = self._computed(held[request_id], segment.new_tokens, segment.emits)
            if request.generated_tokens < self.output_tokens[request_id]:
                stay.append(request)
            else:
                finished.append(request_id)
        self.running = sorted(stay, key=_order)
        return finished

    def _computed(self, request: Progress, new_tokens: int, emits: bool) -> Progress:
        cached = request.cached_tokens + new_tokens
        return msgspec.structs.replace(
            request,
            cached_tokens=cached,
            generated_tokens=request.generated_tokens + emits,
            held_blocks=-(-cached // self.limits.block_size_tokens),
        )


def trace_plans(
    policy: BatchingPolicy,
    requests: Sequence[Progress],
    limits: Limits,
    output_tokens: Mapping[int, int],
    *,
    enters_at: Mapping[int, int] | None = None,
    max_iterations: int = 100_000,
) -> list[Iteration]:
    """Run a policy until every request is finished or refused; the iterations in order.

    Args:
        policy: what is stepped.
        requests: in any order; their ids are unique, and they hold no blocks yet.
        limits: of the instance; its free blocks are counted here.
        output_tokens: tokens each request generates in all, at least 1 more than it has.
        enters_at: the iteration before which a request arrives; 0 for those not named.
        max_iterations: after which the policy is taken to be stuck.

    Raises:
        ValueError: when a plan breaks a rule of `check_plan`, or the policy is stuck: it does nothing while
            requests wait or run and nothing is still to arrive, or it does not come to an end.
    """
    enters = enters_at or {}
    coming = sorted(
        requests, key=lambda request: (enters.get(request.request_id, 0), *_order(request)), reverse=True
    )
    instance = _Instance(limits, output_tokens)
    log: list[Iteration] = []
    while coming or instance.waiting or instance.running:
        index = len(log)
        while coming and enters.get(coming[-1].request_id, 0) <= index:
            instance.enqueue(coming.pop())
        if index >= max_iterations:
            raise ValueError(f"{policy} is not done after {max_iterations} iterations")
        log.append(_step(policy, instance, index))
        plan = log[-1].plan
        if not (coming or plan.segments or plan.rejected or plan.preempted or plan.swapped):
            stuck = [request.request_id for request in (*instance.running, *instance.waiting)]
            raise ValueError(f"{policy} does nothing in iteration {index} while requests {stuck} are there")
    return log


def _step(policy: BatchingPolicy, instance: _Instance, index: int) -> Iteration:
    """Plan, check, act."""
    waiting, running, limits = tuple(instance.waiting), tuple(instance.running), instance.limits_now()
    plan = policy.plan(waiting, running, limits)
    check_plan(plan, waiting, running, limits)
    finished = tuple(instance.act(plan))
    return Iteration(index=index, waiting=waiting, running=running, limits=limits, plan=plan, finished=finished)


def _order(request: Progress) -> tuple[int, int]:
    return request.arrival, request.request_id
