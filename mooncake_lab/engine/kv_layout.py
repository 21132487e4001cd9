"""The layout of KVCache bytes outside of an engine: stored in blocks, or on its way between workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.core import block_keys
from mooncake_lab.engine.kvcache import KVSpan
from mooncake_lab.engine.model import LlamaModel

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The blocks of one model: one buffer per layer, of keys and then values.

    Raises:
        ValueError: when a block has no token.
    """

    fingerprint: bytes
    """Fingerprint of the model and its data type; it begins every key, so that no other model finds the block."""
    layers: int
    kv_heads: int
    head_width: int
    dtype: torch.dtype
    block_tokens: int = 1
    is_pinned: bool = False
    """Whether buffers are pinned, because a device copies from them."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"store blocks of {self.block_tokens} tokens; at least 1 is needed")

    @classmethod
    def of(cls, model: LlamaModel, fingerprint: bytes, *, block_tokens: int = 1) -> "KVLayout":
        """The layout of a model's blocks."""
        config = model.config
        return cls(
            fingerprint=fingerprint,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            dtype=model.embedding.dtype,
            block_tokens=block_tokens,
            is_pinned=model.embedding.device.type == "cuda",
        )

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """The shape of one layer of one block: keys and values, tokens, heads, width."""
        return 2, self.block_tokens, self.kv_heads, self.head_width

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer of one block."""
        return 2 * self.block_tokens * self.kv_heads * self.head_width * self.dtype.itemsize

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of each layer of a block, as a store takes them."""
        return (self.layer_bytes,) * self.layers

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token in all layers."""
        return self.layers * self.layer_bytes // self.block_tokens

    def empty(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Buffers for some tokens: one tensor (2, tokens, kv_heads, head_width) per layer, on the host."""
        shape = 2, tokens, self.kv_heads, self.head_width
        return tuple(torch.empty(shape, dtype=self.dtype, pin_memory=self.is_pinned) for _ in range(self.layers))

    def span(self, layers: Sequence[torch.Tensor]) -> KVSpan:
        """Tensors of the first tokens of a prompt, as an engine takes them."""
        return KVSpan(fingerprint=self.fingerprint, start=0, tokens=layers[0].shape[1], layers=tuple(layers))

    def keys(self, prompt: npt.ArrayLike) -> list[bytes]:
        """The key of each whole block of a prompt."""
        tokens = np.asarray(prompt, dtype=np.int32)
        keys = block_keys(tokens, self.block_tokens, namespace=self.fingerprint, partial=False)
        return [bytes(key) for key in keys]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor on the host, of any data type, shape (bytes,)."""
    return tensor.view(-1).view(torch.uint8).numpy()
