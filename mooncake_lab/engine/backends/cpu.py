"""CPU: kernels compiled with numba; oneDNN where the processor multiplies bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mooncake_lab.engine.backends import cpu_kernels as kernels
from mooncake_lab.engine.backends.cpu_linear import CpuLinear, cpu_linears, view
from mooncake_lab.engine.backends.cpu_prefill import paged_prefill
from mooncake_lab.engine.backends.cpu_step import CpuStep, make_cpu_step
from mooncake_lab.engine.backends.cpu_threads import reserve_threads, share_out
from mooncake_lab.engine.backends.protocol import Linear
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import LayerCache
from mooncake_lab.engine.packing import PackedBatch
from mooncake_lab.engine.rope import Rope

if TYPE_CHECKING:
    from mooncake_lab.engine.model import LlamaModel

_FFN_ROWS = 256
"""Tokens of a feed-forward at a time: its widest intermediate stays in the caches and its memory is reused."""


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """The CPU backend for float32 and bfloat16."""

    name: str = "cpu"

    def __post_init__(self) -> None:
        reserve_threads()

    def linears(self, weights: Sequence[torch.Tensor]) -> tuple[CpuLinear, ...]:
        """Linear operators whose weights lie in panels."""
        return cpu_linears(weights)

    def add_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """The sum and its RMS normalisation in one pass."""
        share_out(hidden.numel())
        normed = torch.empty_like(hidden)
        added = hidden if update is None else update
        kernels.add_norm(
            view(hidden), view(added), view(weight), np.float32(epsilon), update is not None, view(normed)
        )
        return normed

    def rotate_and_store(
        self, qkv: torch.Tensor, rope: Rope, batch: PackedBatch, cache: LayerCache, config: LlamaConfig
    ) -> torch.Tensor:
        """The rotated queries; keys and values are stored in the same pass."""
        share_out(qkv.numel())
        query = qkv.new_empty(len(qkv), config.query_heads, config.head_width)
        where = (view(rope.cosines), view(rope.sines), view(batch.positions), view(batch.slots))
        kernels.rotate_and_store(view(qkv), *where, view(cache.keys), view(cache.values), view(query))
        return query

    def attend(self, query: torch.Tensor, batch: PackedBatch, cache: LayerCache) -> torch.Tensor:
        """Single tokens and longer pieces each have a kernel; both read the blocks where they are."""
        attended = query.new_empty(len(query), query.shape[1] * query.shape[2])
        keys, values = view(cache.keys), view(cache.values)
        if batch.singles:
            threads = share_out(batch.tables[: batch.singles].numel() * cache.keys[0].numel())
            where = (view(batch.tables), view(batch.lengths), threads)
            kernels.paged_decode(view(query), keys, values, *where, view(attended[: batch.singles]))
        for span in batch.spans:
            rows = slice(span.start, span.start + span.tokens)
            share_out(span.tokens * (span.cached + span.tokens) * query.shape[1])
            table = view(batch.tables[span.table_row])
            paged_prefill(view(query[rows]), keys, values, table, span.cached, view(attended[rows]))
        return attended

    def feed_forward(self, normed: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        """The feed-forward of some rows at a time."""
        if len(normed) <= _FFN_ROWS:
            return down(_activate(gate_up(normed)))
        return torch.cat([down(_activate(gate_up(rows))) for rows in normed.split(_FFN_ROWS)])

    def whole_step(self, model: "LlamaModel") -> CpuStep:
        """A decode step as one compiled call."""
        return make_cpu_step(model)


def _activate(gate_up: torch.Tensor) -> torch.Tensor:
    share_out(gate_up.numel())
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    kernels.silu_and_multiply(view(gate_up), view(out))
    return out
