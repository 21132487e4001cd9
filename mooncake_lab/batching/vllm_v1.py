"""vLLM's scheduler since V1: running requests first, prompts cut to fit, blocks taken chunk by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from mooncake_lab.batching.batch_builder import BatchBuilder, require_positive, steady_while_blocks_last
from mooncake_lab.batching.paged_blocks import CountedAllocation
from mooncake_lab.batching.plan import Allocation, Limits, Plan, Progress


def held_blocks(request: Progress, _limits: Limits) -> int:
    """No block is reserved for a request beyond those that it holds."""
    return request.held_blocks


@dataclass(frozen=True, slots=True)
class VLLMToday:
    """Each running request goes on, oldest first; then waiting ones come in, cut to what is left of the tokens.

    Published: vLLM's design documents of V1 (one scheduler for prompts and decodes, automatic prefix caching,
    preemption by recomputation); read off and compared step by step with release 0.32.

    A request has the blocks of its computed tokens, no more. Where one is missing, the newest running request is
    preempted, which may be the one that needs it; such an iteration admits nobody. A waiting request comes in when
    all of its known tokens would fit, but gets the blocks of its first piece. It reuses the leading blocks that
    are complete in the cache, also those that this iteration completes; its last token is always computed.

    Assumptions: the synchronous scheduler, in which an iteration knows the tokens of the one before; no
    speculation; one group of full-attention layers. On blocks that are no `Allocation`, it plans with the prefix
    that each waiting request was shown before the iteration.
    """

    chunk_tokens: int | None = None
    """Tokens of an iteration, decodes included; None takes the instance's limit."""
    watermark: float = 0.0
    """Part of the cache that admissions beside running requests leave free (vLLM's default)."""

    def __post_init__(self) -> None:
        require_positive("VLLMToday.chunk_tokens", self.chunk_tokens)

    reservation = staticmethod(held_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Running requests, then waiting ones, on blocks that are only counted."""
        return self.plan_on(None, waiting, running, limits)

    def plan_on(
        self, blocks: Allocation | None, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits
    ) -> Plan:
        """Running requests, then waiting ones."""
        batch = BatchBuilder(running, limits, self.reservation, self.chunk_tokens)
        blocks = blocks or CountedAllocation(batch.blocks_left, limits.block_size_tokens)
        place = 0
        while place < len(batch.running) and batch.tokens_left:
            request = batch.running[place]
            tokens = min(request.pending_tokens, batch.tokens_left)
            if _make_room(batch, blocks, request, tokens):
                batch.advance(request, tokens)
            place += 1
        for candidate in batch.candidates(waiting):
            request = replace(candidate, cached_tokens=blocks.found_tokens(candidate))
            tokens = min(request.pending_tokens, batch.tokens_left)
            kept_free = int(self.watermark * limits.capacity_blocks) if batch.running else 0
            if not tokens or not blocks.fits(request, kept_free):
                break
            blocks.allocate(request, request.cached_tokens + tokens)
            batch.admit(request, tokens)
        return batch.plan("running requests, then waiting ones, up to the tokens of an iteration")

    def steady_steps(self, plan: Plan, running: Sequence[Progress], limits: Limits) -> int:
        """As of the other policies, but no block is reserved for the rest of a prompt: the decodes may take it."""
        prompts = [request for request in running if not request.decoding]
        missing = sum(-(-each.num_tokens // limits.block_size_tokens) - each.held_blocks for each in prompts)
        if missing > limits.free_blocks:
            return 1
        return steady_while_blocks_last(self, plan, running, limits)


def _make_room(batch: BatchBuilder, blocks: Allocation, request: Progress, tokens: int) -> bool:
    """Give a running request the blocks of its next tokens, preempting the newest; whether it still runs."""
    while not blocks.allocate(request, request.cached_tokens + tokens):
        newest = batch.running.pop()
        blocks.free(newest)
        batch.preempted.append(newest.request_id)
        if newest is request:
            return False
    return True
