"""Attention of prefill chunks over the paged KVCache on CPU, after FlashAttention.

A thread takes a tile of the chunk's tokens and the query heads of one KV head, which are rows of one product.
It reads the context in chunks, each only as far as its last row may see, and keeps for each row the highest
score so far, the sum of weights and the values mixed by them.
"""

# numba's decorators are untyped, and it adds an intrinsic's first argument
# pyright: basic, reportCallIssue=false
# digest of the kernels that numba compiles into these: 732c6b062c16ed2c

from typing import Final

import numpy as np
from numba import njit, prange
from numba.extending import register_jitable

from mooncake_lab.engine.backends.cpu_kernels import (
    BASE_TWO,
    LOWEST,
    Floats,
    Ints,
    Stored,
    highest_of,
    narrow,
    power_of_two,
    widen,
)
from mooncake_lab.engine.backends.cpu_tiles import ADD, LANES, ROWS, SET, multiply_tile

_TILE_ROWS: Final = 256
"""Rows of a tile: with a chunk of the context they fill half of a cache of 512 KiB when heads have 64 numbers."""
_CHUNK: Final = 256
"""Tokens of context at a time, a multiple of `LANES`."""


@njit(parallel=True, fastmath=True, error_model="numpy", nogil=True, cache=True)
def paged_prefill(query: Stored, keys: Stored, values: Stored, table: Ints, cached: int, out: Stored) -> None:
    """The tokens of `query` (tokens, heads, width) attend to `cached` tokens and causally to themselves."""
    tokens, heads, _ = query.shape
    group = heads // keys.shape[1]
    size = max(1, _TILE_ROWS // group)
    tiles = (tokens + size - 1) // size
    for item in prange(keys.shape[1] * tiles):
        # a late tile sees more than an early one: in pairs of both every run of items is the same work
        place = item % tiles
        start = size * (place // 2 if place % 2 == 0 else tiles - 1 - place // 2)
        _attend_tile(item // tiles, start, min(size, tokens - start), query, keys, values, table, cached, out)


@njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
def _attend_tile(
    head: int, start: int, tokens: int, query: Stored, keys: Stored, values: Stored, table: Ints, cached: int,
    out: Stored,
) -> None:  # fmt: skip
    """One KV head, for the chunk's tokens from `start` on; row `t * group + g` is query head `g` of token `t`."""
    width, group = query.shape[2], query.shape[1] // keys.shape[1]
    padded = (width + LANES - 1) // LANES * LANES
    rows = tokens * group
    scaled, mixed = np.empty((rows, width), np.float32), np.zeros((rows, padded), np.float32)
    highest, total = np.full(rows, LOWEST), np.zeros(rows, np.float32)
    for row in range(rows):
        for x in range(width):
            number = widen(query[start + row // group, head * group + row % group, x])
            scaled[row, x] = number * (BASE_TWO / np.sqrt(np.float32(width)))
    turned = np.zeros((_CHUNK // LANES, width, LANES), np.float32)
    mixing = np.zeros((_CHUNK, padded), np.float32)
    scores = np.empty((ROWS, _CHUNK), np.float32)
    context = cached + start + tokens
    for first in range(0, context, _CHUNK):
        _gather(first, min(_CHUNK, context - first), head, keys, values, table, turned, mixing)
        for row in range(0, rows, ROWS):
            # token `row // group` sees itself and what is before it
            _attend_rows(
                row, group, cached + start + 1 - first, scaled, turned, mixing, scores, highest, total, mixed
            )
    for row in range(rows):
        token, column = start + row // group, (head * group + row % group) * width
        share = np.float32(1) / total[row]  # vectorised and scalar loops divide differently
        for x in range(width):
            out[token, column + x] = narrow(mixed[row, x] * share, out[token, column + x])


@njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
def _attend_rows(
    row: int, group: int, seen: int, scaled: Floats, turned: Floats, mixing: Floats, scores: Floats,
    highest: Floats, total: Floats, mixed: Floats,
) -> None:  # fmt: skip
    """Rows from `row` on and one chunk of the context, of which the tile's first token sees `seen` tokens."""
    width, padded = turned.shape[1], mixing.shape[1]
    count = min(ROWS, len(scaled) - row)
    most = min(_CHUNK, seen + (row + count - 1) // group)
    if most <= 0:
        return
    for panel in range((most + LANES - 1) // LANES):
        at = panel * LANES
        multiply_tile(scaled, row, 0, count, width, turned, at * width, LANES, 0, scores, 0, at, SET)
    for r in range(count):
        own = min(most, seen + (row + r) // group)
        _soften_further(scores, r, own, most, highest, total, mixed, row + r)
    for column in range(0, padded, LANES):
        multiply_tile(scores, 0, 0, count, most, mixing, column, padded, 0, mixed, row, column, ADD)


@register_jitable
def _gather(
    first: int, tokens: int, head: int, keys: Stored, values: Stored, table: Ints, turned: Floats, mixing: Floats
) -> None:
    """A chunk of the context as float32: keys in panels, values row by row."""
    size, width = keys.shape[2], keys.shape[3]
    for t in range(tokens):
        block, offset = table[(first + t) // size], (first + t) % size
        panel, lane = t // LANES, t % LANES
        for x in range(width):
            turned[panel, x, lane] = widen(keys[block, head, offset, x])
        for x in range(width):
            mixing[t, x] = widen(values[block, head, offset, x])


@register_jitable
def _soften_further(
    scores: Floats, r: int, own: int, seen: int, highest: Floats, total: Floats, mixed: Floats, row: int
) -> None:
    """Row `r` of scores becomes weights; what is mixed so far shrinks where a higher score came."""
    top = max(highest[row], highest_of(scores, r, own))
    weight = np.float32(0)
    for t in range(own):
        scores[r, t] = power_of_two(scores[r, t] - top)
        weight += scores[r, t]
    for t in range(max(own, 0), seen):
        scores[r, t] = np.float32(0)
    shrunk = power_of_two(highest[row] - top)
    if shrunk < np.float32(1):
        for x in range(mixed.shape[1]):
            mixed[row, x] *= shrunk
    total[row] = total[row] * shrunk + weight
    highest[row] = top
