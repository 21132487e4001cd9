"""The policies of prefill instances and of decode instances: prompts alone, and decodes alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.batching.batch_builder import (
    BatchBuilder,
    known_blocks,
    require_positive,
    steady_while_blocks_last,
)
from mooncake_lab.batching.plan import Limits, Plan, Progress


@dataclass(frozen=True, slots=True)
class PrefillOnly:
    """Prompts first come, first served; a request is done here with its first token, then its blocks move on.

    Published: Mooncake, FAST'25 §3 (prefill pool; chunked above a threshold, `prefill_chunk`).

    Assumptions: short prompts share an iteration and the last is cut to its tokens. A request whose first token is
    out is no longer planned; it holds its blocks until they have moved.
    """

    chunk_tokens: int | None = None
    """Tokens of an iteration, to which the last prompt is cut; None takes the instance's limit."""
    max_batch_tokens: int | None = None
    """Tokens up to which another prompt joins an iteration; one that would exceed them waits, and is then computed
    alone if it is longer. 1 computes one prompt at a time; None only cuts."""

    def __post_init__(self) -> None:
        require_positive("PrefillOnly.chunk_tokens", self.chunk_tokens)
        require_positive("PrefillOnly.max_batch_tokens", self.max_batch_tokens)

    steady_steps = steady_while_blocks_last
    reservation = staticmethod(known_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Pieces of prompts up to the tokens of an iteration."""
        prefilling = [request for request in running if not request.decoding]
        batch = BatchBuilder(prefilling, limits, self.reservation, self.chunk_tokens)
        tokens = sum([batch.advance(request, request.pending_tokens) for request in batch.running])
        for request in batch.candidates(waiting, grows=False):
            tokens += request.pending_tokens
            full = self.max_batch_tokens is not None and tokens > self.max_batch_tokens
            if (full and batch.segments) or not batch.admit(request, request.pending_tokens):
                break
        return batch.plan("prompts, first come, first served")


@dataclass(frozen=True, slots=True)
class DecodeOnly:
    """Every request whose KVCache has arrived joins at once and advances by one token per iteration.

    Published: Mooncake, FAST'25 §3 (decode pool, continuous batching).

    Assumptions: on shortage of blocks the newest request is swapped out, as this instance has no prefill to
    recompute it with. A waiting request whose KVCache is not here yet is passed over.
    """

    steady_steps = steady_while_blocks_last
    reservation = staticmethod(known_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """All decodes, old and new."""
        batch = BatchBuilder(running, limits, self.reservation)
        batch.make_room(swap=True)
        batch.decode()
        for request in batch.candidates([request for request in waiting if request.decoding]):
            if not batch.admit(request, 1):
                break
        return batch.plan("decodes only")
