"""Policies that cut prompts, so that decodes continue beside a piece of a prompt (chunked prefill)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mooncake_lab.batching.batch_builder import (
    BatchBuilder,
    known_blocks,
    require_positive,
    smaller,
    steady_while_blocks_last,
    worst_case_blocks,
)
from mooncake_lab.batching.plan import Limits, Plan, Progress


@dataclass(frozen=True, slots=True)
class Sarathi:
    """One chunk of one prompt and all decodes, which share the weights that the chunk reads.

    Published: Agrawal et al., arXiv 2308.16369, §4. Chunk and decodes together make `chunk_tokens` tokens,
    so that the linear operators run at a multiple of the tile.

    Assumptions: the KVCache of a request is reserved for its longest length, as the paper computes B from it.
    The last piece of a prompt stays short and nothing fills the hole it leaves, as it is the one prefill request.
    """

    chunk_tokens: int | None = None
    """Tokens of a fused iteration; None takes the instance's limit, so prompts are whole (its Orca-best)."""
    chunk: Literal["filled", "fixed"] = "filled"
    """Pieces as long as the present decodes leave room for, or always as long as a full batch would leave."""

    def __post_init__(self) -> None:
        require_positive("Sarathi.chunk_tokens", self.chunk_tokens)
        if self.chunk not in {"filled", "fixed"}:
            raise ValueError(f"Sarathi.chunk is {self.chunk!r}; allowed are filled and fixed")

    steady_steps = steady_while_blocks_last
    reservation = staticmethod(worst_case_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """One piece of the oldest unfinished prompt, and every decode."""
        batch = BatchBuilder(running, limits, self.reservation)
        batch.decode()
        piece = self._piece_tokens(len(batch.segments), limits)
        if batch.unfinished:
            batch.advance(batch.unfinished[0], piece)
        else:
            request = next(batch.candidates(waiting), None)
            if request is not None:
                batch.admit(request, piece)
        batch.prompts_first()
        return batch.plan("one piece of one prompt, and all decodes ride along")

    def _piece_tokens(self, decodes: int, limits: Limits) -> int:
        """Prompt tokens beside the decodes.

        Raises:
            ValueError: when a full batch would leave none of a fixed chunk.
        """
        fused = smaller(self.chunk_tokens, limits.max_batch_tokens)
        if self.chunk == "filled":
            return fused - decodes
        if fused < limits.max_requests:
            raise ValueError(
                f"a fixed chunk of {fused} tokens leaves none for a prompt beside"
                f" {limits.max_requests - 1} decodes; allowed are at least as many tokens as requests"
            )
        return fused - (limits.max_requests - 1)


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
    reservation = staticmethod(known_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """All decodes, then pieces of prompts with what they leave of the budget."""
        batch = BatchBuilder(running, limits, self.reservation, watermark=self.watermark)
        batch.make_room()
        batch.decode()
        budget = smaller(self.chunk_tokens, limits.max_batch_tokens)
        batch.tokens_left = min(budget - len(batch.segments), batch.tokens_left)
        batch.add_chunked_prefills(waiting)
        return batch.plan("no decode stalls; prompts take what is left of the budget")


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
    reservation = staticmethod(known_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Decodes, then pieces of prompts."""
        batch = BatchBuilder(running, limits, self.reservation, self.chunk_tokens, self.watermark)
        batch.make_room()
        batch.decode()
        batch.add_chunked_prefills(waiting)
        return batch.plan("decodes, then pieces of prompts up to the tokens of an iteration")


@dataclass(frozen=True, slots=True)
class SplitFuse(VLLMChunked):
    """Forward passes of one size: long prompts are split, and short ones combined to fill it.

    Published: DeepSpeed-FastGen, arXiv 2401.08671. Throughput is a concave function of the tokens of a pass,
    so equal passes give the most of it.

    Assumptions: a prompt comes in only if the cache holds all of it. Every running request has a token in
    each pass, so there are never more of them than tokens. Where the cache is exhausted, the newest request is
    dropped and recomputed. The plans are those of vLLM's chunked prefill without a watermark.
    """

    watermark: float = 0.0
