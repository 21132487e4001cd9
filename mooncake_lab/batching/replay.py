"""A policy stepped through a set of requests without a model; its log is a Gantt chart.

Only this module has the output lengths. They determine when a request is done, and no policy sees them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mooncake_lab.batching.instance import BlockSpace, CountedBlocks, Instance
from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress, queue_order


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of an instance: what the policy saw and planned, which requests were done, and when it ran."""

    index: int
    waiting: tuple[Progress, ...]
    running: tuple[Progress, ...]
    limits: Limits
    plan: Plan
    finished: tuple[int, ...]
    """Requests that got their last token, in the order of the plan."""
    start_s: float
    end_s: float

    @classmethod
    def of(
        cls, instance: Instance, index: int, plan: Plan, finished: Sequence[int], start_s: float, end_s: float
    ) -> "Iteration":
        """The iteration of the last plan of an instance."""
        waiting, running, limits = instance.seen
        return cls(index, tuple(waiting), tuple(running), limits, plan, tuple(finished), start_s, end_s)


def trace_plans(
    policy: BatchingPolicy,
    requests: Sequence[Progress],
    limits: Limits,
    output_tokens: Mapping[int, int],
    *,
    blocks: BlockSpace | None = None,
    arrives_s: Mapping[int, float] | None = None,
    seconds: Callable[[Plan], float] = lambda _: 1.0,
    max_iterations: int = 100_000,
) -> list[Iteration]:
    """Run a policy until every request is finished or refused; the iterations in order.

    A request that arrives during an iteration is seen by the next one. While no request is there, the clock waits.

    Args:
        policy: what is stepped.
        requests: in any order; their ids are unique, they hold no blocks yet, and their ranks follow `arrives_s`.
        limits: of the instance; its free blocks are counted here.
        output_tokens: tokens each request generates in all, at least 1 more than it has.
        blocks: the KVCache; by default blocks that are only counted. With others, no plan is checked.
        arrives_s: when each request arrives; 0 for those not named.
        seconds: how long an iteration takes; by default the clock counts iterations.
        max_iterations: after which the policy is taken to be stuck.

    Raises:
        ValueError: when a plan breaks a rule of `check_plan`, or the policy is stuck: it does nothing while
            requests wait or run, or it does not come to an end.
    """
    arrivals = {request.request_id: 0.0 for request in requests} | dict(arrives_s or {})
    coming = sorted(requests, key=lambda each: (arrivals[each.request_id], *queue_order(each)), reverse=True)
    counted = CountedBlocks(limits.capacity_blocks)
    instance = Instance(policy, limits, blocks or counted, checks=blocks is None)
    log: list[Iteration] = []
    now_s = 0.0
    while coming or instance.waiting or instance.running:
        if not (instance.waiting or instance.running):
            now_s = max(now_s, arrivals[coming[-1].request_id])
        while coming and arrivals[coming[-1].request_id] <= now_s:
            instance.enqueue(coming.pop())
        if len(log) >= max_iterations:
            raise ValueError(f"{policy} is not done after {max_iterations} iterations")
        plan = instance.plan()
        if plan.is_empty:
            stuck = [request.request_id for request in (*instance.running.values(), *instance.waiting)]
            raise ValueError(f"{policy} does nothing in iteration {len(log)} while requests {stuck} are there")
        now = instance.apply(plan)
        finished = [each.request_id for each in now if each.generated_tokens >= output_tokens[each.request_id]]
        for request_id in finished:
            instance.finish(request_id)
        end_s = now_s + (seconds(plan) if plan.segments else 0.0)
        log.append(Iteration.of(instance, len(log), plan, finished, now_s, end_s))
        now_s = end_s
    return log


def gantt(log: Sequence[Iteration]) -> dict[int, str]:
    """One string per request, one letter per iteration (Sarathi-Serve, OSDI'24, Fig. 7).

    `p` is a piece of a prompt, and `P` the last piece, which gives the first token. `d` is a decode. A running
    request without tokens is `.`, a preempted one `x`, a waiting one `w`, and a refused one `r`. A space means
    that the request is not present.
    """
    rows = [_letters(step) for step in log]
    return {
        request_id: "".join(row.get(request_id, " ") for row in rows) for request_id in sorted(set().union(*rows))
    }


def _letters(step: Iteration) -> dict[int, str]:
    """The letter of each request that is present."""
    letters = {request.request_id: "w" for request in step.waiting}
    letters |= {request.request_id: "." for request in step.running}
    letters |= {refusal.request_id: "r" for refusal in step.plan.rejected}
    letters |= dict.fromkeys((*step.plan.preempted, *step.plan.swapped), "x")
    for segment in step.plan.segments:
        letters[segment.request_id] = "d" if segment.kind == "decode" else "P" if segment.emits else "p"
    return letters
