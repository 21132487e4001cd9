"""Policies that compute a prompt whole: request-level batching, Orca, TensorRT-LLM, and vLLM's first scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_lab.batching.batch_builder import (
    BatchBuilder,
    known_blocks,
    require_positive,
    steady_while_blocks_last,
    worst_case_blocks,
)
from mooncake_lab.batching.plan import Limits, Plan, Progress


@dataclass(frozen=True, slots=True)
class RequestLevel:
    """A batch prefills together, decodes until all are done, and only then the next one comes in.

    Published: NVIDIA FasterTransformer behind Triton; Algorithm 1 of Sarathi-Serve (OSDI'24), the baseline
    of Orca (OSDI'22), and what SARATHI calls Orca-worst.

    Assumptions: the KVCache is static, so each request reserves its longest length. Prompts are packed; the
    original pads them to the longest. The place of a finished request stays empty until the batch is drained.
    """

    steady_steps = steady_while_blocks_last
    reservation = staticmethod(worst_case_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Decode the batch, or admit the next one where none is left."""
        batch = BatchBuilder(running, limits, self.reservation)
        if not batch.running:
            batch.add_whole_prefills(waiting)
            return batch.plan("no batch: admit the next")
        for request in batch.unfinished:
            batch.advance(request, request.pending_tokens)
        if not batch.unfinished:
            batch.decode()
        return batch.plan("the batch runs until all its requests are done")


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
    reservation = staticmethod(worst_case_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """All running requests, then whole prompts while places, slots and tokens last."""
        batch = BatchBuilder(running, limits, self.reservation)
        for request in batch.running:
            batch.advance(request, batch.tokens_left)
        batch.add_whole_prefills(waiting, at_most=self.max_prefills)
        return batch.plan("first come, first served; whole prompts beside decodes")


@dataclass(frozen=True, slots=True)
class TensorRTLLM:
    """Generation keeps its tokens, and whole prompts take what is left of an iteration; they are packed first.

    Published: TensorRT-LLM's documentation of in-flight batching, `max_num_tokens` and its default capacity policy
    `GUARANTEED_NO_EVICT`, which admits only what fits in the worst case. Chunked context is not built here.
    """

    steady_steps = steady_while_blocks_last
    reservation = staticmethod(worst_case_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Generation first in the budget, prompts first in the packed batch."""
        batch = BatchBuilder(running, limits, self.reservation)
        batch.decode()
        # A prompt that has begun and gets no tokens is not overtaken.
        if all(batch.advance(request, request.pending_tokens) for request in batch.unfinished):
            batch.add_whole_prefills(waiting)
        batch.prompts_first()
        return batch.plan("generation, then prompts (guaranteed_no_evict)")


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
    reservation = staticmethod(known_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Prompts if there is room for one, else decodes."""
        batch = BatchBuilder(running, limits, self.reservation, watermark=self.watermark)
        batch.make_room()
        for request in batch.unfinished:
            batch.advance(request, request.pending_tokens)
        batch.add_whole_prefills(waiting)
        if batch.segments:
            return batch.plan("prompts first: decodes stall")
        batch.decode()
        return batch.plan("no prompt can be admitted: decodes only")
