"""What every policy counts while it builds a plan: tokens and places of the iteration, and KVCache blocks.

And how often such a plan repeats, so that a simulator can compute many iterations at once and keep every token.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress, Refusal, Segment

Reservation: TypeAlias = Callable[[Progress, Limits], int]
"""Blocks that a running request may count on; blocks reserved for one are not given to another."""


def known_blocks(request: Progress, limits: Limits) -> int:
    """Blocks for the tokens that exist: the whole prompt at once, then block by block (paged allocation).

    Nothing is reserved for tokens to come, so a cache may run short and a request must be preempted.
    """
    return -(-(request.prompt_tokens + request.generated_tokens) // limits.block_size_tokens)


def worst_case_blocks(request: Progress, limits: Limits) -> int:
    """Blocks for the longest the request may become (Orca's slots, FasterTransformer's static cache).

    No request is ever preempted. Where neither the client nor the model states a limit, that is the whole cache.
    """
    block = limits.block_size_tokens
    tokens = limits.capacity_blocks * block
    context_tokens, cap = limits.max_request_tokens, request.max_new_tokens
    if context_tokens is not None and context_tokens < tokens:
        tokens = context_tokens
    # The last token is never read again, so its keys and values are never written.
    if cap is not None and request.prompt_tokens + cap - 1 < tokens:
        tokens = request.prompt_tokens + cap - 1
    known = request.prompt_tokens + request.generated_tokens
    return -(-(max(known, tokens)) // block)


def refusal(request: Progress, limits: Limits, *, at_once: bool = False, grows: bool = True) -> Refusal | None:
    """Why no iteration can ever finish this request, or None where one may.

    Args:
        request: running or waiting.
        limits: of the instance.
        at_once: whether a prompt is never cut, so that what is pending of it must fit into one iteration.
        grows: whether the tokens that its client allows are generated here.
    """
    context_tokens, capacity_tokens = limits.max_request_tokens, limits.capacity_blocks * limits.block_size_tokens
    longest = request.num_tokens
    if grows and request.max_new_tokens is not None:
        stated = request.prompt_tokens + request.max_new_tokens - 1
        longest = max(longest, stated if context_tokens is None else min(stated, context_tokens))
    if at_once and not request.generated_tokens and request.pending_tokens > limits.max_batch_tokens:
        reason = (
            f"{request.pending_tokens} tokens of its prompt have to be computed at once;"
            f" an iteration computes at most {limits.max_batch_tokens}"
        )
    elif context_tokens is not None and request.prompt_tokens > context_tokens:
        reason = f"a prompt of {request.prompt_tokens} tokens; the model's context length is {context_tokens}"
    elif longest > capacity_tokens:
        reason = (
            f"it needs {longest} tokens of KVCache ({request.prompt_tokens} of them its prompt);"
            f" the whole cache holds {capacity_tokens}"
        )
    else:
        return None
    return Refusal(request.request_id, reason)


class BatchBuilder:
    """A plan under construction, so that a policy is only its order of service. Mutable: a policy adds to it.

    Args:
        running: requests with a place, in order of service.
        limits: what the instance may spend.
        reservation: blocks that a running request may count on.
        budget_tokens: tokens of an iteration, where the policy wants fewer than the limits allow.
        watermark: part of the KVCache that admissions leave free, so that growth does not preempt at once.

    Raises:
        ValueError: when a running request has nothing to compute.
    """

    def __init__(
        self,
        running: Sequence[Progress],
        limits: Limits,
        reservation: Reservation,
        budget_tokens: int | None = None,
        watermark: float = 0.0,
    ) -> None:
        self.limits = limits
        self.reservation = reservation
        self.tokens_left = smaller(budget_tokens, limits.max_batch_tokens)
        self.watermark_blocks = int(watermark * limits.capacity_blocks)
        self.blocks_left = limits.free_blocks
        self.running: list[Progress] = []
        self.unfinished: list[Progress] = []
        """Those of `running` whose prompt, or recomputation, is not complete."""
        self.segments: list[Segment] = []
        self.preempted: list[int] = []
        self.swapped: list[int] = []
        self.rejected: list[Refusal] = []
        capacity_tokens = limits.capacity_blocks * limits.block_size_tokens
        for request in running:
            known = request.prompt_tokens + request.generated_tokens
            if request.cached_tokens >= known:
                raise ValueError(
                    f"running request {request.request_id} has all its {known} known tokens in the KVCache;"
                    " the one generated last must still be pending"
                )
            outgrown = refusal(request, limits, grows=False) if known > capacity_tokens else None
            if outgrown is not None:
                self.rejected.append(outgrown)
                self.blocks_left += request.held_blocks - request.shared_blocks
                continue
            missing = reservation(request, limits) - request.held_blocks
            if missing > 0:
                self.blocks_left -= missing
            self.running.append(request)
            if known - request.cached_tokens > 1 or not request.generated_tokens:
                self.unfinished.append(request)

    def make_room(self, *, swap: bool = False) -> None:
        """Preempt the newest until the others have their reserved blocks.

        Its tokens are computed again; with `swap`, its blocks are kept elsewhere and come back.
        """
        evicted = self.swapped if swap else self.preempted
        # The oldest always stays: alone it fits, or it would have been refused.
        while self.blocks_left < 0 and len(self.running) > 1:
            victim = self.running.pop()
            if self.unfinished and self.unfinished[-1] is victim:
                self.unfinished.pop()
            missing = self.reservation(victim, self.limits) - victim.held_blocks
            self.blocks_left += max(missing, 0) + victim.held_blocks - victim.shared_blocks
            evicted.append(victim.request_id)
        if self.blocks_left < 0:
            # What it needs are blocks that the evicted shared; they count as free from the next iteration on.
            self.tokens_left = 0

    def advance(self, request: Progress, tokens: int) -> int:
        """Give a running request up to `tokens` new tokens; how many it got."""
        pending = request.prompt_tokens + request.generated_tokens - request.cached_tokens
        new = max(min(pending, tokens, self.tokens_left), 0)
        if new > 0:
            kind = "decode" if pending == 1 and request.generated_tokens else "prefill"
            self.segments.append(Segment(request.request_id, kind, new, request.cached_tokens, new == pending))
            self.tokens_left -= new
        return new

    def decode(self) -> None:
        """Advance every running decode by its one token, oldest first."""
        # The hottest loop of a simulation: no call per request.
        segments, room = self.segments, len(self.segments) + self.tokens_left
        for request in self.running:
            cached = request.cached_tokens
            if request.generated_tokens and request.prompt_tokens + request.generated_tokens - cached == 1:
                if len(segments) == room:
                    break
                segments.append(Segment(request.request_id, "decode", 1, cached, emits=True))
        self.tokens_left = room - len(segments)

    def candidates(
        self, waiting: Sequence[Progress], *, at_once: bool = False, grows: bool = True
    ) -> Iterator[Progress]:
        """Waiting requests that could be admitted, first come, first served: it stops at the first that cannot.

        Those that can never be served are refused on the way; see `refusal`. An iteration that preempts admits no
        request: the preempted one is older than all that wait, and would be overtaken. Neither does one that
        refuses a running request: a candidate may count blocks as held that it shares with that request.
        """
        if self.preempted or self.swapped or self.rejected:
            return
        for request in waiting:
            if len(self.running) >= self.limits.max_requests:
                return
            refused = refusal(request, self.limits, at_once=at_once, grows=grows)
            if refused is not None:
                self.rejected.append(refused)
                continue
            kept_free = self.watermark_blocks if self.running else 0
            if self._missing(request) > self.blocks_left - kept_free:
                return
            yield request

    def admit(self, request: Progress, tokens: int) -> int:
        """Give a candidate a place, its blocks and its first tokens; 0, and no place, where no token is left."""
        new = self.advance(request, tokens)
        if new:
            self.blocks_left -= self._missing(request)
            self.running.append(request)
        return new

    def _missing(self, request: Progress) -> int:
        return max(self.reservation(request, self.limits) - request.held_blocks, 0)

    def add_chunked_prefills(self, waiting: Sequence[Progress]) -> None:
        """Spend the tokens left on prompts, oldest first, cutting the last one to what is left."""
        for request in self.unfinished:
            self.advance(request, request.pending_tokens)
        for request in self.candidates(waiting):
            if not self.admit(request, request.pending_tokens):
                return

    def add_whole_prefills(self, waiting: Sequence[Progress], at_most: int | None = None) -> None:
        """Spend the tokens left on `at_most` new prompts, oldest first, none of them cut.

        A recomputation can be longer than an iteration; it then comes first and is cut, as it cannot be refused.
        """
        for admitted, request in enumerate(self.candidates(waiting, at_once=True)):
            resumed_alone = request.generated_tokens > 0 and not self.segments
            if admitted == at_most or (request.pending_tokens > self.tokens_left and not resumed_alone):
                return
            self.admit(request, request.pending_tokens)

    def prompts_first(self) -> None:
        """Pack prompt pieces before decodes."""
        self.segments.sort(key=lambda segment: segment.kind == "decode")

    def plan(self, reason: str) -> Plan:
        """The finished plan."""
        return Plan(
            segments=tuple(self.segments),
            preempted=tuple(self.preempted),
            swapped=tuple(self.swapped),
            rejected=tuple(self.rejected),
            reason=reason,
        )


def smaller(knob: int | None, limit: int) -> int:
    """The knob where it is set, but never more than the limit."""
    return limit if knob is None else min(knob, limit)


def require_positive(knob: str, value: int | None) -> None:
    """Refuse a policy's knob that is set and below 1.

    Raises:
        ValueError: naming the knob.
    """
    if value is not None and value < 1:
        raise ValueError(f"{knob} is {value}; at least 1 is needed, or None for no limit beyond the instance's")


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
