"""Chunked prefill beside decodes, as in vLLM with `enable_chunked_prefill`."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.batching.batch_builder import BatchBuilder
from mooncake_lab.batching.blocks import known_blocks
from mooncake_lab.batching.plan import Limits, Plan, Progress, require_positive
from mooncake_lab.batching.steady import steady_while_blocks_last


@dataclass(frozen=True, slots=True)
class VLLMChunked:
    """Decodes first; what is left of the tokens of an iteration goes to prompts, cut to fit.

    Published: vLLM's documentation of chunked prefill (`max_num_batched_tokens`), which adopts Sarathi-Serve.

    Assumptions: as in its first scheduler, blocks for a whole prompt are taken on admission. vLLM demands at
    least as many tokens as places; here fewer tokens mean fewer running requests.
    """

    chunk_tokens: int | None = None
    """Tokens of an iteration, decodes included; None takes the instance's limit."""
    watermark: float = 0.01
    """Part of the cache that admissions leave free (vLLM's default)."""

    def __post_init__(self) -> None:
        require_positive("VLLMChunked.chunk_tokens", self.chunk_tokens)

    steady_steps = steady_while_blocks_last

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Decodes, then pieces of prompts."""
        batch = BatchBuilder(
            running, limits, known_blocks, budget_tokens=self.chunk_tokens, watermark=self.watermark
        )
        batch.make_room()
        batch.decode()
        batch.add_chunked_prefills(waiting)
        return batch.plan("decodes, then pieces of prompts up to the tokens of an iteration")
