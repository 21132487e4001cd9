"""A decode step of few requests on CPU: a compiled call a layer, and no torch operator between.

For few tokens, calls between operators cost more than their work. Products with weights are dot products over
rows of the weight as Hugging Face stores it. Four rows and four tokens are computed at a time, with sixteen sums
in registers, so that a weight is read from memory once for all tokens. Fewer tokens take one row at a time: their
time is spent on reading, and sequential reads are fastest. Activations stay float32 throughout; weights and
KVCache are float32, or bfloat16 as uint16.
"""

# numba's decorators are untyped
# pyright: basic

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import njit, prange
from numba.core import config as numba_config
from numba.extending import register_jitable

from mooncake_lab.engine.backends.cpu_kernels import Floats, Ints, Stored, gated, paged_decode, rotate_row, widen
from mooncake_lab.engine.backends.linear import multiplies_bfloat16
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.packing import PackedBatch
from mooncake_lab.engine.rope import Rope
from mooncake_lab.engine.weights import LayerWeights, LlamaWeights

PLAIN, ADDED, GATED = np.int64(0), np.int64(1), np.int64(2)
"""What becomes of a product: it replaces, it is added, or `silu` of its first half times the second replaces.

Of type int64, because numba compiles a function anew for each plain integer that compiled code passes to it.
"""
_PART_OUTPUTS = 64
"""A thread's share of a product; more would leave threads without one."""


class LayerArrays(NamedTuple):
    """A layer's weights (outputs, inputs)."""

    attention_norm: Stored
    qkv: Stored
    output: Stored
    ffn_norm: Stored
    gate_up: Stored
    down: Stored


class StepArrays(NamedTuple):
    """Where a step's tokens are, as in `PackedBatch`, and the rotary table."""

    positions: Ints
    slots: Ints
    tables: Ints
    lengths: Ints
    cosines: Floats
    sines: Floats


@njit(fastmath=True, nogil=True, cache=True)
def decode_layer(
    hidden: Floats, layer: LayerArrays, step: StepArrays, keys: Stored, values: Stored, epsilon: Any
) -> None:
    """Run a layer on `hidden` (tokens, width) in place; keys and values of the tokens go to their slots."""
    tokens, width = hidden.shape
    query_width, head_width = layer.output.shape[1], keys.shape[3]
    normed = np.empty((tokens, width), np.float32)
    qkv = np.empty((tokens, len(layer.qkv)), np.float32)
    query = np.empty((tokens, query_width // head_width, head_width), np.float32)
    attended = np.empty((tokens, query_width), np.float32)
    active = np.empty((tokens, layer.down.shape[1]), np.float32)
    normalise(hidden, layer.attention_norm, epsilon, normed)
    linear(normed, layer.qkv, PLAIN, qkv)
    for row in range(tokens):
        rotate_row(row, qkv, step.cosines, step.sines, step.positions, step.slots, keys, values, query)
    paged_decode(query, keys, values, step.tables, step.lengths, attended)
    linear(attended, layer.output, ADDED, hidden)
    normalise(hidden, layer.ffn_norm, epsilon, normed)
    linear(normed, layer.gate_up, GATED, active)
    linear(active, layer.down, ADDED, hidden)


@njit(fastmath=True, nogil=True, cache=True)
def embed(tokens: Ints, embedding: Stored, hidden: Floats) -> None:
    """Rows of the embedding as float32."""
    for row in range(len(tokens)):
        for x in range(embedding.shape[1]):
            hidden[row, x] = widen(embedding[tokens[row], x])


@njit(fastmath=True, nogil=True, cache=True)
def normalise(hidden: Floats, weight: Stored, epsilon: Any, normed: Floats) -> None:
    """`normed = rms_norm(hidden) * weight`, arrays (tokens, width)."""
    tokens, width = hidden.shape
    for row in range(tokens):
        total = np.float32(0)
        for x in range(width):
            total += hidden[row, x] * hidden[row, x]
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
        for x in range(width):
            normed[row, x] = hidden[row, x] * scale * widen(weight[x])


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def linear(inputs: Floats, weight: Stored, how: np.int64, out: Floats) -> None:
    """`inputs @ weight.T` into `out` (tokens, outputs), or added to it, or its halves gated.

    Four outputs at a time, many in a row: the processor foresees a stretch of memory, but not when it ends.
    """
    tokens, outputs = out.shape
    for part in prange((outputs + _PART_OUTPUTS - 1) // _PART_OUTPUTS):
        start, stop = part * _PART_OUTPUTS, min((part + 1) * _PART_OUTPUTS, outputs)
        found = np.empty((tokens, _PART_OUTPUTS), np.float32)
        for first in range(start, stop, 4):
            _multiply(inputs, weight, first, min(first + 4, stop), found[:, first - start :])
        if how == GATED:
            up = np.empty((tokens, _PART_OUTPUTS), np.float32)
            for first in range(start, stop, 4):
                last = outputs + min(first + 4, stop)
                _multiply(inputs, weight, outputs + first, last, up[:, first - start :])
            for row in range(tokens):
                for x in range(stop - start):
                    out[row, start + x] = gated(found[row, x]) * up[row, x]
        else:
            _keep(found, start, stop, how, out)


@register_jitable
def _keep(found: Floats, start: int, stop: int, how: np.int64, out: Floats) -> None:
    """Outputs `start` up to `stop` in their place, or added to what is there."""
    for row in range(len(out)):
        for x in range(stop - start):
            out[row, start + x] = found[row, x] + (out[row, start + x] if how == ADDED else np.float32(0))


@njit(fastmath=True, nogil=True, cache=True)
def _multiply(inputs: Floats, weight: Stored, first: int, last: int, out: Floats) -> None:
    """Outputs `first` up to `last` of a weight, at most four, into the first columns of `out` (tokens, ...)."""
    tokens, row = len(inputs), 0
    while last - first == 4 and row + 4 <= tokens:
        _four_tokens(inputs, weight, row, first, out)
        row += 4
    for alone in range(row, tokens):
        for output in range(first, last):  # one after the other: two at a time and the processor foresees neither
            total = np.float32(0)
            for k in range(inputs.shape[1]):
                total += inputs[alone, k] * widen(weight[output, k])
            out[alone, output - first] = total


@register_jitable
def _four_tokens(inputs: Floats, weight: Stored, row: int, first: int, out: Floats) -> None:
    """Sixteen sums: eight numbers are loaded for sixteen multiplications."""
    zero = np.float32(0)
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    c0, c1, c2, c3, d0, d1, d2, d3 = zero, zero, zero, zero, zero, zero, zero, zero
    for k in range(inputs.shape[1]):
        p, q = widen(weight[first, k]), widen(weight[first + 1, k])
        r, s = widen(weight[first + 2, k]), widen(weight[first + 3, k])
        a, b, c, d = inputs[row, k], inputs[row + 1, k], inputs[row + 2, k], inputs[row + 3, k]
        a0, a1, a2, a3 = a0 + a * p, a1 + a * q, a2 + a * r, a3 + a * s
        b0, b1, b2, b3 = b0 + b * p, b1 + b * q, b2 + b * r, b3 + b * s
        c0, c1, c2, c3 = c0 + c * p, c1 + c * q, c2 + c * r, c3 + c * s
        d0, d1, d2, d3 = d0 + d * p, d1 + d * q, d2 + d * r, d3 + d * s
    out[row, 0], out[row, 1], out[row, 2], out[row, 3] = a0, a1, a2, a3
    out[row + 1, 0], out[row + 1, 1], out[row + 1, 2], out[row + 1, 3] = b0, b1, b2, b3
    out[row + 2, 0], out[row + 2, 1], out[row + 2, 2], out[row + 2, 3] = c0, c1, c2, c3
    out[row + 3, 0], out[row + 3, 1], out[row + 3, 2], out[row + 3, 3] = d0, d1, d2, d3


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

    layers: tuple[LayerArrays, ...]
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
        step = StepArrays(*where, view(self.rope.cosines), view(self.rope.sines))
        hidden = np.empty((batch.singles, self.embedding.shape[1]), np.float32)
        embed(view(batch.tokens), self.embedding, hidden)
        for layer, stored in zip(self.layers, cache.layers, strict=True):
            decode_layer(hidden, layer, step, view(stored.keys), view(stored.values), epsilon)
        normed, logits = np.empty_like(hidden), np.empty((batch.singles, len(self.head)), np.float32)
        normalise(hidden, self.norm, epsilon, normed)
        linear(normed, self.head, PLAIN, logits)
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


def _arrays(layer: LayerWeights) -> LayerArrays:
    tensors = (layer.attention_norm, layer.qkv, layer.output, layer.ffn_norm, layer.gate_up, layer.down)
    return LayerArrays(*(view(tensor) for tensor in tensors))
