"""CPU: prepacked linears, compiled kernels between them, torch's flash attention for prefill."""

from dataclasses import dataclass

import numba
import numpy as np
import torch

from mooncake_lab.engine.backends import cpu_kernels as kernels
from mooncake_lab.engine.backends.cpu_step import CpuStep, kernel_threads, make_cpu_step, reserve_threads, view
from mooncake_lab.engine.backends.dense import gather
from mooncake_lab.engine.backends.linear import cpu_linear, multiplies_bfloat16
from mooncake_lab.engine.backends.protocol import Linear
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import LayerCache
from mooncake_lab.engine.packing import PackedBatch, Span
from mooncake_lab.engine.rope import Rope
from mooncake_lab.engine.weights import LlamaWeights

_ELEMENTS_ALONE = 1 << 17
"""A kernel over fewer numbers runs in one thread: some 20 microseconds."""
_FFN_ROWS = 256
"""Tokens of a feed-forward at a time: its widest intermediate stays in the caches and its memory is reused."""


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """float32 and bfloat16."""

    name: str = "cpu"

    def __post_init__(self) -> None:
        reserve_threads()

    def linear(self, weight: torch.Tensor) -> Linear:
        """Prepacked where this torch can."""
        return cpu_linear(weight)

    def add_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """One pass."""
        _share_out(hidden.numel())
        normed = torch.empty_like(hidden)
        added = hidden if update is None else update
        kernels.add_norm(
            view(hidden), view(added), view(weight), np.float32(epsilon), update is not None, view(normed)
        )
        return normed

    def rotate_and_store(
        self, qkv: torch.Tensor, rope: Rope, batch: PackedBatch, cache: LayerCache, config: LlamaConfig
    ) -> torch.Tensor:
        """One pass."""
        _share_out(qkv.numel())
        query = qkv.new_empty(len(qkv), config.query_heads, config.head_width)
        where = (view(rope.cosines), view(rope.sines), view(batch.positions), view(batch.slots))
        kernels.rotate_and_store(view(qkv), *where, view(cache.keys), view(cache.values), view(query))
        return query

    def attend(self, query: torch.Tensor, batch: PackedBatch, cache: LayerCache) -> torch.Tensor:
        """Single tokens through the paged kernel, longer pieces through flash attention on a gathered copy."""
        attended = query.new_empty(len(query), query.shape[1] * query.shape[2])
        if batch.singles:
            _share_out(batch.tables[: batch.singles].numel() * cache.keys[0].numel())
            blocks = (view(cache.keys), view(cache.values), view(batch.tables), view(batch.lengths))
            kernels.paged_decode(view(query), *blocks, view(attended[: batch.singles]))
        for span in batch.spans:
            rows = slice(span.start, span.start + span.tokens)
            keys, values = gather(cache, batch.tables[span.table_row], span.cached + span.tokens)
            attended[rows] = _attend_span(query[rows], keys, values, span)
        return attended

    def feed_forward(self, normed: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        """Some rows at a time."""
        if len(normed) <= _FFN_ROWS:
            return down(_activate(gate_up(normed)))
        return torch.cat([down(_activate(gate_up(rows))) for rows in normed.split(_FFN_ROWS)])

    def whole_step(self, weights: LlamaWeights, rope: Rope) -> CpuStep:
        """A compiled call a layer, for steps of few tokens."""
        return make_cpu_step(weights, rope)


def _share_out(elements: int) -> None:
    """Let the next kernel use as many threads as torch does, or one where waiting for the others costs more.

    On a busy machine each kernel that waits for a thread may wait for a time slice.
    """
    numba.set_num_threads(kernel_threads() if elements > _ELEMENTS_ALONE else 1)


def _activate(gate_up: torch.Tensor) -> torch.Tensor:
    _share_out(gate_up.numel())
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    kernels.silu_and_multiply(view(gate_up), view(out))
    return out


def _attend_span(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span) -> torch.Tensor:
    """A chunk's attention as that to the prefix plus that to itself, joined by their log-sum-exps.

    Neither part needs a mask in memory: the first sees everything, the second is causal.
    """
    dtype = query.dtype
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        query, keys, values = query.float(), keys.float(), values.float()
    tokens, heads, width = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    own = (side[:, span.cached :].repeat_interleave(group, dim=0) for side in (keys, values))
    mixed, sums = _flash(query.transpose(0, 1), *own, causal=True)
    if span.cached:
        # query heads of one KV head become rows of one head: the prefix is the same for all of them
        rows = query.view(tokens, kv_heads, group, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)
        prefix_mixed, prefix_sums = _flash(rows, keys[:, : span.cached], values[:, : span.cached], causal=False)
        share = torch.sigmoid(prefix_sums.reshape(heads, tokens) - sums).unsqueeze(-1)
        mixed = torch.lerp(mixed.float(), prefix_mixed.reshape(heads, tokens, width).float(), share)
    return mixed.transpose(0, 1).flatten(1).to(dtype)


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (heads, tokens, width) and the log-sum-exp of its scores (heads, tokens)."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  # sdpa does not return the sums
    mixed, sums = flash(query[None], keys[None], values[None], 0.0, causal)
    return mixed[0], sums[0]
