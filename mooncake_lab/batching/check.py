"""The rules that the plans of every policy must keep."""

from collections.abc import Mapping, Sequence

from mooncake_lab.batching.plan import Limits, Plan, Progress, Segment


def check_plan(plan: Plan, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> None:
    """Check that an instance could act on a plan.

    Raises:
        ValueError: saying which request, and what is allowed, when a segment does not continue its request; a
            request is decided twice; or tokens, places or KVCache blocks are overspent.
    """
    inside = {request.request_id: request for request in running}
    known = {request.request_id: request for request in waiting} | inside
    _check_decided_once(plan, known, inside)
    for segment in plan.segments:
        _check_segment(segment, known[segment.request_id])
    if plan.new_tokens > limits.max_batch_tokens:
        raise ValueError(f"the plan computes {plan.new_tokens} tokens; allowed are {limits.max_batch_tokens}")
    gone = {*plan.preempted, *plan.swapped, *(refusal.request_id for refusal in plan.rejected)}
    places = len((inside.keys() - gone) | {segment.request_id for segment in plan.segments})
    if places > limits.max_requests:
        raise ValueError(f"the plan leaves {places} requests running; allowed are {limits.max_requests}")
    _check_blocks(plan, known, limits, [inside[request_id] for request_id in gone & inside.keys()])


def _check_decided_once(plan: Plan, known: Mapping[int, Progress], inside: Mapping[int, Progress]) -> None:
    """Every request of the plan is known and decided once; only running ones can be pushed out."""
    pushed_out = [*plan.preempted, *plan.swapped]
    decided = [segment.request_id for segment in plan.segments] + pushed_out
    decided += [refusal.request_id for refusal in plan.rejected]
    for request_id in decided:
        if request_id not in known:
            raise ValueError(f"the plan names request {request_id}, which is neither waiting nor running")
    if len(set(decided)) < len(decided):
        twice = next(request_id for request_id in decided if decided.count(request_id) > 1)
        raise ValueError(f"the plan decides twice about request {twice}; once is allowed")
    for request_id in pushed_out:
        if request_id not in inside:
            raise ValueError(f"the plan preempts request {request_id}, which does not run")


def _check_segment(segment: Segment, request: Progress) -> None:
    """A segment starts where its request stands, and goes no further than what is known."""
    pending = request.pending_tokens
    if not 1 <= segment.new_tokens <= pending:
        raise ValueError(
            f"the plan computes {segment.new_tokens} tokens of request {request.request_id};"
            f" allowed are 1 to {pending}"
        )
    kind = "decode" if request.decoding else "prefill"
    expected = Segment(
        request.request_id, kind, segment.new_tokens, request.cached_tokens, segment.new_tokens == pending
    )
    if segment != expected:
        raise ValueError(f"the plan holds {segment} for request {request.request_id}; allowed is {expected}")


def _check_blocks(
    plan: Plan, known: Mapping[int, Progress], limits: Limits, pushed_out: Sequence[Progress]
) -> None:
    """The new tokens fit into the blocks that are free, and those that the pushed out give back."""
    free = limits.free_blocks + sum(request.held_blocks - request.shared_blocks for request in pushed_out)
    needed = 0
    for segment in plan.segments:
        after = -(-(segment.cached_tokens + segment.new_tokens) // limits.block_size_tokens)
        needed += max(after - known[segment.request_id].held_blocks, 0)
    if needed > free:
        raise ValueError(f"the plan needs {needed} more KVCache blocks; {free} are free")
