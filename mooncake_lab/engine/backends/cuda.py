"""GPU: cuBLAS for the linears, Triton kernels between them, torch's flash attention for prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from mooncake_lab.engine.backends import triton_kernels as kernels
from mooncake_lab.engine.backends.dense import DenseBackend
from mooncake_lab.engine.backends.protocol import Linear
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import LayerCache
from mooncake_lab.engine.packing import PackedBatch, SpanContext
from mooncake_lab.engine.rope import Rope

if TYPE_CHECKING:
    from mooncake_lab.engine.model import LlamaModel

PROGRAMS: Final = 528
"""Programs of decode attention that keep a large GPU busy: four for each of an H200's 132 processors."""
_MOST_STRETCHES = 64
_WIDEST_FLASH = 256
"""Head width, a multiple of 8, up to which torch's flash attention goes."""


@dataclass(frozen=True, slots=True)
class CudaBackend:
    """bfloat16 and float16; float32 too, with the dense prefill attention, since flash attention has none.

    What `name` does not say changes the speed, and nothing else.
    """

    name: str = "cuda"
    decode_programs: int = PROGRAMS
    """How many programs decode attention is cut into, at least."""
    decode_tile: "kernels.DecodeTile | None" = None
    """How each of them goes through its part; None: by the width of heads."""
    cudnn_tokens: int = 1024
    """A prompt of a multiple of these, all of it new, attends through cuDNN where that runs; 0: none does.

    cuDNN is faster than FlashAttention 2 on Hopper, but prepares a plan for each length, which takes a while.
    """

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
        own = None if batch.context is None or not _has_flash(query) else batch.context.own
        if own is not None:
            own.layer, own.both = cache, qkv.new_empty(len(qkv), 2 * config.kv_heads, config.head_width)
        where = (rope.cosines, rope.sines, batch.positions, batch.slots)
        kernels.rotate_and_store(qkv, *where, cache.keys, cache.values, query, None if own is None else own.both)
        return query

    def attend(self, query: torch.Tensor, batch: PackedBatch, cache: LayerCache) -> torch.Tensor:
        """Single tokens through the paged kernel, all longer pieces in one call of flash attention."""
        singles, context = batch.singles, batch.context
        if context is not None and not _has_flash(query):
            return DenseBackend().attend(query, batch, cache)
        if context is not None and not singles:
            return _attend_spans(query, context, cache, self.cudnn_tokens).flatten(1)
        attended = torch.empty_like(query)
        tables, lengths = batch.tables[:singles], batch.lengths[:singles]
        cut = stretches(singles, cache.keys.shape[1], self.decode_programs)
        where = (cache.keys, cache.values, tables, lengths, attended)
        kernels.paged_decode(query[:singles], *where, cut, self.decode_tile)
        if context is not None:
            attended[singles:] = _attend_spans(query[singles:], context, cache, self.cudnn_tokens)
        return attended.flatten(1)

    def feed_forward(self, normed: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        """All tokens at once."""
        wide = gate_up(normed)
        out = wide.new_empty(len(wide), wide.shape[1] // 2)
        kernels.silu_and_multiply(wide, out)
        return down(out)

    def whole_step(self, model: "LlamaModel") -> None:
        """None: recorded graphs do that here."""


def stretches(rows: int, kv_heads: int, programs: int = PROGRAMS) -> int:
    """Parts a context is cut into, a power of two: enough that few requests occupy the whole GPU."""
    wanted = -(-programs // (rows * kv_heads))
    return min(1 << (wanted - 1).bit_length(), _MOST_STRETCHES)


def _has_flash(query: torch.Tensor) -> bool:
    width = query.shape[2]
    return query.is_cuda and query.dtype != torch.float32 and width % 8 == 0 and width <= _WIDEST_FLASH


def _attend_spans(
    query: torch.Tensor, context: SpanContext, cache: LayerCache, cudnn_tokens: int = 0
) -> torch.Tensor:
    """Causal attention of packed chunks to their contexts; the mask is aligned to their ends."""
    keys, values = contexts(context, cache, len(query))
    is_one_prompt = context.own is not None and len(context.query_starts) == 2
    if cudnn_tokens and is_one_prompt and len(query) % cudnn_tokens == 0 and _has_cudnn(query, keys, values):
        return _attend_cudnn(query, keys, values)
    flash = torch.ops.aten._flash_attention_forward  # noqa: SLF001  # for grouped heads varlen_attn demands an argument since 2.12 that 2.11 refuses
    starts = (context.query_starts, context.context_starts)
    return flash(query, keys, values, *starts, context.longest_query, context.longest_context, 0.0, True, False)[0]  # noqa: FBT003  # the operator's own arguments: causal, no debug mask


def contexts(context: SpanContext, cache: LayerCache, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that spans of so many tokens attend to, each (context tokens, kv_heads, head_width)."""
    own = context.own
    if own is not None and own.both is not None and own.layer is cache:
        keys, values = own.both[-tokens:].chunk(2, dim=1)
        return keys, values
    return cache.keys[context.blocks, :, context.offsets], cache.values[context.blocks, :, context.offsets]


def _has_cudnn(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether this machine's cuDNN attends in these shapes."""
    sides = _one_request(query), _one_request(keys), _one_request(values)
    return can_use_cudnn_attention(SDPAParams(*sides, None, 0.0, True, True))  # noqa: FBT003  # causal, grouped heads


def _attend_cudnn(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of one prompt to itself."""
    sides = _one_request(query), _one_request(keys), _one_request(values)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attended = F.scaled_dot_product_attention(*sides, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _one_request(side: torch.Tensor) -> torch.Tensor:
    """From (tokens, heads, width) to (1, heads, tokens, width), without a copy."""
    return side.transpose(0, 1).unsqueeze(0)
