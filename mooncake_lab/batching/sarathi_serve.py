"""Stall-free batching, as in Sarathi-Serve."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.batching.batch_builder import BatchBuilder, smaller
from mooncake_lab.batching.blocks import known_blocks
from mooncake_lab.batching.plan import Limits, Plan, Progress, require_positive
from mooncake_lab.batching.steady import steady_while_blocks_last


@dataclass(frozen=True, slots=True)
class SarathiServe:
    """Every decode, then unfinished prompts, then new ones, up to a budget that keeps TBT within its SLO.

    Published: Agrawal et al., OSDI'24, §4, Algorithm 3; cleaned of its slips, as printed it loses requests
    that it admits. No decode ever waits for a prompt.

    Assumptions: decodes count against the budget and may exceed it. Blocks for a whole prompt are taken on
    admission; on shortage the newest request is preempted and recomputed, as in its code base.
    """

    chunk_tokens: int | None = None
    """The token budget τ of an iteration; None takes the instance's limit."""
    watermark: float = 0.01
    """Part of the cache that admissions leave free, as in the vLLM code it builds on."""

    def __post_init__(self) -> None:
        require_positive("SarathiServe.chunk_tokens", self.chunk_tokens)

    steady_steps = steady_while_blocks_last

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """All decodes, then pieces of prompts with what they leave of the budget."""
        batch = BatchBuilder(running, limits, known_blocks, watermark=self.watermark)
        batch.make_room()
        batch.decode()
        budget = smaller(self.chunk_tokens, limits.max_batch_tokens)
        batch.tokens_left = min(budget - len(batch.segments), batch.tokens_left)
        batch.add_chunked_prefills(waiting)
        return batch.plan("no decode stalls; prompts take what is left of the budget")
