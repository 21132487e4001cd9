"""Steps a policy through requests with arrival times; a model gives the duration of each iteration."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress, queue_order
from mooncake_lab.batching.replay import Iteration, Replay

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

    A request that arrives during an iteration is seen by the next one.

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
    coming = sorted(requests, key=queue_order, reverse=True)
    replay, now_s, timed = Replay(policy, limits, output_tokens), 0.0, list[TimedIteration]()
    while coming or not replay.is_idle:
        if replay.is_idle:  # the clock waits for the next request
            now_s = max(now_s, arrives_s[coming[-1].request_id])
        while coming and arrives_s[coming[-1].request_id] <= now_s:
            replay.instance.enqueue(coming.pop())
        step = replay.step(more_come=False)  # a policy must not wait for requests that have not arrived
        end_s = now_s + (seconds(step.plan) if step.plan.segments else 0.0)
        timed.append(TimedIteration(step, now_s, end_s))
        now_s = end_s
    return timed
