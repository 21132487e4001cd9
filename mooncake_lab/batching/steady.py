"""How often a plan repeats, so that a simulator can compute many iterations at once and keep every token."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress


@runtime_checkable
class SteadyPolicy(BatchingPolicy, Protocol):
    """A batching policy that states how often it repeats a plan."""

    def steady_steps(self, plan: Plan, running: Sequence[Progress], limits: Limits) -> int:
        """How many iterations in a row it would plan the same while no request comes or goes.

        Args:
            plan: that it made; every running request has a segment and none was admitted to be prefilled.
            running: the requests of the plan, in its order, with the blocks for this iteration.
            limits: what is left of the instance beside them.
        """
        ...


def steady_while_blocks_last(
    _policy: BatchingPolicy, plan: Plan, running: Sequence[Progress], limits: Limits
) -> int:
    """`SteadyPolicy.steady_steps` of every policy here: until blocks run out, or a prompt comes to its end.

    A waiting request cannot be admitted meanwhile, as the running ones only grow. A plan with several pieces of
    prompts is never taken to repeat.
    """
    pieces = [index for index, segment in enumerate(plan.segments) if segment.kind == "prefill"]
    if not pieces:
        return decode_stretch_steps(running, limits)
    segment, request, block = plan.segments[pieces[0]], running[pieces[0]], limits.block_size_tokens
    if len(pieces) > 1 or segment.emits:
        return 1
    # within a block of its end a prompt may be cut differently, or not at all
    steps = (request.pending_tokens - block) // segment.new_tokens
    decoding = [each for each in running if each is not request]
    if not decoding:
        return steps
    reserved = max(0, -(-request.num_tokens // block) - request.held_blocks)
    left = msgspec.structs.replace(limits, free_blocks=max(0, limits.free_blocks - reserved))
    return min(steps, decode_stretch_steps(decoding, left))


def decode_stretch_steps(decoding: Sequence[Progress], limits: Limits) -> int:
    """Iterations for which the blocks suffice if each of these requests decodes one token in each of them.

    Exact for requests that hold no more than one block ahead, as those of an `Instance` do; else fewer.

    Args:
        decoding: requests of which one token is pending.
        limits: what the instance may spend now.

    Raises:
        ValueError: when there is no request.
    """
    if not decoding:
        raise ValueError("a stretch of decodes needs at least one request")
    # What is left in the blocks of each request is used up first; then all take free blocks in turns.
    block = limits.block_size_tokens
    slack = sorted([min(request.held_blocks * block - request.cached_tokens, block) for request in decoding])
    rounds, last_turn = divmod(limits.free_blocks, len(decoding))
    return rounds * block + slack[last_turn]
