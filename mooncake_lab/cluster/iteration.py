"""What a coupled instance reports of its iterations, in the real and in the simulated cluster."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from mooncake_lab.batching import Plan, Progress, Segment
from mooncake_lab.cluster import events
from mooncake_lab.cluster.events import Attempt
from mooncake_lab.core import DecodeStretch


@dataclass(slots=True, kw_only=True, eq=False)
class CoupledRequest:
    """What a coupled instance knows of a request beside its `Progress`. Mutable: tokens are added to it."""

    attempt: Attempt
    shown_tokens: int
    """Tokens of the answer that its client has from earlier attempts."""
    generated_tokens: int
    """Tokens of the answer that its client has, those of the iteration under way left out."""
    output_tokens: int = sys.maxsize
    """Tokens of the whole answer, where they are known; a live engine says when it ends."""
    begun: bool = False
    """Whether some of its prompt has been computed since it was admitted."""
    preempted: bool = False
    """Whether it was preempted before.

    A preempted request may find its own blocks again: that saves computation, and is no hit of the workload.
    """


def iteration_events(
    iteration: DecodeStretch, parts: Sequence[tuple[CoupledRequest, Segment]]
) -> Iterator[events.DecodeStarted | DecodeStretch | events.ChunkDone | events.RequestDone]:
    """What an iteration did, or several of one plan: decodes first, then prompts and the requests that are done.

    Every token of a request that had tokens before counts as a decode, the one after a recomputation as well.

    Args:
        iteration: when and where, without requests.
        parts: the segments of its plan, each with its request.
    """
    at_s, steps, decoded = iteration.at_s, iteration.steps, list[int]()
    for request, segment in parts:
        if segment.emits and request.generated_tokens:
            decoded.append(request.attempt.request_id)
            if request.generated_tokens == request.shown_tokens:  # its first one here
                yield events.DecodeStarted(at_s=at_s, attempt=request.attempt)
    if decoded:
        yield replace(iteration, request_ids=tuple(decoded))
    for request, segment in parts:
        if segment.kind == "prefill":
            computed = segment.new_tokens * steps
            yield events.ChunkDone(
                at_s=at_s,
                attempt=request.attempt,
                instance=iteration.instance,
                start_s=iteration.start_s,
                computed_tokens=computed,
                reused_tokens=0 if request.begun or request.preempted else segment.cached_tokens,
                context_tokens=segment.cached_tokens + computed,
            )
            request.begun = True
        if segment.emits:
            if not request.generated_tokens:
                yield events.DecodeStarted(at_s=at_s, attempt=request.attempt)
            request.generated_tokens += steps
            if request.generated_tokens >= request.output_tokens:
                yield events.RequestDone(at_s=at_s, attempt=request.attempt)


def preemptions(
    plan: Plan, waiting: Sequence[Progress], requests: Mapping[int, CoupledRequest], instance: str, at_s: float
) -> list[events.Preempted]:
    """The requests that a plan takes out of the batch.

    Args:
        plan: of the next iteration.
        waiting: all that wait now.
        requests: by the ids of the plan.
        instance: where they are.
        at_s: when it is planned.
    """
    if not (plan.preempted or plan.swapped):
        return []
    kept = {progress.request_id: progress.cached_tokens for progress in waiting}
    found = list[events.Preempted]()
    for request_id in (*plan.preempted, *plan.swapped):
        request = requests[request_id]
        request.begun, request.preempted = False, True
        tokens = kept[request_id]
        found.append(
            events.Preempted(at_s=at_s, attempt=request.attempt, instance=instance, context_tokens=tokens)
        )
    return found
