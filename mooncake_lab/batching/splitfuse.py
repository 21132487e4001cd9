"""Dynamic SplitFuse, as in DeepSpeed-FastGen."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.batching.batch_builder import BatchBuilder
from mooncake_lab.batching.blocks import known_blocks
from mooncake_lab.batching.plan import Limits, Plan, Progress, require_positive
from mooncake_lab.batching.steady import steady_while_blocks_last


@dataclass(frozen=True, slots=True)
class SplitFuse:
    """Forward passes of one size: long prompts are split, and short ones combined to fill it.

    Published: DeepSpeed-FastGen, arXiv 2401.08671. Throughput is a concave function of the tokens of a pass,
    so equal passes give the most of it.

    Assumptions: a prompt comes in only if the cache holds all of it. Every running request has a token in
    each pass, so there are never more of them than tokens. Where the cache is exhausted, the newest request is
    dropped and recomputed.
    """

    chunk_tokens: int | None = None
    """Tokens of a forward pass; None takes the instance's limit."""

    def __post_init__(self) -> None:
        require_positive("SplitFuse.chunk_tokens", self.chunk_tokens)

    steady_steps = steady_while_blocks_last

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Decodes, then prompts split and composed to exactly the tokens of a pass where enough wait."""
        batch = BatchBuilder(running, limits, known_blocks, budget_tokens=self.chunk_tokens)
        batch.make_room()
        batch.decode()
        batch.add_chunked_prefills(waiting)
        return batch.plan("a pass of constant size: decodes, then prompts split and composed")
