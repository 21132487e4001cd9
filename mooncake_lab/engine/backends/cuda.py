"""GPU: cuBLAS for the linears, Triton kernels between them, torch's flash attention for prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling

from mooncake_lab.engine.backends import triton_kernels as kernels
from mooncake_lab.engine.backends.dense import DenseBackend
from mooncake_lab.engine.backends.protocol import Linear
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import LayerCache
from mooncake_lab.engine.packing import PackedBatch, SpanContext
from mooncake_lab.engine.rope import Rope

if TYPE_CHECKING:
    from mooncake_lab.engine.model import LlamaModel

_PROGRAMS = 264
"""Programs that keep a large GPU busy: two for each of an H200's 132 processors."""
_MOST_STRETCHES = 64
_WIDEST_FLASH = 256
"""Head width, a multiple of 8, up to which torch's flash attention goes."""


@dataclass(frozen=True, slots=True)
class CudaBackend:
    """bfloat16 and float16; float32 too, with the dense prefill attention, since flash attention has none."""

    name: str = "cuda"

    def linears(self, weights: Sequence[torch.Tensor]) -> Sequence[Linear]:
        """The weights as they are."""
        return [partial(F.linear, weight=weight) for weight in weights]

    def add_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """One pass."""
        normed = torch.empty_like(hidden)
        kernels.add_norm(hidden, update, weight, epsilon, normed)
        return normed

    def rotate_and_store(
        self, qkv: torch.Tensor, rope: Rope, batch: PackedBatch, cache: LayerCache, config: LlamaConfig
    ) -> torch.Tensor:
        """One pass; a token whose slot is negative is not stored."""
        query = qkv.new_empty(len(qkv), config.query_heads, config.head_width)
        where = (rope.cosines, rope.sines, batch.positions, batch.slots)
        kernels.rotate_and_store(qkv, *where, cache.keys, cache.values, query)
        return query

    def attend(self, query: torch.Tensor, batch: PackedBatch, cache: LayerCache) -> torch.Tensor:
        """Single tokens through the paged kernel, all longer pieces in one call of flash attention."""
        attended = torch.empty_like(query)
        singles = batch.singles
        if singles:
            tables, lengths = batch.tables[:singles], batch.lengths[:singles]
            cut = stretches(singles, cache.keys.shape[1])
            kernels.paged_decode(query[:singles], cache.keys, cache.values, tables, lengths, attended, cut)
        width = query.shape[2]
        fits = query.is_cuda and query.dtype != torch.float32 and width % 8 == 0 and width <= _WIDEST_FLASH
        if batch.context is not None and fits:
            attended[singles:] = _attend_spans(query[singles:], batch.context, cache)
        elif batch.context is not None:
            return DenseBackend().attend(query, batch, cache)
        return attended.flatten(1)

    def feed_forward(self, normed: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        """All tokens at once."""
        wide = gate_up(normed)
        out = wide.new_empty(len(wide), wide.shape[1] // 2)
        kernels.silu_and_multiply(wide, out)
        return down(out)

    def whole_step(self, model: "LlamaModel") -> None:
        """None: recorded graphs do that here."""


def stretches(rows: int, kv_heads: int) -> int:
    """Parts a context is cut into, a power of two: enough that few requests occupy the whole GPU."""
    wanted = -(-_PROGRAMS // (rows * kv_heads))
    return min(1 << (wanted - 1).bit_length(), _MOST_STRETCHES)


def _attend_spans(query: torch.Tensor, context: SpanContext, cache: LayerCache) -> torch.Tensor:
    """Causal attention of packed chunks to their gathered contexts; the mask is aligned to their ends."""
    size = cache.keys.shape[2]
    blocks, offsets = context.slots // size, context.slots % size
    keys, values = cache.keys[blocks, :, offsets], cache.values[blocks, :, offsets]
    flash = torch.ops.aten._flash_attention_forward  # noqa: SLF001  # for grouped heads varlen_attn demands an argument since 2.12 that 2.11 refuses
    starts = (context.query_starts, context.context_starts)
    return flash(query, keys, values, *starts, context.longest_query, context.longest_context, 0.0, True, False)[0]  # noqa: FBT003  # the operator's own arguments: causal, no debug mask
