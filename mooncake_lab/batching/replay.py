"""Steps a policy through a set of requests, with no clock and no model: the log is a Gantt chart.

Here, and only here, the output lengths are known. They decide when a request is done; no policy sees them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooncake_lab.batching.check import check_plan
from mooncake_lab.batching.instance import CountedBlocks, Instance
from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress


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


@dataclass(slots=True, eq=False)
class ObservedPolicy:
    """A policy that plans as another one does, and keeps what that saw last. Mutable."""

    policy: BatchingPolicy
    checks: bool
    """Whether each plan goes through `check_plan`."""
    seen: tuple[tuple[Progress, ...], tuple[Progress, ...], Limits] | None = None

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """The plan of the other policy.

        Raises:
            ValueError: when it breaks a rule of `check_plan`.
        """
        plan = self.policy.plan(waiting, running, limits)
        if self.checks:
            check_plan(plan, waiting, running, limits)
        self.seen = tuple(waiting), tuple(running), limits
        return plan

    def iteration(self, index: int, plan: Plan, finished: tuple[int, ...]) -> Iteration:
        """The last iteration, for the log."""
        assert self.seen is not None  # noqa: S101  # it was planned
        waiting, running, limits = self.seen
        return Iteration(
            index=index, waiting=waiting, running=running, limits=limits, plan=plan, finished=finished
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
    observer = ObservedPolicy(policy, checks=True)
    instance = Instance(observer, limits, CountedBlocks(limits.capacity_blocks))
    log: list[Iteration] = []
    while coming or instance.waiting or instance.running:
        index = len(log)
        while coming and enters.get(coming[-1].request_id, 0) <= index:
            instance.enqueue(coming.pop())
        if index >= max_iterations:
            raise ValueError(f"{policy} is not done after {max_iterations} iterations")
        plan = instance.plan()
        if not coming and plan.is_empty:
            stuck = [request.request_id for request in (*instance.running.values(), *instance.waiting)]
            raise ValueError(f"{policy} does nothing in iteration {index} while requests {stuck} are there")
        finished = [
            r.request_id for r in instance.apply(plan) if r.generated_tokens >= output_tokens[r.request_id]
        ]
        for request_id in finished:
            instance.finish(request_id)
        log.append(observer.iteration(index, plan, tuple(finished)))
    return log


def _order(request: Progress) -> tuple[int, int]:
    return request.arrival, request.request_id
