"""The reference: every operation as plain torch, attention as a full score matrix a request. Any device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling

from mooncake_lab.engine.backends.protocol import Linear
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import LayerCache
from mooncake_lab.engine.packing import PackedBatch
from mooncake_lab.engine.rope import Rope, rotate

if TYPE_CHECKING:
    from mooncake_lab.engine.model import LlamaModel


@dataclass(frozen=True, slots=True)
class DenseBackend:
    """The reference backend in plain torch: slow, and what the fast backends are tested against."""

    name: str = "dense"

    def linears(self, weights: Sequence[torch.Tensor]) -> Sequence[Linear]:
        """Linear operators with the weights as they are."""
        return [partial(F.linear, weight=weight) for weight in weights]

    def add_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Sums in the model's type, normalises in float32."""
        if update is not None:
            hidden.add_(update)
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        return normed.to(hidden.dtype) * weight

    def rotate_and_store(
        self, qkv: torch.Tensor, rope: Rope, batch: PackedBatch, cache: LayerCache, config: LlamaConfig
    ) -> torch.Tensor:
        """One token per row; slots say where its key and value go."""
        query, keys, values = (
            part.unflatten(-1, (-1, config.head_width))
            for part in qkv.split((config.query_width, config.kv_width, config.kv_width), dim=-1)
        )
        cosines, sines = rope.cosines[batch.positions], rope.sines[batch.positions]
        size = cache.keys.shape[2]
        blocks, offsets = batch.slots // size, batch.slots % size
        cache.keys[blocks, :, offsets] = rotate(keys, cosines, sines)
        cache.values[blocks, :, offsets] = values
        return rotate(query, cosines, sines)

    def attend(self, query: torch.Tensor, batch: PackedBatch, cache: LayerCache) -> torch.Tensor:
        """Attention of one request at a time."""
        attended = torch.empty_like(query)
        rows = [(row, row, 1) for row in range(batch.singles)]
        rows += [(span.table_row, span.start, span.tokens) for span in batch.spans]
        lengths = batch.lengths.tolist()
        for table_row, start, tokens in rows:
            keys, values = gather(cache, batch.tables[table_row], lengths[table_row])
            attended[start : start + tokens] = _attend(query[start : start + tokens], keys, values)
        return attended.flatten(1)

    def feed_forward(self, normed: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        """The feed-forward of all tokens at once."""
        gate, up = gate_up(normed).chunk(2, dim=-1)
        return down(F.silu(gate) * up)

    def whole_step(self, model: "LlamaModel") -> None:
        """None: this backend has no compiled decode step."""


def gather(cache: LayerCache, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one request's first `length` tokens, each (kv_heads, length, head_width)."""
    used = table[: -(-length // cache.keys.shape[2])].long()
    keys, values = (side[used].transpose(0, 1).flatten(1, 2)[:, :length] for side in (cache.keys, cache.values))
    return keys, values


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The last `len(query)` tokens of a context attend to it, in float32."""
    tokens, heads, width = query.shape
    groups = heads // keys.shape[0]
    keys, values = (side.float().repeat_interleave(groups, dim=0) for side in (keys, values))
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * width**-0.5
    context = keys.shape[1]
    seen = torch.ones(tokens, context, dtype=torch.bool, device=query.device).tril(context - tokens)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(0, 1).to(query.dtype)
