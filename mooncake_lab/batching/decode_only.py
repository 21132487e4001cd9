"""The policy of a decode instance: continuous batching over KVCache that other instances computed."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.batching.batch_builder import BatchBuilder
from mooncake_lab.batching.blocks import known_blocks
from mooncake_lab.batching.plan import Limits, Plan, Progress
from mooncake_lab.batching.steady import steady_while_blocks_last


@dataclass(frozen=True, slots=True)
class DecodeOnly:
    """Every request whose KVCache has arrived joins at once and advances by one token per iteration.

    Published: Mooncake, FAST'25 §3 (decode pool, continuous batching).

    Assumptions: on shortage of blocks the newest request is swapped out, as this instance has no prefill to
    recompute it with. A waiting request whose KVCache is not here yet is passed over.
    """

    watermark: float = 0.0
    """Part of the cache that admissions leave free."""

    steady_steps = steady_while_blocks_last

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """All decodes, old and new."""
        batch = BatchBuilder(running, limits, known_blocks, watermark=self.watermark)
        batch.swap_out()
        batch.decode()
        for request in batch.candidates([request for request in waiting if request.decoding]):
            if not batch.admit(request, 1):
                break
        return batch.plan("decodes only")
