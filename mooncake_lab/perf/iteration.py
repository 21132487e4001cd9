"""What one iteration of a mixed batch costs, from a handful of anchors (SARATHI, arXiv 2308.16369, §3-4).

All tokens of an iteration share one read of each matrix. Attention is paid separately for each request.
`HybridLatency` draws the shared part as a floor and a slope. Here it goes through measured points, and the
tile that matrix kernels round up to is a term that can be switched off.

SARATHI measures batches in which all prompts are equally long and so are all outputs. Then a round, in which
every place of the batch serves one request, is integer arithmetic: sums, no simulation. Decodes are counted in
steps; the first output token comes out of the prefill.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from mooncake_lab.core import sum_in_order
from mooncake_lab.perf.roofline import ridge_flops_per_byte
from mooncake_lab.perf.specs import Hardware, ModelShape


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of the linear operators over the tokens of an iteration: straight lines between anchors.

    Below the first anchor nothing gets cheaper (the weights are read whatever happens); above the last one, time
    is proportional to tokens. From one tile on, tokens are rounded up to whole tiles (SARATHI §4.4, Fig. 7).

    Raises:
        ValueError: when there are no two anchors, they do not rise, or the tile is below one token.
    """

    anchors: tuple[tuple[float, float], ...]
    """Pairs of tokens and seconds."""
    tile_tokens: int = 1
    """1 switches tiles off."""

    def __post_init__(self) -> None:
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.anchors))
        if len(self.anchors) < 2 or not rising or min(self.anchors[0]) <= 0:
            raise ValueError(
                f"a linear cost has the anchors {self.anchors}; two or more are needed, positive and rising"
            )
        if self.tile_tokens < 1:
            raise ValueError(f"LinearCost.tile_tokens is {self.tile_tokens}; at least 1 is needed")

    def scaled(self, factor: float) -> "LinearCost":
        """The same with all seconds multiplied."""
        return replace(self, anchors=tuple((tokens, factor * seconds) for tokens, seconds in self.anchors))

    def rounded(self, tokens: float) -> float:
        """Tokens that the kernels compute for these."""
        if tokens < self.tile_tokens:  # a batch below one tile runs in smaller kernels: the decode anchors
            return tokens
        whole = round(tokens, 6)  # means over a round are no whole numbers, and their dust is no tile
        return -(-whole // self.tile_tokens) * self.tile_tokens

    def seconds(self, tokens: float) -> float:
        """Seconds for `tokens` tokens together; 0 without tokens."""
        if tokens <= 0:
            return 0.0
        tokens = self.rounded(tokens)
        last_tokens, last_s = self.anchors[-1]
        if tokens >= last_tokens:
            return last_s * tokens / last_tokens
        if tokens <= self.anchors[0][0]:
            return self.anchors[0][1]
        low, high = next(pair for pair in pairwise(self.anchors) if tokens <= pair[1][0])
        return low[1] + (high[1] - low[1]) * (tokens - low[0]) / (high[0] - low[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCost:
    """One iteration of a model on a device: linear operators, attention of the chunk, attention of the decodes.

    Raises:
        ValueError: when a coefficient is negative.
    """

    name: str
    """Model, device and what it was anchored to, for footers."""
    linear: LinearCost
    per_pair_s: float
    """Attention of a chunk, for each pair of a token and one it attends to."""
    per_context_token_s: float
    """Attention of a decode, for each token of its context."""
    beside_s: float = 0.0
    """Paid once where a chunk and decodes share an iteration: their attention runs in kernels of its own."""
    per_decode: LinearCost | None = None
    """Paid for the decodes of an iteration beside that, by how many there are: what an engine does for its running
    requests."""
    rereads: bool = True
    """Whether a chunk pays for reading the KVCache before it, at the rate of a decode (SARATHI §4.2)."""

    def __post_init__(self) -> None:
        if min(self.per_pair_s, self.per_context_token_s, self.beside_s) < 0:
            raise ValueError(f"{self} has a negative coefficient; all must be at least 0")

    def chunk_attention_s(self, chunk_tokens: float, start_tokens: float = 0) -> float:
        """Attention of a chunk whose prompt has `start_tokens` before it; pairs add up whatever the chunks."""
        pairs = chunk_tokens * (start_tokens + (chunk_tokens + 1) / 2)
        reread = self.per_context_token_s * start_tokens if self.rereads and chunk_tokens else 0.0
        return self.per_pair_s * pairs + reread

    def decode_attention_s(self, context_tokens: float) -> float:
        """Attention of decodes that together have `context_tokens` tokens of context."""
        return self.per_context_token_s * context_tokens

    def decodes_s(self, decodes: float) -> float:
        """What an engine does for so many running requests."""
        return self.per_decode.seconds(decodes) if self.per_decode else 0.0

    def step_s(
        self, chunk_tokens: float, start_tokens: float, decodes: float = 0, context_tokens: float = 0
    ) -> float:
        """Seconds of one iteration; the arguments are those of `HybridLatency.step_s`."""
        both = self.beside_s if chunk_tokens and decodes else 0.0
        attention = self.chunk_attention_s(chunk_tokens, start_tokens) + self.decode_attention_s(context_tokens)
        return self.linear.seconds(chunk_tokens + decodes) + attention + both + self.decodes_s(decodes)


def transferred(
    cost: IterationCost,
    *,
    source: tuple[ModelShape, Hardware],
    target: tuple[ModelShape, Hardware],
    name: str,
) -> IterationCost:
    """The cost of another model on another device, if both reach the same share of their rooflines.

    Linear operators keep their multiple of the time to read the weights, at the same distance from the ridge
    (tokens over FLOPs per byte). Decode attention keeps its share of the bandwidth, and chunk attention its share
    of the peak. The cost per kernel grows with the layers. Tiles stay: they belong to the kernels. What a decode
    costs beside its matrices and its attention stays too: it is the engine's, not the model's.
    """
    (shape, device), (new_shape, new_device) = source, target
    read_s = new_shape.streamed_weight_bytes / new_device.memory_bytes_per_s
    old_read_s = shape.streamed_weight_bytes / device.memory_bytes_per_s
    ridges = ridge_flops_per_byte(new_device) / ridge_flops_per_byte(device)
    bandwidths = device.memory_bytes_per_s / new_device.memory_bytes_per_s
    kv = new_shape.kv_bytes_per_token / shape.kv_bytes_per_token
    width = new_shape.layers * new_shape.query_width / (shape.layers * shape.query_width)
    anchors = tuple((tokens * ridges, seconds * read_s / old_read_s) for tokens, seconds in cost.linear.anchors)
    return IterationCost(
        name=name,
        linear=LinearCost(anchors, cost.linear.tile_tokens),
        per_pair_s=cost.per_pair_s * width * device.flops_per_s() / new_device.flops_per_s(),
        per_context_token_s=cost.per_context_token_s * kv * bandwidths,
        beside_s=cost.beside_s * new_shape.layers / shape.layers,
        per_decode=cost.per_decode,
        rereads=cost.rereads,
    )


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
    linear_s = batch * sum_in_order(cost.linear.seconds(size + beside) for size in sizes)
    attention_s = batch * sum_in_order(
        cost.chunk_attention_s(size, index * chunk) for index, size in enumerate(sizes)
    )
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
    if filled and work.decode_steps <= riders * min(pieces, fixed):  # places stay empty, so chunks can grow
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
