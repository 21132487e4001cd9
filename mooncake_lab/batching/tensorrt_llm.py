"""In-flight batching, as in TensorRT-LLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mooncake_lab.batching.batch_builder import BatchBuilder, smaller
from mooncake_lab.batching.blocks import known_blocks, worst_case_blocks
from mooncake_lab.batching.plan import Limits, Plan, Progress, require_positive
from mooncake_lab.batching.steady import steady_while_blocks_last


@dataclass(frozen=True, slots=True)
class TensorRTLLM:
    """Generation keeps its tokens, prompts take what is left of an iteration, whole or in chunks.

    Published: TensorRT-LLM's documentation of in-flight batching, `max_num_tokens`, chunked context and the
    capacity scheduler policies. Prompts are packed before generation.

    Assumptions: a paused request is recomputed. Chunks are whole KVCache blocks but for the last of a prompt, and
    for tokens of an iteration that are fewer than a block.
    """

    capacity: Literal["max_utilization", "guaranteed_no_evict"] = "guaranteed_no_evict"
    """Admit what fits now and pause the newest on shortage, or admit only what fits in the worst case."""
    chunk_tokens: int | None = None
    """Tokens of an iteration with chunked context; None computes prompts whole."""

    def __post_init__(self) -> None:
        if self.capacity not in {"max_utilization", "guaranteed_no_evict"}:
            raise ValueError(
                f"TensorRTLLM.capacity is {self.capacity!r}; allowed are max_utilization and guaranteed_no_evict"
            )
        require_positive("TensorRTLLM.chunk_tokens", self.chunk_tokens)

    steady_steps = steady_while_blocks_last

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Generation first in the budget, prompts first in the packed batch."""
        pauses = self.capacity == "max_utilization"
        reservation = known_blocks if pauses else worst_case_blocks
        budget = smaller(self.chunk_tokens, limits.max_batch_tokens)
        batch = BatchBuilder(running, limits, reservation, budget_tokens=budget)
        if pauses:
            batch.make_room()
        batch.decode()
        # A prompt that has begun and gets no tokens is not overtaken.
        if all(batch.advance(request, _piece(request, batch, budget)) for request in batch.unfinished):
            self._admit(waiting, batch, budget)
        batch.prompts_first()
        return batch.plan(f"generation, then prompts ({self.capacity})")

    def _admit(self, waiting: Sequence[Progress], batch: BatchBuilder, budget: int) -> None:
        """Prompts while tokens last: whole ones, or pieces."""
        if self.chunk_tokens is None:
            batch.add_whole_prefills(waiting)
            return
        for request in batch.candidates(waiting):
            if not batch.admit(request, _piece(request, batch, budget)):
                return


def _piece(request: Progress, batch: BatchBuilder, budget: int) -> int:
    """All that is pending where it fits, else whole blocks of it."""
    block = batch.limits.block_size_tokens
    if request.pending_tokens <= batch.tokens_left or budget < block:
        return request.pending_tokens
    return batch.tokens_left // block * block
