"""KVCache after prefill: layers in blocks, rebuilt from a smaller form, or still being computed."""

from collections.abc import (
    Callable,
    Sequence,  # a hint in quotes, for readers
)
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, cast

import numpy as np
import torch

from mooncake_lab.core import blocks_for
from mooncake_lab.engine.backends.protocol import Backend
from mooncake_lab.engine.blocks import BlockAllocator
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import KVCache, LayerCache
from mooncake_lab.engine.packing import PackedBatch, Piece, pack
from mooncake_lab.engine.rope import Rope


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PrefilledPrompt:
    """What a prefill computed, dense: what every method starts from."""

    tokens: int
    """Tokens of the prompt, which is also the next token's position."""
    keys: tuple[torch.Tensor, ...]
    """A layer: (kv_heads, kept tokens, head_width), rotated. A method may have kept fewer in deeper layers."""
    values: tuple[torch.Tensor, ...]
    queries: tuple[torch.Tensor, ...]
    """A layer: (last tokens, query_heads, head_width), rotated."""
    logits: torch.Tensor
    """(vocabulary,), of the last token: an uncompressed opinion."""

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(side.nbytes for side in (*self.keys, *self.values))


@dataclass(frozen=True, slots=True, eq=False)
class LayerPool:
    """Blocks of one layer each, so that layers of one request may hold different numbers of tokens."""

    cache: KVCache
    """KVCache for a model of one layer."""
    allocator: BlockAllocator
    config: LlamaConfig

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that requests hold."""
        return (self.cache.blocks - self.allocator.available) * self.cache.block_bytes


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Positions of new tokens in their requests. The rotary embedding needs them; the cache does not."""

    positions: torch.Tensor
    """int64 (tokens,), those of all requests side by side."""
    counts: tuple[int, ...]
    """New tokens of each request."""
    rope: Rope
    config: LlamaConfig
    queries: list[torch.Tensor] | None = None
    """Where rotated queries are left, a layer after the other, for those who vote with them."""


class LayerHold(Protocol):
    """One layer of one request's KVCache, however it is kept."""

    @property
    def tokens(self) -> int:
        """Tokens it holds; the heaviest side, where sides differ."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes it takes where the model computes."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes it takes in host memory besides."""
        ...

    def release(self) -> None:
        """Give its memory back."""

    def attend(
        self, others: "Sequence[LayerHold]", qkv: torch.Tensor, new: NewTokens, ops: Backend
    ) -> torch.Tensor:
        """Append new tokens to this layer of all these requests; what they attend to: (tokens, query width)."""
        ...


@dataclass(slots=True, eq=False)
class Held:
    """A request's compressed KVCache. Mutable: it grows as tokens are generated."""

    position: int
    """Position of the next token: the true length, dropped tokens included."""
    layers: tuple[LayerHold, ...]
    released: bool = field(default=False)

    @property
    def device_bytes(self) -> int:
        """Bytes where the model computes."""
        return sum(layer.device_bytes for layer in self.layers)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(layer.host_bytes for layer in self.layers)

    def release(self) -> None:
        """Give all memory back.

        Raises:
            ValueError: when that happened before.
        """
        if self.released:
            raise ValueError("this KVCache was released before; other requests may use its blocks now")
        for layer in self.layers:
            layer.release()
        self.released = True


def make_pool(
    config: LlamaConfig, *, tokens: int, block_size_tokens: int, device: torch.device, dtype: torch.dtype
) -> LayerPool:
    """Room for the given number of tokens in all layers of a model."""
    blocks = blocks_for(tokens, block_size_tokens) * config.layers
    one = replace(config, layers=1)
    cache = KVCache(one, blocks=blocks, block_size_tokens=block_size_tokens, device=device, dtype=dtype)
    return LayerPool(cache, BlockAllocator(blocks), config)


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


def hold_all(prefilled: PrefilledPrompt, pool: LayerPool) -> tuple[PagedLayer, ...]:
    """Everything a prefill kept, in blocks."""
    return tuple(
        PagedLayer.of(pool, keys, values) for keys, values in zip(prefilled.keys, prefilled.values, strict=True)
    )


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


Restore = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Gives keys and values of the prompt, each (kv_heads, tokens, head_width)."""


@dataclass(slots=True, eq=False)
class RestoredLayer:
    """One layer of a request. Mutable: its tail grows."""

    restore: Restore
    prompt_tokens: int
    stored_bytes: int
    """Bytes of the smaller form; a form that two layers share is counted once, with the first."""
    tail: PagedLayer

    @property
    def tokens(self) -> int:
        """Tokens of prompt and tail."""
        return self.prompt_tokens + self.tail.tokens

    @property
    def device_bytes(self) -> int:
        """Bytes of the smaller form and of the tail's blocks."""
        return self.stored_bytes + self.tail.device_bytes

    @property
    def host_bytes(self) -> int:
        """None."""
        return 0

    def release(self) -> None:
        """The tail's blocks are free; the rest is freed with its last holder."""
        self.tail.release()
        self.stored_bytes = 0

    def attend(self, others: Sequence[LayerHold], qkv: torch.Tensor, new: NewTokens, ops: Backend) -> torch.Tensor:
        """Rebuild, append, attend."""
        holds = cast("Sequence[RestoredLayer]", (self, *others))
        store = self.tail.pool.cache.layers[0]
        query = ops.rotate_and_store(qkv, new.rope, append([hold.tail for hold in holds], new), store, new.config)
        sides = [_joined(hold.restore(), hold.tail.read()) for hold in holds]
        return attend_dense(ops, query, sides, new)


def _joined(
    prompt: tuple[torch.Tensor, torch.Tensor], tail: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (torch.cat((old.to(new.dtype), new), dim=1) for old, new in zip(prompt, tail, strict=True))
    return keys, values
