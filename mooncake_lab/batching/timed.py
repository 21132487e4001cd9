"""Steps a policy through requests that arrive at times, where each iteration takes as long as a model says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress
from mooncake_lab.batching.replay import Iteration, trace_plans

IterationSeconds: TypeAlias = Callable[[Plan], float]


@dataclass(frozen=True, slots=True)
class TimedIteration:
    """An iteration, and when it ran."""

    step: Iteration
    start_s: float
    end_s: float


def timed_plans(
    policy: BatchingPolicy,
    requests: Sequence[Progress],
    limits: Limits,
    output_tokens: Mapping[int, int],
    *,
    arrives_s: Mapping[int, float],
    seconds: IterationSeconds,
) -> list[TimedIteration]:
    """Run a policy until every request is finished or refused; the iterations with their times.

    A request that arrives during an iteration is seen by the next one. What arrives later changes no earlier
    iteration, so requests are added one by one, each at the iteration where the log without it has come to.

    Args:
        policy: what is stepped.
        requests: their ranks of arrival agree with `arrives_s`.
        limits: of the instance.
        output_tokens: tokens each request generates in all.
        arrives_s: when each request arrives.
        seconds: how long an iteration takes.

    Raises:
        ValueError: as `trace_plans`.
    """
    enters: dict[int, int] = {}
    there: list[Progress] = []
    timed: list[TimedIteration] = []
    for request in sorted(requests, key=lambda request: (request.arrival, request.request_id)):
        at_s = arrives_s[request.request_id]
        later = (i for i, each in enumerate(timed) if each.start_s >= at_s)
        enters[request.request_id] = next(later, len(timed))
        there.append(request)
        log = trace_plans(policy, there, limits, output_tokens, enters_at=enters)
        timed = _clocked(log, [(enters[each.request_id], arrives_s[each.request_id]) for each in there], seconds)
    return timed


def _clocked(
    log: Sequence[Iteration], entries: Sequence[tuple[int, float]], seconds: IterationSeconds
) -> list[TimedIteration]:
    """Times of the iterations: one after the other, and none before a request that it is the first to see."""
    now, timed = 0.0, list[TimedIteration]()
    for step in log:
        now = max([now, *(at_s for index, at_s in entries if index == step.index)])
        end = now + (seconds(step.plan) if step.plan.segments else 0.0)
        timed.append(TimedIteration(step, now, end))
        now = end
    return timed
