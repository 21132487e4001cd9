"""The paged KVCache: one tensor of blocks, and copies of token ranges in and out of it."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.engine.config import LlamaConfig

BlockTable: TypeAlias = Sequence[int] | torch.Tensor
"""The blocks of a request, front to back; see `KVCache.table`."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's blocks: keys and values, each of shape (blocks, kv_heads, block_size_tokens, head_width)."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpan:
    """Keys and values of a run of a request's tokens, outside any engine: what Mooncake moves and stores.

    It does not depend on the block size of the engine it left.
    """

    fingerprint: bytes
    """Which model and type of numbers made it; an engine refuses any other."""
    start: int
    """Position of its first token."""
    tokens: int
    layers: tuple[torch.Tensor, ...]
    """A layer: shape (2, tokens, kv_heads, head_width), keys then values."""

    @property
    def bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(layer.nbytes for layer in self.layers)


class KVCache:
    """Blocks of keys and values for every layer, allocated once; mutable, since it is memory.

    Raises:
        ValueError: when there is not room for one block.
    """

    def __init__(
        self, config: LlamaConfig, *, blocks: int, block_size_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        if blocks < 1 or block_size_tokens < 1:
            raise ValueError(f"a KVCache of {blocks} blocks of {block_size_tokens} tokens holds nothing")
        self.blocks = blocks
        self.block_size_tokens = block_size_tokens
        shape = (config.layers, 2, blocks, config.kv_heads, block_size_tokens, config.head_width)
        self.data = _zeros(shape, device, dtype)
        self.layers = tuple(LayerCache(layer[0], layer[1]) for layer in self.data)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.data.nbytes // self.blocks

    def table(self, blocks: Sequence[int] | npt.NDArray[np.int32]) -> BlockTable:
        """A request's blocks for `read` and `write`: on a device a tensor of it, brought once for all layers.

        It belongs to the current stream, which is not waited for.
        """
        table = np.asarray(blocks, dtype=np.int64)
        if self.data.device.type == "cpu":
            return table.tolist()
        return torch.from_numpy(table).pin_memory().to(self.data.device, non_blocking=True)

    def read(self, layer: int, blocks: BlockTable, start: int, stop: int) -> torch.Tensor:
        """A copy of positions `start` up to `stop` of a request's layer: (2, tokens, kv_heads, head_width)."""
        if self.data.device.type == "cpu":
            _, _, heads, _, width = self.data[layer].shape
            span = torch.empty((2, stop - start, heads, width), dtype=self.data.dtype)
            for stored, packed in self._pairs(layer, blocks, start, span):
                packed.copy_(stored)
            return span
        blocks_at, offsets = self._places(blocks, start, stop)
        # two indices around a slice: the indexed dimension comes first, (tokens, 2, kv_heads, head_width)
        return self.data[layer][:, blocks_at, :, offsets].transpose(0, 1).contiguous()

    def write(self, layer: int, blocks: BlockTable, start: int, span: torch.Tensor) -> None:
        """Put what `read` gave into the blocks of a request, from position `start` on."""
        if self.data.device.type == "cpu":
            for stored, packed in self._pairs(layer, blocks, start, span):
                stored.copy_(packed)
            return
        blocks_at, offsets = self._places(blocks, start, start + span.shape[1])
        # the allocator of pinned memory keeps it until the copy is done, even if the span is dropped before
        came = span.to(self.data.device, non_blocking=span.is_pinned())
        self.data[layer][:, blocks_at, :, offsets] = came.transpose(0, 1)

    def _pairs(
        self, layer: int, blocks: BlockTable, start: int, span: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the same tokens in the cache and in a span: runs of blocks, and parts of blocks at the ends.

        Copies between them go eight times as fast, on a CPU, as indexing token by token.
        """
        size, data = self.block_size_tokens, self.data[layer]
        table: Sequence[int] = blocks.tolist() if isinstance(blocks, torch.Tensor) else blocks
        at, stop = 0, span.shape[1]
        while at < stop:
            index, offset = divmod(start + at, size)
            first, run = table[index], 1
            if offset or stop - at < size:
                tokens = min(size - offset, stop - at)
                yield data[:, first, :, offset : offset + tokens], span[:, at : at + tokens].transpose(1, 2)
            else:
                while (run + 1) * size <= stop - at and table[index + run] == first + run:
                    run += 1
                tokens = run * size
                packed = span[:, at : at + tokens].unflatten(1, (run, size)).transpose(2, 3)
                yield data[:, first : first + run], packed
            at += tokens

    def _places(self, blocks: BlockTable, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, stop, device=self.data.device)
        table = torch.as_tensor(blocks, dtype=torch.int64, device=self.data.device)
        return table[positions // self.block_size_tokens], positions % self.block_size_tokens


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros, since what a mask hides may not be NaN; on CPU, memory that is not there until used."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    raw = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


def fingerprint(config: LlamaConfig, weights_digest: bytes, dtype: torch.dtype) -> bytes:
    """Names a model and a type of numbers, so that KVCache of another is never taken for this one's.

    The size of blocks is not in it: a block's key names exactly its tokens and those before it.
    """
    return hashlib.sha256(f"{config} {dtype}".encode() + weights_digest).digest()[:16]
