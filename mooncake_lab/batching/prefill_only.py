"""The policy of a prefill instance: prompts, and no decodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mooncake_lab.batching.batch_builder import BatchBuilder
from mooncake_lab.batching.blocks import known_blocks, refusal
from mooncake_lab.batching.plan import Limits, Plan, Progress, Refusal, require_positive
from mooncake_lab.batching.steady import steady_while_blocks_last


@dataclass(frozen=True, slots=True)
class PrefillOnly:
    """Prompts first come, first served; a request is done here with its first token, then its blocks move on.

    Published: Mooncake, FAST'25 §3 (prefill pool; chunked above a threshold, `prefill_chunk`).

    Assumptions: short prompts share an iteration and the last is cut to its tokens. A request whose first token is
    out is no longer planned; it holds its blocks until they have moved.
    """

    chunk_tokens: int | None = None
    """Tokens of an iteration; None takes the instance's limit."""

    def __post_init__(self) -> None:
        require_positive("PrefillOnly.chunk_tokens", self.chunk_tokens)

    steady_steps = steady_while_blocks_last

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Pieces of prompts up to the tokens of an iteration."""
        prefilling = [request for request in running if not request.decoding]
        batch = BatchBuilder(prefilling, limits, known_blocks, budget_tokens=self.chunk_tokens)
        for request in batch.running:
            batch.advance(request, request.pending_tokens)
        for request in batch.candidates(waiting, refuse=_refusal):
            if not batch.admit(request, request.pending_tokens):
                break
        return batch.plan("prompts, first come, first served")


def _refusal(request: Progress, limits: Limits) -> Refusal | None:
    """Only what is known must fit: the tokens to come are generated elsewhere."""
    return refusal(msgspec.structs.replace(request, max_new_tokens=None), limits)
