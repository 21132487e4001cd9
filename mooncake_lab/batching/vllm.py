"""Prefill-first batching over a paged KVCache, as in vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.batching.batch_builder import BatchBuilder
from mooncake_lab.batching.blocks import known_blocks
from mooncake_lab.batching.plan import Limits, Plan, Progress
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
