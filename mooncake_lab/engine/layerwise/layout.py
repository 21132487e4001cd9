"""How KVCache lies in a store: blocks of whole tokens, named by what they continue, one buffer a layer."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.core import block_keys
from mooncake_lab.engine.config import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLayout:
    """The shape of one model's blocks in a store.

    Raises:
        ValueError: when a block has no token.
    """

    fingerprint: bytes
    """Of the model and its type of numbers; it begins every key, so that no other model finds the block."""
    layers: int
    block_tokens: int
    kv_heads: int
    head_width: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"store blocks of {self.block_tokens} tokens; at least 1 is needed")

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """Of one layer of one block: keys then values, tokens, heads, width."""
        return 2, self.block_tokens, self.kv_heads, self.head_width

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer of one block."""
        return 2 * self.block_tokens * self.kv_heads * self.head_width * self.dtype.itemsize

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of each layer of a block, as a store wants them."""
        return (self.layer_bytes,) * self.layers

    def keys(self, prompt: npt.ArrayLike) -> list[bytes]:
        """The key of each whole block of a prompt."""
        tokens = np.asarray(prompt, dtype=np.int32)
        return [
            bytes(key) for key in block_keys(tokens, self.block_tokens, namespace=self.fingerprint, partial=False)
        ]


def layout_of(config: LlamaConfig, fingerprint: bytes, dtype: torch.dtype, block_tokens: int) -> StoreLayout:
    """The layout of a model's blocks."""
    return StoreLayout(
        fingerprint=fingerprint,
        layers=config.layers,
        block_tokens=block_tokens,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        dtype=dtype,
    )


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous tensor on the CPU, of any type of numbers, shape (bytes,)."""
    return tensor.view(-1).view(torch.uint8).numpy()
