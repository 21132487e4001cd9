"""One decode layer as one compiled function: for few tokens, calls between operators cost more than their work.

Products with weights are dot products over rows of the weight as Hugging Face stores it. Four rows and four
tokens are computed at a time, with sixteen sums in registers, so that a weight is read from memory once for all
tokens. Fewer tokens take one row at a time: their time is spent on reading, and sequential reads are fastest.
Activations stay float32 throughout; weights and KVCache are float32, or bfloat16 as uint16.
"""

# numba's decorators are untyped
# pyright: basic

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange
from numba.extending import register_jitable

from mooncake_lab.engine.backends.cpu_kernels import gated, paged_decode, rotate_row
from mooncake_lab.engine.backends.cpu_numbers import Floats, Ints, Stored, widen

PLAIN, ADDED, GATED = np.int64(0), np.int64(1), np.int64(2)
"""What becomes of a product: it replaces, it is added, or `silu` of its first half times the second replaces.

Of type int64, because numba compiles a function anew for each plain integer that compiled code passes to it.
"""
_PART_OUTPUTS = 64
"""A thread's share of a product; more would leave threads without one."""


class LayerArrays(NamedTuple):
    """A layer's weights (outputs, inputs) and biases; an empty bias means no bias."""

    attention_norm: Stored
    qkv: Stored
    qkv_bias: Stored
    output: Stored
    output_bias: Stored
    ffn_norm: Stored
    gate_up: Stored
    gate_up_bias: Stored
    down: Stored
    down_bias: Stored


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
    linear(normed, layer.qkv, layer.qkv_bias, PLAIN, qkv)
    for row in range(tokens):
        rotate_row(row, qkv, step.cosines, step.sines, step.positions, step.slots, keys, values, query)
    paged_decode(query, keys, values, step.tables, step.lengths, attended)
    linear(attended, layer.output, layer.output_bias, ADDED, hidden)
    normalise(hidden, layer.ffn_norm, epsilon, normed)
    linear(normed, layer.gate_up, layer.gate_up_bias, GATED, active)
    linear(active, layer.down, layer.down_bias, ADDED, hidden)


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
def linear(inputs: Floats, weight: Stored, bias: Stored, how: np.int64, out: Floats) -> None:
    """`inputs @ weight.T + bias` into `out` (tokens, outputs), or added to it, or its halves gated.

    Four outputs at a time, many in a row: the processor foresees a stretch of memory, but not when it ends.
    """
    tokens, outputs = out.shape
    for part in prange((outputs + _PART_OUTPUTS - 1) // _PART_OUTPUTS):
        start, stop = part * _PART_OUTPUTS, min((part + 1) * _PART_OUTPUTS, outputs)
        found = np.empty((tokens, _PART_OUTPUTS), np.float32)
        for first in range(start, stop, 4):
            _multiply(inputs, weight, bias, first, min(first + 4, stop), found[:, first - start :])
        if how == GATED:
            up = np.empty((tokens, _PART_OUTPUTS), np.float32)
            for first in range(start, stop, 4):
                last = outputs + min(first + 4, stop)
                _multiply(inputs, weight, bias, outputs + first, last, up[:, first - start :])
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
def _multiply(inputs: Floats, weight: Stored, bias: Stored, first: int, last: int, out: Floats) -> None:
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
    if len(bias):
        for row in range(tokens):
            for x in range(last - first):
                out[row, x] += widen(bias[first + x])


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
