"""A workload of equal requests in the steady state: what a round takes, with and without piggybacking.

SARATHI (arXiv 2308.16369) measures batches in which all prompts are equally long and so are all outputs. Then a
round, in which every place of the batch serves one request, is integer arithmetic: the sums below, no simulation.
Decodes are counted in steps; the first output token comes out of the prefill.
"""

from dataclasses import dataclass
from math import ceil

from mooncake_lab.perf.iteration import IterationCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Equal requests in a batch of fixed size.

    Raises:
        ValueError: when a number is below 1.
    """

    prompt_tokens: int
    decode_steps: int
    batch: int

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.decode_steps, self.batch) < 1:
            raise ValueError(f"{self} has a number below 1")

    @classmethod
    def of_length(cls, total_tokens: int, ratio: float, batch: int) -> "Workload":
        """Requests of `total_tokens` tokens each, with `ratio` prompt tokens for every decode (P:D)."""
        steps = min(max(round(total_tokens / (1 + ratio)), 1), total_tokens - 1)
        return cls(prompt_tokens=total_tokens - steps, decode_steps=steps, batch=batch)

    @classmethod
    def balanced(cls, total_tokens: int, fused_tokens: int, batch: int) -> "Workload":
        """Requests of `total_tokens` tokens each at the balanced P:D ratio.

        Where C divides `total_tokens`, the prompt is a whole number of chunks.

        Raises:
            ValueError: when the ratio has no balance.
        """
        return cls.of_length(total_tokens, balanced_ratio(fused_tokens, batch), batch)

    @property
    def tokens(self) -> int:
        """Tokens computed in a round."""
        return self.batch * (self.prompt_tokens + self.decode_steps)

    @property
    def mean_context_tokens(self) -> float:
        """Cached tokens that a decode attends to, on average over the output."""
        return self.prompt_tokens + (self.decode_steps + 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of one round by what they are spent on, and its iterations by kind."""

    linear_s: float
    chunk_attention_s: float
    decode_attention_s: float
    hybrid_iterations: int
    """Those that carry a piece of a prompt."""
    decode_iterations: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.linear_s + self.chunk_attention_s + self.decode_attention_s


def balanced_ratio(fused_tokens: int, batch: int) -> float:
    """The P:D ratio at which chunks and decodes run out together: `(C - (B-1)) / (B-1)` (SARATHI §4.3, corrected).

    The text prints `C / (B-1)`; the chunk, however, is what the B-1 decodes leave of the C tokens.

    Raises:
        ValueError: when the batch has no decode beside the chunk, or the decodes leave no chunk.
    """
    if batch < 2 or fused_tokens < batch:
        raise ValueError(f"{fused_tokens} tokens with a batch of {batch} have no balance; 2 <= batch <= tokens")
    return (fused_tokens - (batch - 1)) / (batch - 1)


def separate_round(cost: IterationCost, work: Workload) -> Round:
    """The baseline: all prompts of the batch in one iteration, then every decode step of the full batch."""
    prompts, steps, batch = work.prompt_tokens, work.decode_steps, work.batch
    return Round(
        linear_s=cost.linear.seconds(batch * prompts) + steps * cost.linear.seconds(batch),
        chunk_attention_s=batch * cost.chunk_attention_s(prompts),
        decode_attention_s=steps * cost.decode_attention_s(batch * work.mean_context_tokens),
        hybrid_iterations=1,
        decode_iterations=steps,
    )


def piggyback_round(
    cost: IterationCost, work: Workload, fused_tokens: int | None = None, *, filled: bool = False
) -> Round:
    """SARATHI in the steady state: chunks of one prompt at a time, up to B-1 decodes beside each (§4.3).

    Args:
        cost: of an iteration.
        work: the requests.
        fused_tokens: chunk and full decodes together; None never cuts a prompt, the paper's Orca-best.
        filled: whether chunks grow where decodes are fewer; else they are always C - (B-1), as the paper has it.

    Raises:
        ValueError: when the decodes of the batch leave no room for a chunk.
    """
    prompt, steps, batch = work.prompt_tokens, work.decode_steps, work.batch
    riders = batch - 1
    pieces, chunk = _pieces(work, fused_tokens, filled=filled)
    alone = max(steps - riders * pieces, 0)
    beside = min(steps / pieces, riders)  # decodes an iteration, on average over the round
    sizes = [chunk] * (pieces - 1) + [prompt - chunk * (pieces - 1)]
    linear_s = batch * sum(cost.linear.seconds(size + beside) for size in sizes)
    attention_s = batch * sum(cost.chunk_attention_s(size, index * chunk) for index, size in enumerate(sizes))
    return Round(
        linear_s=linear_s + alone * cost.linear.seconds(batch),
        chunk_attention_s=attention_s,
        decode_attention_s=cost.decode_attention_s(batch * steps * work.mean_context_tokens)
        + batch * pieces * (cost.beside_s if beside else 0.0),
        hybrid_iterations=batch * pieces,
        decode_iterations=alone,
    )


def _pieces(work: Workload, fused_tokens: int | None, *, filled: bool) -> tuple[int, float]:
    """Pieces of a prompt, and the tokens of each but the last."""
    riders = work.batch - 1
    if fused_tokens is None:
        return 1, work.prompt_tokens
    chunk = fused_tokens - riders
    if chunk < 1:
        raise ValueError(
            f"{fused_tokens} tokens leave no chunk beside {riders} decodes; at least {work.batch} are needed"
        )
    fixed = ceil(work.prompt_tokens / chunk)
    pieces = ceil((work.prompt_tokens + work.decode_steps) / fused_tokens) if filled else fixed
    if filled and work.decode_steps <= riders * min(pieces, fixed):  # seats stay empty, so chunks can grow
        return pieces, fused_tokens - work.decode_steps / pieces
    return fixed, chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAccounts:
    """Seconds of one decode token, alone and beside a chunk, by three ways to share what both use."""

    alone_s: float
    """In a batch of nothing but decodes."""
    marginal_s: float
    """The paper's account (Table 2): everything the chunk would have paid anyway is the chunk's."""
    by_token_s: float
    """Each token pays the same for the matrices that all share; each decode pays for its own attention."""
    by_order_s: float
    """Shapley value: the mean of its cost when added to the chunk, and of its cost before the chunk is added."""


def decode_accounts(
    cost: IterationCost, *, fused_tokens: int, batch: int, context_tokens: float, start_tokens: float = 0
) -> DecodeAccounts:
    """What a decode costs beside a chunk, the width of the iteration being the same with and without decodes.

    Args:
        cost: of an iteration.
        fused_tokens: chunk and decodes together.
        batch: of the decode-only iteration; one fewer decodes ride on the chunk.
        context_tokens: of each decode.
        start_tokens: of the chunk's prompt, before it.
    """
    riders = batch - 1
    chunk = fused_tokens - riders
    mixed_s = cost.step_s(chunk, start_tokens, riders, riders * context_tokens)
    chunk_s = cost.step_s(fused_tokens, start_tokens)
    riders_s = cost.step_s(0, 0, riders, riders * context_tokens)
    shared_s = cost.linear.seconds(fused_tokens) / fused_tokens
    own_s = cost.decode_attention_s(context_tokens) + cost.beside_s / riders
    return DecodeAccounts(
        alone_s=cost.step_s(0, 0, batch, batch * context_tokens) / batch,
        marginal_s=(mixed_s - chunk_s) / riders,
        by_token_s=shared_s + own_s,
        by_order_s=(mixed_s - chunk_s + riders_s) / 2 / riders,
    )
