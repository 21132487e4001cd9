"""The operations between the matrix products of a layer, compiled for GPU with Triton.

Decode attention is split over the context: each program takes one request, one KV head and one stretch of its
blocks; a second kernel joins the stretches by their log-sum-exps. So one long request keeps the whole GPU busy.
All sizes that a captured graph fixes are arguments of the launch; all that change are read from tensors.
"""

# triton comes with torch on GPU machines only; its decorators, pointers and launches are untyped
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202, N803  # pointers have no type; capitals are what a kernel is compiled for

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl


class DecodeTile(NamedTuple):
    """How a program of decode attention goes through its stretch."""

    tokens: int
    """Read at once; a power of two, 16 at least."""
    warps: int
    stages: int
    """Of Triton's software pipeline; the load that depends on the block table takes two of them."""


DECODE_TILE: Final = DecodeTile(tokens=64, warps=4, stages=3)
WIDE_DECODE_TILE: Final = DecodeTile(tokens=32, warps=4, stages=3)
"""For heads wider than 128, which would spill registers."""
DECODE_TILES: Final = (
    DECODE_TILE,
    DecodeTile(tokens=64, warps=4, stages=2),
    DecodeTile(tokens=64, warps=4, stages=5),
    DecodeTile(tokens=64, warps=2, stages=3),
    DecodeTile(tokens=128, warps=4, stages=3),
    DecodeTile(tokens=32, warps=4, stages=5),
    DecodeTile(tokens=128, warps=8, stages=3),
)
"""Those that are worth measuring for heads of 128; all compute the same."""


@triton.jit
def _add_norm(hidden, update, weight, normed, epsilon, WIDTH: tl.constexpr, ADD: tl.constexpr, SPAN: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, SPAN)
    inside = columns < WIDTH
    number = tl.load(hidden + row * WIDTH + columns, inside, 0.0).to(tl.float32)
    if ADD:
        number += tl.load(update + row * WIDTH + columns, inside, 0.0).to(tl.float32)
        number = number.to(hidden.dtype.element_ty).to(tl.float32)
        tl.store(hidden + row * WIDTH + columns, number, inside)
    scale = tl.rsqrt(tl.sum(number * number) / WIDTH + epsilon)
    shrunk = (number * scale).to(hidden.dtype.element_ty).to(tl.float32)
    scaled = shrunk * tl.load(weight + columns, inside, 0.0).to(tl.float32)
    tl.store(normed + row * WIDTH + columns, scaled, inside)


@triton.jit
def _rotate_and_store(
    qkv, cosines, sines, positions, slots, keys, values, query, own, OWN: tl.constexpr,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One program a token and head; heads are queries, then keys, then values, and `own` has the latter two."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = WIDTH // 2
    columns = tl.arange(0, SPAN)
    inside = columns < half
    source = qkv + (row * (QUERY_HEADS + 2 * KV_HEADS) + head) * WIDTH
    first = tl.load(source + columns, inside, 0.0)
    second = tl.load(source + half + columns, inside, 0.0)
    slot = tl.load(slots + row)
    inside_and_real = inside & (slot >= 0)  # a padded row of a captured graph has no slot
    kv_head = (head - QUERY_HEADS) % KV_HEADS
    stored = ((slot // SIZE * KV_HEADS + kv_head) * SIZE + slot % SIZE) * WIDTH
    beside = (row * 2 * KV_HEADS + head - QUERY_HEADS) * WIDTH
    if head >= QUERY_HEADS + KV_HEADS:
        tl.store(values + stored + columns, first, inside_and_real)
        tl.store(values + stored + half + columns, second, inside_and_real)
        if OWN:
            tl.store(own + beside + columns, first, inside)
            tl.store(own + beside + half + columns, second, inside)
    else:
        angle = tl.load(positions + row) * half
        cosine = tl.load(cosines + angle + columns, inside, 0.0)
        sine = tl.load(sines + angle + columns, inside, 0.0)
        turned = first.to(tl.float32) * cosine - second.to(tl.float32) * sine
        turned_half = second.to(tl.float32) * cosine + first.to(tl.float32) * sine
        if head < QUERY_HEADS:
            target = query + (row * QUERY_HEADS + head) * WIDTH
            tl.store(target + columns, turned, inside)
            tl.store(target + half + columns, turned_half, inside)
        else:
            tl.store(keys + stored + columns, turned, inside_and_real)
            tl.store(keys + stored + half + columns, turned_half, inside_and_real)
            if OWN:
                tl.store(own + beside + columns, turned, inside)
                tl.store(own + beside + half + columns, turned_half, inside)


@triton.jit
def _silu_and_multiply(gate_up, out, WIDTH: tl.constexpr, SPAN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = columns < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, inside, 0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + columns, activated * up, inside)


@triton.jit(do_not_specialize=["table_width"])  # else widths of 1, of multiples of 16 and others compile anew
def _decode_stretch(
    query, keys, values, tables, lengths, mixed, sums, scale, table_width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One request, one KV head, one stretch of its context: an online softmax over tiles."""
    row, kv_head, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    stretches = tl.num_programs(2)  # not compiled in, so that all batch sizes share one kernel
    length = tl.load(lengths + row)
    tokens = tl.cdiv(tl.cdiv(length, stretches), TILE) * TILE
    start, stop = stretch * tokens, tl.minimum(stretch * tokens + tokens, length)
    group, columns, tile = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, TILE)
    wanted = (group < GROUP)[:, None] & (columns < WIDTH)[None, :]
    heads = (row * KV_HEADS + kv_head) * GROUP + group
    asked = tl.load(query + heads[:, None] * WIDTH + columns[None, :], wanted, 0.0)
    peak = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sum_ = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(start, stop, TILE):
        at = begin + tile
        seen = at < stop
        block = tl.load(tables + row * table_width + at // SIZE, seen, 0).to(tl.int64)
        places = ((block * KV_HEADS + kv_head) * SIZE + at % SIZE) * WIDTH
        valid = seen[:, None] & (columns < WIDTH)[None, :]
        key = tl.load(keys + places[:, None] + columns[None, :], valid, 0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -1e30)
        highest = tl.maximum(peak, tl.max(scores, 1))
        shares = tl.exp(scores - highest[:, None])
        kept = tl.exp(peak - highest)
        total = total * kept + tl.sum(shares, 1)
        value = tl.load(values + places[:, None] + columns[None, :], valid, 0.0)
        sum_ = sum_ * kept[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        peak = highest
    # an empty stretch keeps a sum of zero and a log-sum-exp that weighs nothing
    safe = tl.maximum(total, 1e-30)
    target = (heads * stretches + stretch)[:, None] * WIDTH + columns[None, :]
    tl.store(mixed + target, sum_ / safe[:, None], wanted)
    tl.store(sums + heads * stretches + stretch, peak + tl.log(safe), group < GROUP)


@triton.jit
def _join_stretches(
    mixed, sums, out, STRETCHES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """One program a request and query head: stretches weighted by their log-sum-exps."""
    head, parts, columns = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there = parts < STRETCHES
    weight = tl.load(sums + head * STRETCHES + parts, there, -1e30)
    weight = tl.exp(weight - tl.max(weight, 0))
    weight = tl.where(there, weight / tl.sum(weight, 0), 0.0)
    inside = there[:, None] & (columns < WIDTH)[None, :]
    part = tl.load(mixed + (head * STRETCHES + parts)[:, None] * WIDTH + columns[None, :], inside, 0.0)
    tl.store(out + head * WIDTH + columns, tl.sum(part * weight[:, None], 0), columns < WIDTH)


def add_norm(
    hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float, normed: torch.Tensor
) -> None:
    """`hidden += update`; `normed = rms_norm(hidden) * weight`."""
    tokens, width = hidden.shape
    if tokens:
        span, added = triton.next_power_of_2(width), hidden if update is None else update
        _add_norm[(tokens,)](hidden, added, weight, normed, epsilon, width, update is not None, span, num_warps=8)


def rotate_and_store(
    qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, own: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Rotated queries to `query` (tokens, heads, width); keys and values to their slots in the cache.

    Where there is `own` (tokens, 2 * kv_heads, width), rotated keys and then values go there, too.
    """
    tokens, query_heads, width = query.shape
    kv_heads, size = keys.shape[1], keys.shape[2]
    _rotate_and_store[tokens, query_heads + 2 * kv_heads](
        qkv, cosines, sines, positions, slots, keys, values, query, query if own is None else own, own is not None,
        query_heads, kv_heads, width, size, triton.next_power_of_2(width // 2), num_warps=1,
    )  # fmt: skip


def silu_and_multiply(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """`out = silu(gate) * up`."""
    tokens, width = out.shape
    if tokens:
        span = min(1024, triton.next_power_of_2(width))
        _silu_and_multiply[tokens, triton.cdiv(width, span)](gate_up, out, width, span)


def paged_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor, stretches: int, tile: DecodeTile | None = None,
) -> None:  # fmt: skip
    """Each row of `query` (rows, heads, width) attends to its whole context, cut into `stretches`."""
    rows, heads, width = query.shape
    kv_heads, size = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    mixed = torch.empty((rows, heads, stretches, width), device=query.device, dtype=torch.float32)
    sums = torch.empty((rows, heads, stretches), device=query.device, dtype=torch.float32)
    columns = max(16, triton.next_power_of_2(width))
    tile = tile or (DECODE_TILE if width <= 128 else WIDE_DECODE_TILE)
    _decode_stretch[rows, kv_heads, stretches](
        query, keys, values, tables, lengths, mixed, sums, width**-0.5, tables.shape[1],
        kv_heads, group, width, size,
        max(16, triton.next_power_of_2(group)), columns, tile.tokens, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _join_stretches[(rows * heads,)](
        mixed, sums, out, stretches, width, triton.next_power_of_2(stretches), columns, num_warps=4
    )
