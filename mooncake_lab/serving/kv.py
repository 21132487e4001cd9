"""KVCache as it travels and as it is stored: which tensors a token has, and their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.engine import KVSpan, LlamaModel

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one token's keys and values are, in the model that all workers of a cluster share."""

    fingerprint: bytes
    layers: int
    kv_heads: int
    head_width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: LlamaModel, fingerprint: bytes) -> "KVShape":
        """That of a model."""
        config = model.config
        return cls(
            fingerprint=fingerprint,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            dtype=model.embedding.dtype,
        )

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in one layer, keys and values."""
        return 2 * self.kv_heads * self.head_width * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * self.layer_bytes

    def empty(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Room for some tokens: a tensor (2, tokens, kv_heads, head_width) a layer, on the host."""
        return tuple(
            torch.empty((2, tokens, self.kv_heads, self.head_width), dtype=self.dtype) for _ in range(self.layers)
        )

    def span(self, layers: Sequence[torch.Tensor]) -> KVSpan:
        """Tensors of the first tokens of a prompt, as an engine takes them."""
        return KVSpan(fingerprint=self.fingerprint, start=0, tokens=layers[0].shape[1], layers=tuple(layers))


def raw(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous host tensor as bytes, without a copy."""
    return tensor.view(torch.uint8).numpy().reshape(-1)
