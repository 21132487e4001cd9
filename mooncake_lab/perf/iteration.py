"""What one iteration of a mixed batch costs, from a handful of anchors (SARATHI, arXiv 2308.16369, §3-4).

All tokens of an iteration share one read of each matrix. Attention is paid separately for each request.
`HybridLatency` draws the shared part as a floor and a slope. Here it goes through measured points, and the
tile that matrix kernels round up to is a term that can be switched off.
"""

from dataclasses import dataclass
from itertools import pairwise

from mooncake_lab.perf.hardware import Hardware
from mooncake_lab.perf.models import ModelShape
from mooncake_lab.perf.roofline import ridge_flops_per_byte


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
    per_decode_s: float = 0.0
    """Paid for each decode beside that: what an engine does for every running request."""
    rereads: bool = True
    """Whether a chunk pays for reading the KVCache before it, at the rate of a decode (SARATHI §4.2)."""

    def __post_init__(self) -> None:
        if min(self.per_pair_s, self.per_context_token_s, self.beside_s, self.per_decode_s) < 0:
            raise ValueError(f"{self} has a negative coefficient; all must be at least 0")

    def chunk_attention_s(self, chunk_tokens: float, start_tokens: float = 0) -> float:
        """Attention of a chunk whose prompt has `start_tokens` before it; pairs add up whatever the chunks."""
        pairs = chunk_tokens * (start_tokens + (chunk_tokens + 1) / 2)
        reread = self.per_context_token_s * start_tokens if self.rereads and chunk_tokens else 0.0
        return self.per_pair_s * pairs + reread

    def decode_attention_s(self, context_tokens: float) -> float:
        """Attention of decodes that together have `context_tokens` tokens of context."""
        return self.per_context_token_s * context_tokens

    def step_s(
        self, chunk_tokens: float, start_tokens: float, decodes: float = 0, context_tokens: float = 0
    ) -> float:
        """Seconds of one iteration; the arguments are those of `HybridLatency.step_s`."""
        both = self.beside_s if chunk_tokens and decodes else 0.0
        attention = self.chunk_attention_s(chunk_tokens, start_tokens) + self.decode_attention_s(context_tokens)
        return self.linear.seconds(chunk_tokens + decodes) + attention + both + self.per_decode_s * decodes


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
        per_decode_s=cost.per_decode_s,
        rereads=cost.rereads,
    )
