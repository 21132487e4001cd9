"""Request-level batching, as in FasterTransformer."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.batching.batch_builder import BatchBuilder
from mooncake_lab.batching.blocks import worst_case_blocks
from mooncake_lab.batching.plan import Limits, Plan, Progress
from mooncake_lab.batching.steady import steady_while_blocks_last


@dataclass(frozen=True, slots=True)
class RequestLevel:
    """A batch prefills together, decodes until all are done, and only then the next one comes in.

    Published: NVIDIA FasterTransformer behind Triton; Algorithm 1 of Sarathi-Serve (OSDI'24), the baseline
    of Orca (OSDI'22), and what SARATHI calls Orca-worst.

    Assumptions: the KVCache is static, so each request reserves its longest length. Prompts are packed; the
    original pads them to the longest, which `padding_waste` counts. The place of a finished request stays
    empty until the batch is drained, which `tail_waste` counts.
    """

    steady_steps = steady_while_blocks_last

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Decode the batch, or admit the next one where none is left."""
        batch = BatchBuilder(running, limits, worst_case_blocks)
        if not batch.running:
            batch.add_whole_prefills(waiting)
            return batch.plan("no batch: admit the next")
        for request in batch.unfinished:
            batch.advance(request, request.pending_tokens)
        if not batch.unfinished:
            batch.decode()
        return batch.plan("the batch runs until all its requests are done")
