"""KVCache after prefill: how a request's layers lie in memory once a method has had its way with them."""

from collections.abc import Sequence  # noqa: TC003  # a hint in quotes, for readers
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from mooncake_lab.core import blocks_for
from mooncake_lab.engine.allocator import BlockAllocator
from mooncake_lab.engine.backends.protocol import Backend
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.rope import Rope


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prefilled:
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
        ...

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
            raise ValueError("this KVCache was released before; its blocks may be somebody else's now")
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
