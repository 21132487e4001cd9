"""The operations between the matrix products of a layer, compiled for CPU with numba.

One launch each instead of five to ten torch operators: at small batches the launches are what a decode step
costs. Numbers are float32, or bfloat16 as uint16 (its upper half), widened on load and rounded on store.
The kernels compile on first use and are cached beside this file. numba's cache looks at the content of one
file only, so a file whose kernels use those of others holds a digest of them, which a test checks.
"""

# numba's decorators and overloads are untyped
# pyright: basic

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload, register_jitable

Stored: TypeAlias = npt.NDArray[Any]
"""Numbers of the model's type, bfloat16 as uint16."""
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.integer]
LINE_BYTES: Final = 64
"""Bytes of a cache line; where lines are longer, some are asked for twice."""


def widen(number: Any) -> Any:
    """A stored number as float32; exists in compiled code only, as `_widen`."""
    raise NotImplementedError(number)


def narrow(number: Any, like: Any) -> Any:
    """A float32 as it is stored in an array whose elements are `like`; compiled code only, as `_narrow`."""
    raise NotImplementedError(number, like)


@overload(widen, inline="always")
def _widen(number):  # noqa: ANN001, ANN202  # numba wants this signature and that below to be equal
    if isinstance(number, types.Float):
        return lambda number: number
    return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


@overload(narrow, inline="always")
def _narrow(number, like):  # noqa: ANN001, ANN202, ARG001  # likewise
    if isinstance(like, types.Float):
        return lambda number, like: number  # noqa: ARG005  # numba needs the same names

    def rounded(number, like):  # noqa: ANN001, ANN202, ARG001  # likewise
        bits = np.float32(number).view(np.uint32)  # to the nearest, ties to even
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return rounded


@intrinsic
def fetch(context: Any, array: Any, place: Any, lines: Any) -> Any:  # noqa: ARG001  # numba's own
    """Prefetch `lines` cache lines from `array[place]` on; compiled code only.

    The processor prefetches within a page of memory, but blocks of a paged cache begin in different pages. It
    stalls when more lines are requested than it can have in flight: request a few at a time, between other work.
    """

    def generate(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind, place_kind, _ = signature.args
        numbers = zip(cgutils.unpack_tuple(builder, values[1]), place_kind, strict=True)
        at = [target.cast(builder, *each, types.intp) for each in numbers]
        stored = target.make_array(kind)(target, builder, values[0])
        line = cgutils.get_item_pointer(target, builder, kind, stored, at, wraparound=False)
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        called = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        ask = cgutils.get_or_insert_function(builder.module, called, "llvm.prefetch.p0")
        to_read, into_all_levels, data = word(0), word(3), word(1)
        start, line_bytes = builder.bitcast(line, byte), ir.Constant(values[2].type, LINE_BYTES)
        with cgutils.for_range(builder, values[2]) as loop:
            there = builder.gep(start, [builder.mul(loop.index, line_bytes)])
            builder.call(ask, [there, to_read, into_all_levels, data])
        return target.get_dummy_value()

    return types.void(array, place, types.intp), generate


LOWEST = np.float32(-1e30)
"""Below any score; infinity would not survive fast arithmetic."""
_LOWEST_ORDERED = np.int32(int(LOWEST.view(np.int32)) ^ 0x7FFFFFFF)
"""The same as the integers of `highest_of`."""


BASE_TWO = np.float32(1.44269504)
"""`exp(x)` is `power_of_two(x * BASE_TWO)`."""


@register_jitable
def power_of_two(x: Any) -> Any:
    """`2 ** x` for x <= 0, with an error of at most 2e-7, without a call, so that loops over it vectorise."""
    x = max(x, np.float32(-126.0))
    whole = np.floor(x + np.float32(0.5))
    rest = x - whole
    poly = np.float32(1.535336188e-4)
    poly = poly * rest + np.float32(1.339887440e-3)
    poly = poly * rest + np.float32(9.618437358e-3)
    poly = poly * rest + np.float32(5.550332471e-2)
    poly = poly * rest + np.float32(2.402264791e-1)
    poly = poly * rest + np.float32(6.931472029e-1)
    poly = poly * rest + np.float32(1.0)
    return poly * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@register_jitable
def highest_of(scores: Floats, row: int, count: int) -> Any:
    """The largest of the first numbers of a row, `LOWEST` if there are none.

    Compared as integers of the same order, because a loop over maxima of floats does not vectorise.
    """
    top = _LOWEST_ORDERED
    for t in range(count):
        bits = np.float32(scores[row, t]).view(np.int32)
        top = max(top, bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return np.int32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@njit(parallel=True, fastmath=True, error_model="numpy", nogil=True, cache=True)
def add_norm(
    hidden: Stored, update: Stored, weight: Stored, epsilon: np.float32, add: bool, normed: Stored
) -> None:
    """`hidden += update` if `add`; `normed = rms_norm(hidden) * weight`. Arrays (tokens, width)."""
    for row in prange(len(hidden)):
        add_norm_row(row, hidden, update, weight, epsilon, add, normed)


@register_jitable
def add_norm_row(
    row: int, hidden: Stored, update: Stored, weight: Stored, epsilon: np.float32, add: bool, normed: Stored
) -> None:
    """One token of `add_norm`; the weight may be of another type."""
    width = hidden.shape[1]
    total = np.float32(0)
    if add:
        for x in range(width):
            hidden[row, x] = narrow(widen(hidden[row, x]) + widen(update[row, x]), hidden[row, x])
    for x in range(width):
        number = widen(hidden[row, x])
        total += number * number
    scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
    for x in range(width):
        # rounded before the weight, as Hugging Face does
        shrunk = narrow(widen(hidden[row, x]) * scale, hidden[row, x])
        normed[row, x] = narrow(widen(shrunk) * widen(weight[x]), hidden[row, x])


@njit(parallel=True, fastmath=True, error_model="numpy", nogil=True, cache=True)
def rotate_and_store(
    qkv: Stored,
    cosines: Floats,
    sines: Floats,
    positions: Ints,
    slots: Ints,
    keys: Stored,
    values: Stored,
    query: Stored,
) -> None:
    """Rotated queries to `query` (tokens, heads, width); keys and values to their slots in the cache."""
    for row in prange(len(query)):
        rotate_row(row, qkv, cosines, sines, positions, slots, keys, values, query)


@register_jitable
def rotate_row(
    row: int,
    qkv: Stored,
    cosines: Floats,
    sines: Floats,
    positions: Ints,
    slots: Ints,
    keys: Stored,
    values: Stored,
    query: Stored,
) -> None:
    """One token of `rotate_and_store`; `qkv` and `query` may be of another type than the cache."""
    query_heads, width = query.shape[1:]
    kv_heads, size = keys.shape[1], keys.shape[2]
    half = width // 2
    position, block, offset = positions[row], slots[row] // size, slots[row] % size
    for head in range(query_heads + kv_heads):
        column = head * width
        for x in range(half):
            cosine, sine = cosines[position, x], sines[position, x]
            first, second = widen(qkv[row, column + x]), widen(qkv[row, column + half + x])
            turned, turned_half = first * cosine - second * sine, second * cosine + first * sine
            if head < query_heads:
                query[row, head, x] = narrow(turned, query[row, head, x])
                query[row, head, half + x] = narrow(turned_half, query[row, head, x])
            else:
                stored = keys[block, head - query_heads, offset]
                stored[x], stored[half + x] = narrow(turned, stored[x]), narrow(turned_half, stored[x])
    for head in range(kv_heads):
        column, stored = (query_heads + kv_heads + head) * width, values[block, head, offset]
        for x in range(width):
            stored[x] = narrow(widen(qkv[row, column + x]), stored[x])


@njit(parallel=True, fastmath=True, error_model="numpy", nogil=True, cache=True)
def silu_and_multiply(gate_up: Stored, out: Stored) -> None:
    """`out = silu(gate) * up`, arrays (tokens, 2 * width) and (tokens, width)."""
    for row in prange(len(out)):
        silu_and_multiply_row(row, gate_up, out)


@register_jitable
def silu_and_multiply_row(row: int, gate_up: Stored, out: Stored) -> None:
    """One token of `silu_and_multiply`."""
    width = out.shape[1]
    for x in range(width):
        gate = widen(gate_up[row, x])
        small = power_of_two(-abs(gate) * BASE_TWO)  # never overflows
        shrunk = gate * ((np.float32(1) if gate >= 0 else small) / (np.float32(1) + small))
        activated = narrow(shrunk, out[row, x])
        out[row, x] = narrow(widen(activated) * widen(gate_up[row, width + x]), out[row, x])


@njit(parallel=True, fastmath=True, error_model="numpy", nogil=True, cache=True)
def paged_decode(
    query: Stored, keys: Stored, values: Stored, tables: Ints, lengths: Ints, threads: int, out: Stored
) -> None:
    """Each row of `query` (rows, heads, width) attends to its whole context in the paged cache."""
    rows, kv_heads = len(out), keys.shape[1]
    share = max(1, kv_heads // threads)
    for item in prange(rows * ((kv_heads + share - 1) // share)):
        # heads vary slowest: threads get equal shares of every row, however lengths differ
        first = item // rows * share
        last = min(first + share, kv_heads)
        _decode_heads(item % rows, first, last, query, keys, values, tables, lengths, out)


@njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
def _decode_heads(
    row: int, first_head: int, last_head: int, query: Stored, keys: Stored, values: Stored, tables: Ints,
    lengths: Ints, out: Stored,
) -> None:  # fmt: skip
    """The queries of some KV heads of one row: all scores, their softmax, the values mixed by it.

    Heads of one block lie side by side and are read together, since long runs of memory are read fastest. Arrays
    are used without views into them: each would be counted in and out. While a block is used the next one is
    fetched: keys, then values, then the keys of the row that this thread is likely to do next.
    """
    width, length, size, group = query.shape[2], lengths[row], keys.shape[2], query.shape[1] // keys.shape[1]
    rows, start = (last_head - first_head) * group, first_head * group
    scaled = np.empty((rows, width), np.float32)
    for g in range(rows):
        for x in range(width):
            scaled[g, x] = widen(query[row, start + g, x]) * (BASE_TWO / np.sqrt(np.float32(width)))
    scores, mixed = np.empty((rows, length), np.float32), np.zeros((rows, width), np.float32)
    blocks, after = (length + size - 1) // size, tables[(row + 1) % len(lengths), 0]
    for number in range(blocks):
        first, more = number * size, number + 1 < blocks
        block, tokens = tables[row, number], min(size, length - first)
        following = tables[row, number + 1] if more else tables[row, 0]
        for head in range(first_head, last_head):
            low = (head - first_head) * group
            _score_block(keys, block, head, tokens, scaled, low, group, scores, first, values, following, more)
    _soften(scores)
    for number in range(blocks):
        first, more = number * size, number + 1 < blocks
        block, tokens = tables[row, number], min(size, length - first)
        following = tables[row, number + 1] if more else after
        for head in range(first_head, last_head):
            low = (head - first_head) * group
            _mix_block(values, block, head, tokens, scores, low, group, first, mixed, keys, following, more)
    for g in range(rows):
        for x in range(width):
            out[row, (start + g) * width + x] = narrow(mixed[g, x], out[row, x])


@register_jitable
def _score_block(
    keys: Stored, block: int, head: int, tokens: int, scaled: Floats, low: int, group: int, scores: Floats,
    first: int, values: Stored, following: int, more: bool,
) -> None:  # fmt: skip
    """Scores of a block's first tokens with the queries from `low` on, while what follows is on its way."""
    high, fours = low + group, tokens // 4 * 4
    lines = 4 * keys.shape[3] * keys.itemsize // LINE_BYTES
    for t in range(0, fours, 4):
        if more:
            fetch(keys, (following, head, t, 0), lines)  # pyright: ignore[reportCallIssue]  # numba adds the context
        else:
            fetch(values, (following, head, t, 0), lines)  # pyright: ignore[reportCallIssue]  # likewise
        for g in range(low, high, 2):
            _score_four(keys, block, head, t, scaled, g, min(g + 1, high - 1), scores, first + t)
    for t in range(fours, tokens):
        for g in range(low, high):
            score = np.float32(0)
            for x in range(scaled.shape[1]):
                score += widen(keys[block, head, t, x]) * scaled[g, x]
            scores[g, first + t] = score


@register_jitable
def _mix_block(
    values: Stored, block: int, head: int, tokens: int, scores: Floats, low: int, group: int, first: int,
    mixed: Floats, keys: Stored, following: int, more: bool,
) -> None:  # fmt: skip
    """Add the weighted values of a block's first tokens, while what follows is on its way."""
    high, fours = low + group, tokens // 4 * 4
    lines = 4 * keys.shape[3] * keys.itemsize // LINE_BYTES
    for t in range(0, fours, 4):
        if more:
            fetch(values, (following, head, t, 0), lines)  # pyright: ignore[reportCallIssue]  # numba adds the context
        else:
            fetch(keys, (following, head, t, 0), lines)  # pyright: ignore[reportCallIssue]  # likewise
        for g in range(low, high - 1, 2):
            _mix_four(values, block, head, t, scores, g, g + 1, first + t, mixed)
        if group % 2:
            _mix_four_alone(values, block, head, t, scores, high - 1, first + t, mixed)
    for t in range(fours, tokens):
        for g in range(low, high):
            for x in range(mixed.shape[1]):
                mixed[g, x] += scores[g, first + t] * widen(values[block, head, t, x])


@register_jitable
def _score_four(
    keys: Stored, block: int, head: int, t: int, scaled: Floats, g: int, h: int, scores: Floats, at: int
) -> None:
    """Scores of four neighbours in a block and two queries: eight sums that do not wait for each other."""
    zero = np.float32(0)
    g0, g1, g2, g3, h0, h1, h2, h3 = zero, zero, zero, zero, zero, zero, zero, zero
    for x in range(scaled.shape[1]):
        a, b = widen(keys[block, head, t, x]), widen(keys[block, head, t + 1, x])
        c, d = widen(keys[block, head, t + 2, x]), widen(keys[block, head, t + 3, x])
        p, q = scaled[g, x], scaled[h, x]
        g0, g1, g2, g3 = g0 + a * p, g1 + b * p, g2 + c * p, g3 + d * p
        h0, h1, h2, h3 = h0 + a * q, h1 + b * q, h2 + c * q, h3 + d * q
    scores[g, at], scores[g, at + 1], scores[g, at + 2], scores[g, at + 3] = g0, g1, g2, g3
    scores[h, at], scores[h, at + 1], scores[h, at + 2], scores[h, at + 3] = h0, h1, h2, h3


@register_jitable
def _mix_four(
    values: Stored, block: int, head: int, t: int, scores: Floats, g: int, h: int, at: int, mixed: Floats
) -> None:
    """Values of four neighbours in a block for two queries: each is loaded once, and so is the sum."""
    g0, g1, g2, g3 = scores[g, at], scores[g, at + 1], scores[g, at + 2], scores[g, at + 3]
    h0, h1, h2, h3 = scores[h, at], scores[h, at + 1], scores[h, at + 2], scores[h, at + 3]
    for x in range(mixed.shape[1]):
        a, b = widen(values[block, head, t, x]), widen(values[block, head, t + 1, x])
        c, d = widen(values[block, head, t + 2, x]), widen(values[block, head, t + 3, x])
        mixed[g, x] += (g0 * a + g1 * b) + (g2 * c + g3 * d)
        mixed[h, x] += (h0 * a + h1 * b) + (h2 * c + h3 * d)


@register_jitable
def _mix_four_alone(
    values: Stored, block: int, head: int, t: int, scores: Floats, g: int, at: int, mixed: Floats
) -> None:
    """The same for the last of an odd number of queries."""
    a, b, c, d = scores[g, at], scores[g, at + 1], scores[g, at + 2], scores[g, at + 3]
    for x in range(mixed.shape[1]):
        low = a * widen(values[block, head, t, x]) + b * widen(values[block, head, t + 1, x])
        high = c * widen(values[block, head, t + 2, x]) + d * widen(values[block, head, t + 3, x])
        mixed[g, x] += low + high


@register_jitable
def _soften(scores: Floats) -> None:
    """Each row of scores, of base two, becomes weights that sum to one."""
    for g in range(len(scores)):
        highest = highest_of(scores, g, scores.shape[1])
        total = np.float32(0)
        for t in range(scores.shape[1]):
            scores[g, t] = power_of_two(scores[g, t] - highest)
            total += scores[g, t]
        for t in range(scores.shape[1]):
            scores[g, t] /= total
