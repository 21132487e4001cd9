"""A decode step of few requests on CPU: a compiled call a layer, and no torch operator between."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba.core import config as numba_config

from mooncake_lab.engine.backends import cpu_step_kernels as kernels
from mooncake_lab.engine.backends.linear import multiplies_bfloat16
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.packing import PackedBatch
from mooncake_lab.engine.rope import Rope
from mooncake_lab.engine.weights import LayerWeights, LlamaWeights

MOST_TOKENS = MappingProxyType(
    {(torch.float32, False): 8, (torch.bfloat16, False): 16, (torch.float32, True): 3, (torch.bfloat16, True): 2}
)
"""By type, and by whether the processor multiplies bfloat16, as measured on one of each kind. More are better off
operator by operator: oneDNN's large products pay for its calls, the sooner the wider the processor is."""
_WEIGHTS_ALONE = 1 << 18
"""Layers with fewer weights in their widest product run in one thread: waiting for another costs more."""


@dataclass(frozen=True, slots=True)
class CpuStep:
    """A model's weights as its files have them, beside the reordered ones that prefill uses: twice the memory."""

    layers: tuple[kernels.LayerArrays, ...]
    embedding: npt.NDArray[Any]
    norm: npt.NDArray[Any]
    head: npt.NDArray[Any]
    rope: Rope
    epsilon: float
    most_tokens: int

    def fits(self, batch: PackedBatch) -> bool:
        """Whether a batch is decodes only, few enough, and all of them want their logits."""
        return not batch.spans and len(batch.logit_rows) == batch.singles <= self.most_tokens

    def forward(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        """Logits of a batch that fits, float32 (rows, vocabulary), in the order of `logit_rows`."""
        epsilon = np.float32(self.epsilon)
        numba.set_num_threads(kernel_threads() if self.layers[0].gate_up.size > _WEIGHTS_ALONE else 1)
        where = (view(batch.positions), view(batch.slots), view(batch.tables), view(batch.lengths))
        step = kernels.StepArrays(*where, view(self.rope.cosines), view(self.rope.sines))
        hidden = np.empty((batch.singles, self.embedding.shape[1]), np.float32)
        kernels.embed(view(batch.tokens), self.embedding, hidden)
        for layer, stored in zip(self.layers, cache.layers, strict=True):
            kernels.decode_layer(hidden, layer, step, view(stored.keys), view(stored.values), epsilon)
        normed, logits = np.empty_like(hidden), np.empty((batch.singles, len(self.head)), np.float32)
        kernels.normalise(hidden, self.norm, epsilon, normed)
        kernels.linear(normed, self.head, self.norm[:0], kernels.PLAIN, logits)
        return torch.from_numpy(logits)[batch.logit_rows]


def make_cpu_step(weights: LlamaWeights, rope: Rope) -> CpuStep:
    """The step of a model."""
    layers = tuple(_arrays(layer) for layer in weights.layers)
    return CpuStep(
        layers=layers,
        embedding=view(weights.embedding),
        norm=view(weights.norm),
        head=view(weights.head),
        rope=rope,
        epsilon=weights.config.norm_epsilon,
        most_tokens=MOST_TOKENS[weights.embedding.dtype, multiplies_bfloat16()],
    )


def kernel_threads() -> int:
    """As many as torch uses; both take them from one pool."""
    most: int = numba_config.NUMBA_NUM_THREADS  # pyright: ignore[reportAttributeAccessIssue]  # numba sets it at import
    return min(torch.get_num_threads(), most)


def reserve_threads() -> None:
    """Let numba start its threads, which resets how many torch uses, and set that back."""
    threads = torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(threads)


def view(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory for numba, which knows bfloat16 only by its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _arrays(layer: LayerWeights) -> kernels.LayerArrays:
    def bias(tensor: torch.Tensor | None) -> npt.NDArray[Any]:
        return view(layer.attention_norm[:0] if tensor is None else tensor)

    return kernels.LayerArrays(
        view(layer.attention_norm),
        *(view(layer.qkv), bias(layer.qkv_bias), view(layer.output), bias(layer.output_bias)),
        view(layer.ffn_norm),
        *(view(layer.gate_up), bias(layer.gate_up_bias), view(layer.down), bias(layer.down_bias)),
    )
