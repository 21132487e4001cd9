"""Iteration-level scheduling with selective batching, as in Orca."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.batching.batch_builder import BatchBuilder
from mooncake_lab.batching.blocks import worst_case_blocks
from mooncake_lab.batching.plan import Limits, Plan, Progress, require_positive
from mooncake_lab.batching.steady import steady_while_blocks_last


@dataclass(frozen=True, slots=True)
class Orca:
    """Each iteration takes requests in order of arrival: one token of those that run, whole prompts of new ones.

    Published: Yu et al., OSDI'22, §4.2, Algorithm 1. A new request reserves slots for its longest length; where
    they do not fit, the queue behind it waits too.

    Assumptions: a batch whose prompts exceed the instance's tokens per iteration is closed early, as Orca states
    no such limit. With a pipeline of several batches in flight, each is planned with its own share of the cache.
    """

    max_prefills: int | None = None
    """New prompts per iteration; 1 is SARATHI's Orca-best (§5), None is Orca."""

    def __post_init__(self) -> None:
        require_positive("Orca.max_prefills", self.max_prefills)

    steady_steps = steady_while_blocks_last

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """All running requests, then whole prompts while places, slots and tokens last."""
        batch = BatchBuilder(running, limits, worst_case_blocks)
        for request in batch.running:
            batch.advance(request, batch.tokens_left)
        batch.add_whole_prefills(waiting, at_most=self.max_prefills)
        return batch.plan("first come, first served; whole prompts beside decodes")
