"""The schedulers of vLLM over a paged KVCache: prompts first, or chunked prefill beside decodes."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.batching.batch_builder import BatchBuilder
from mooncake_lab.batching.blocks import known_blocks
from mooncake_lab.batching.plan import Limits, Plan, Progress, require_positive
from mooncake_lab.batching.steady import steady_while_blocks_last


@dataclass(frozen=True, slots=True)
class VLLM:
    """Whole prompts whenever one can be admitted, and only otherwise decodes: never both in one iteration.

    Published: Kwon et al., SOSP'23, and vLLM's first scheduler; Algorithm 2 of Sarathi-Serve (OSDI'24). Running
    decodes stall while prompts are computed. Blocks are allocated as requests grow; on shortage the newest request
    is preempted and recomputed (SOSP'23 §4.5).

    Assumptions: prompts are packed, not padded. The block that each running decode needs next is not given to a
    prompt. A recomputation longer than an iteration is cut; vLLM refuses the configurations where that happens.
    """

    watermark: float = 0.01
    """Part of the cache that admissions leave free (vLLM's default)."""

    steady_steps = steady_while_blocks_last

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Prompts if there is room for one, else decodes."""
        batch = BatchBuilder(running, limits, known_blocks, watermark=self.watermark)
        batch.make_room()
        for request in batch.unfinished:
            batch.advance(request, request.pending_tokens)
        batch.add_whole_prefills(waiting)
        if batch.segments:
            return batch.plan("prompts first: decodes stall")
        batch.decode()
        return batch.plan("no prompt can be admitted: decodes only")


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
