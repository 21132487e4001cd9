"""Attention over keys and values that are not in the pool: rebuilt, or still being computed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from mooncake_lab.compression.held import NewTokens
from mooncake_lab.engine.backends.protocol import Backend
from mooncake_lab.engine.kvcache import LayerCache
from mooncake_lab.engine.packing import PackedBatch, Piece, pack


def rotate_new(ops: Backend, qkv: torch.Tensor, new: NewTokens) -> tuple[torch.Tensor, LayerCache]:
    """Rotated queries (tokens, query_heads, head_width), and new keys and values as one block per request."""
    store = _empty(qkv, len(new.counts), new.counts[0], new)
    batch = _one_block_each([0] * len(new.counts), new, new.counts[0])
    return ops.rotate_and_store(qkv, new.rope, batch, store, new.config), store


def attend_dense(
    ops: Backend, query: torch.Tensor, sides: Sequence[tuple[torch.Tensor, torch.Tensor]], new: NewTokens
) -> torch.Tensor:
    """New tokens attend to all keys and values of their requests, each side (kv_heads, tokens, head_width)."""
    lengths = [keys.shape[1] for keys, _ in sides]
    store = _empty(query, len(sides), max(lengths), new)
    for row, (keys, values) in enumerate(sides):
        store.keys[row, :, : lengths[row]] = keys
        store.values[row, :, : lengths[row]] = values
    cached = [length - count for length, count in zip(lengths, new.counts, strict=True)]
    return ops.attend(query, _one_block_each(cached, new, max(lengths)), store)


def _empty(like: torch.Tensor, requests: int, tokens: int, new: NewTokens) -> LayerCache:
    shape = (requests, new.config.kv_heads, tokens, new.config.head_width)
    return LayerCache(like.new_zeros(shape), like.new_zeros(shape))


def _one_block_each(cached: Sequence[int], new: NewTokens, block_size_tokens: int) -> PackedBatch:
    pieces = [
        Piece(np.zeros(count, dtype=np.int64), before, np.array([row], dtype=np.int32), emits=True)
        for row, (before, count) in enumerate(zip(cached, new.counts, strict=True))
    ]
    return replace(pack(pieces, block_size_tokens, new.positions.device), positions=new.positions)
