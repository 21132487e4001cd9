"""A decode step on CPU as one compiled call: for few tokens, calls between operators cost more than their work.

The kernels are those of the operators, but activations stay float32 throughout; weights and KVCache are float32,
or bfloat16 as uint16.
"""

# numba's decorators are untyped
# pyright: basic
# digest of the kernels that numba compiles into these: 388e98411fc82a61

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import torch
from numba import njit

from mooncake_lab.engine.backends.cpu_kernels import (
    Floats,
    Ints,
    Stored,
    add_norm_row,
    paged_decode,
    rotate_row,
    silu_and_multiply_row,
    widen,
)
from mooncake_lab.engine.backends.cpu_linear import FEW_TOKENS, CpuLinear, linear, view
from mooncake_lab.engine.backends.cpu_threads import share_out
from mooncake_lab.engine.backends.cpu_tiles import ADD
from mooncake_lab.engine.backends.protocol import Linear
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.packing import PackedBatch

if TYPE_CHECKING:
    from mooncake_lab.engine.model import LlamaModel

_MOST_TOKENS: Final = 256
"""Activations of more tokens do not stay in the caches from one kernel to the next."""


class LayerArrays(NamedTuple):
    """The norms and the panels of all layers; the first dimension of each is the layer."""

    attention_norm: Stored
    qkv: Stored
    output: Stored
    ffn_norm: Stored
    gate_up: Stored
    down: Stored


class ModelArrays(NamedTuple):
    """What a step reads of a model."""

    embedding: Stored
    layers: LayerArrays
    norm: Stored
    head: Stored
    cosines: Floats
    sines: Floats
    epsilon: np.float32


class BatchArrays(NamedTuple):
    """Where a step's tokens are, as in `PackedBatch`."""

    tokens: Ints
    positions: Ints
    slots: Ints
    tables: Ints
    lengths: Ints
    threads: int
    """How many compute the step."""


class Widths(NamedTuple):
    """Outputs of a layer's linears, without what fills their last panels."""

    query: int
    qkv: int
    ffn: int


@njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
def decode_step(batch: BatchArrays, model: ModelArrays, widths: Widths, cache: Stored, logits: Floats) -> None:
    """Logits (tokens, vocabulary) of one new token per request; keys and values go to their slots in the cache.

    The cache has the shape of `KVCache.data`.
    """
    tokens, width = len(batch.tokens), model.embedding.shape[1]
    hidden, update = np.empty((tokens, width), np.float32), np.empty((tokens, width), np.float32)
    normed = np.empty((tokens, width), np.float32)
    for row in range(tokens):
        for x in range(width):
            hidden[row, x] = widen(model.embedding[batch.tokens[row], x])
    for layer in range(len(cache)):
        add = layer > 0
        for row in range(tokens):
            add_norm_row(row, hidden, update, model.layers.attention_norm[layer], model.epsilon, add, normed)
        _attention(layer, normed, batch, model, widths, cache[layer, 0], cache[layer, 1], update)
        for row in range(tokens):
            add_norm_row(row, hidden, update, model.layers.ffn_norm[layer], model.epsilon, ADD, normed)
        _feed_forward(layer, normed, model.layers, widths, update)
    for row in range(tokens):
        add_norm_row(row, hidden, update, model.norm, model.epsilon, ADD, normed)
    linear(normed, model.head, logits)


@njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
def _attention(
    layer: int, normed: Floats, batch: BatchArrays, model: ModelArrays, widths: Widths, keys: Stored,
    values: Stored, update: Floats,
) -> None:  # fmt: skip
    tokens, head_width = len(normed), keys.shape[3]
    qkv = np.empty((tokens, widths.qkv), np.float32)
    linear(normed, model.layers.qkv[layer], qkv)
    query = np.empty((tokens, widths.query // head_width, head_width), np.float32)
    for row in range(tokens):
        rotate_row(row, qkv, model.cosines, model.sines, batch.positions, batch.slots, keys, values, query)
    attended = np.empty((tokens, widths.query), np.float32)
    paged_decode(query, keys, values, batch.tables, batch.lengths, batch.threads, attended)
    linear(attended, model.layers.output[layer], update)


@njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
def _feed_forward(layer: int, normed: Floats, layers: LayerArrays, widths: Widths, update: Floats) -> None:
    gate_up = np.empty((len(normed), 2 * widths.ffn), np.float32)
    linear(normed, layers.gate_up[layer], gate_up)
    active = np.empty((len(normed), widths.ffn), np.float32)
    for row in range(len(normed)):
        silu_and_multiply_row(row, gate_up, active)
    linear(active, layers.down[layer], update)


@dataclass(frozen=True, slots=True)
class CpuStep:
    """A model's decode step."""

    model: ModelArrays
    widths: Widths
    vocabulary: int
    most_tokens: int

    def fits(self, batch: PackedBatch) -> bool:
        """Whether a batch is decodes only, few enough, and all want their logits, whose rows are in order then."""
        return not batch.spans and len(batch.logit_rows) == batch.singles <= self.most_tokens

    def forward(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        """Logits of a batch that fits, float32 (rows, vocabulary)."""
        threads = share_out(self.model.layers.gate_up[0].size)
        arrays = BatchArrays(
            tokens=view(batch.tokens),
            positions=view(batch.positions),
            slots=view(batch.slots),
            tables=view(batch.tables),
            lengths=view(batch.lengths),
            threads=threads,
        )
        logits = np.empty((batch.singles, self.vocabulary), np.float32)
        decode_step(arrays, self.model, self.widths, view(cache.data), logits)
        return torch.from_numpy(logits)


def make_cpu_step(model: "LlamaModel") -> CpuStep:
    """The step of a model whose linears are the CPU backend's, on their panels."""
    first, head = model.layers[0], cast("CpuLinear", model.head)
    layers = LayerArrays(
        attention_norm=view(torch.stack([layer.attention_norm for layer in model.layers])),
        qkv=_stack(first.qkv),
        output=_stack(first.output),
        ffn_norm=view(torch.stack([layer.ffn_norm for layer in model.layers])),
        gate_up=_stack(first.gate_up),
        down=_stack(first.down),
    )
    arrays = ModelArrays(
        embedding=view(model.embedding),
        layers=layers,
        norm=view(model.norm),
        head=head.stack[0],
        cosines=view(model.rope.cosines),
        sines=view(model.rope.sines),
        epsilon=np.float32(model.config.norm_epsilon),
    )
    widths = Widths(layers.output.shape[2], cast("CpuLinear", first.qkv).outputs, layers.down.shape[2])
    return CpuStep(arrays, widths, head.outputs, _MOST_TOKENS if head.many is None else FEW_TOKENS)


def _stack(operator: Linear) -> Stored:
    return cast("CpuLinear", operator).stack
