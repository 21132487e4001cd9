"""A layer in blocks: what eviction leaves. Cache slots are counted by what is kept, positions by what was read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np
import torch

from mooncake_lab.compression.held import LayerHold, LayerPool, NewTokens, Prefilled
from mooncake_lab.core import blocks_for
from mooncake_lab.engine.backends.protocol import Backend
from mooncake_lab.engine.packing import PackedBatch, Piece, pack


@dataclass(slots=True, eq=False)
class PagedLayer:
    """One layer of a request in blocks of its own. Mutable: it grows."""

    pool: LayerPool
    blocks: list[int]
    tokens: int
    """Number of tokens that each head holds; heads may hold different tokens."""

    @classmethod
    def of(cls, pool: LayerPool, keys: torch.Tensor, values: torch.Tensor) -> Self:
        """Put keys and values (kv_heads, tokens, head_width) into new blocks."""
        layer = cls(pool, [], 0)
        layer.grow(keys.shape[1])
        pool.cache.write(0, layer.blocks, 0, torch.stack((keys, values)).transpose(1, 2))
        return layer

    @property
    def device_bytes(self) -> int:
        """Whole blocks."""
        return len(self.blocks) * self.pool.cache.block_bytes

    @property
    def host_bytes(self) -> int:
        """None."""
        return 0

    def grow(self, tokens: int) -> None:
        """Room for more tokens.

        Raises:
            MemoryError: when the pool has no blocks left.
        """
        wanted = blocks_for(self.tokens + tokens, self.pool.cache.block_size_tokens)
        if wanted > len(self.blocks):
            self.blocks += self.pool.allocator.allocate(wanted - len(self.blocks))
        self.tokens += tokens

    def keep(self, kept: torch.Tensor) -> None:
        """Only these places, int64 (count,) ascending, the same of all heads; blocks left over are free."""
        keys, values = (side[:, kept] for side in self.read())
        self.tokens = len(kept)
        needed = blocks_for(self.tokens, self.pool.cache.block_size_tokens)
        self.pool.allocator.release(self.blocks[needed:])
        del self.blocks[needed:]
        self.pool.cache.write(0, self.blocks, 0, torch.stack((keys, values)).transpose(1, 2))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of its keys and values, each (kv_heads, tokens, head_width)."""
        both = self.pool.cache.read(0, self.blocks, 0, self.tokens).transpose(1, 2)
        return both[0], both[1]

    def release(self) -> None:
        """Its blocks are free."""
        self.pool.allocator.release(self.blocks)
        self.blocks, self.tokens = [], 0

    def attend(self, others: Sequence[LayerHold], qkv: torch.Tensor, new: NewTokens, ops: Backend) -> torch.Tensor:
        """Through the engine's own paged kernels, all requests at once."""
        store, holds = self.pool.cache.layers[0], cast("Sequence[PagedLayer]", (self, *others))
        batch = append(holds, new)
        query = ops.rotate_and_store(qkv, new.rope, batch, store, new.config)
        if new.queries is not None:
            new.queries.append(query)
        attended = ops.attend(query, batch, store)
        for hold, asked in zip(holds, query.split(new.counts), strict=True):
            hold.asked(asked)
        return attended

    def asked(self, queries: torch.Tensor) -> None:
        """Told its new tokens' rotated queries (tokens, query_heads, head_width), once they have attended."""


def append(holds: Sequence[PagedLayer], new: NewTokens) -> PackedBatch:
    """Make room for new tokens, and say where they and their contexts lie.

    Positions are the true ones; everything else counts slots.
    """
    pieces: list[Piece] = []
    for hold, count in zip(holds, new.counts, strict=True):
        cached = hold.tokens
        hold.grow(count)
        pieces.append(
            Piece(np.zeros(count, dtype=np.int64), cached, np.array(hold.blocks, dtype=np.int32), emits=True)
        )
    pool = holds[0].pool.cache
    batch = pack(pieces, pool.block_size_tokens, pool.data.device)
    return replace(batch, positions=new.positions)


def take(side: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Rows `kept` (kv_heads, count) of keys or values (kv_heads, tokens, head_width)."""
    return side.gather(1, kept[:, :, None].expand(-1, -1, side.shape[2]))


def hold_all(prefilled: Prefilled, pool: LayerPool) -> tuple[PagedLayer, ...]:
    """Everything a prefill kept, in blocks."""
    return tuple(
        PagedLayer.of(pool, keys, values) for keys, values in zip(prefilled.keys, prefilled.values, strict=True)
    )
