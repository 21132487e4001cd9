"""Steps a policy through a set of requests without a clock and a model; the log is a Gantt chart.

Only this module has the output lengths. They determine when a request is done, and no policy sees them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from mooncake_lab.batching.instance import CountedBlocks, Instance
from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress, queue_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration of an instance: what the policy saw and planned, and which requests were done."""

    index: int
    waiting: tuple[Progress, ...]
    running: tuple[Progress, ...]
    limits: Limits
    plan: Plan
    finished: tuple[int, ...]
    """Requests that got their last token, in the order of the plan."""

    @classmethod
    def of(cls, instance: Instance, index: int, plan: Plan, finished: tuple[int, ...]) -> "Iteration":
        """The iteration of the last plan of an instance."""
        waiting, running, limits = instance.seen
        return cls(
            index=index,
            waiting=tuple(waiting),
            running=tuple(running),
            limits=limits,
            plan=plan,
            finished=finished,
        )


@final
class Replay:
    """Requests on one instance, stepped by a policy; the caller decides when requests enter. Mutable.

    Args:
        policy: what is stepped; each of its plans goes through `check_plan`.
        limits: of the instance; its free blocks are counted here.
        output_tokens: tokens each request generates in all, at least 1 more than it has.
        max_iterations: after which the policy is taken to be stuck.
    """

    def __init__(
        self,
        policy: BatchingPolicy,
        limits: Limits,
        output_tokens: Mapping[int, int],
        max_iterations: int = 100_000,
    ) -> None:
        self.log: list[Iteration] = []
        self.instance = Instance(policy, limits, CountedBlocks(limits.capacity_blocks), checks=True)
        self._output_tokens = output_tokens
        self._max_iterations = max_iterations

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not (self.instance.waiting or self.instance.running)

    def step(self, *, more_come: bool) -> Iteration:
        """One iteration, which ends the requests that get their last token in it.

        Args:
            more_come: whether requests will enter later, so that it may do nothing.

        Raises:
            ValueError: when the plan breaks a rule of `check_plan`, or the policy is stuck.
        """
        instance, policy, index = self.instance, self.instance.policy, len(self.log)
        if index >= self._max_iterations:
            raise ValueError(f"{policy} is not done after {self._max_iterations} iterations")
        plan = instance.plan()
        if not more_come and plan.is_empty:
            stuck = [request.request_id for request in (*instance.running.values(), *instance.waiting)]
            raise ValueError(f"{policy} does nothing in iteration {index} while requests {stuck} are there")
        finished = [
            request.request_id
            for request in instance.apply(plan)
            if request.generated_tokens >= self._output_tokens[request.request_id]
        ]
        for request_id in finished:
            instance.finish(request_id)
        self.log.append(Iteration.of(instance, index, plan, tuple(finished)))
        return self.log[-1]


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
        requests, key=lambda request: (enters.get(request.request_id, 0), *queue_order(request)), reverse=True
    )
    replay = Replay(policy, limits, output_tokens, max_iterations)
    while coming or not replay.is_idle:
        while coming and enters.get(coming[-1].request_id, 0) <= len(replay.log):
            replay.instance.enqueue(coming.pop())
        replay.step(more_come=bool(coming))
    return replay.log


def gantt(log: Sequence[Iteration]) -> dict[int, str]:
    """One string per request, one letter per iteration (Sarathi-Serve, OSDI'24, Fig. 7).

    `p` is a piece of a prompt, and `P` the last piece, which gives the first token. `d` is a decode. A running
    request without tokens is `.`, a preempted one `x`, a waiting one `w`, and a refused one `r`. A space means
    that the request is not present.
    """
    ids = {request.request_id for step in log for request in (*step.waiting, *step.running)}
    return {request_id: "".join(_letter(step, request_id) for step in log) for request_id in sorted(ids)}


def _letter(step: Iteration, request_id: int) -> str:
    for segment in step.plan.segments:
        if segment.request_id == request_id:
            return "d" if segment.kind == "decode" else "P" if segment.emits else "p"
    if request_id in step.plan.preempted or request_id in step.plan.swapped:
        return "x"
    if any(refusal.request_id == request_id for refusal in step.plan.rejected):
        return "r"
    if any(request.request_id == request_id for request in step.running):
        return "."
    return "w" if any(request.request_id == request_id for request in step.waiting) else " "
