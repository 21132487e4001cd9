"""One iteration's tokens, packed: new tokens of many requests side by side, and where their context lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.core import blocks_for
from mooncake_lab.engine.kvcache import LayerCache


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one request: positions `cached` up to `cached + len(tokens)`, and its block table."""

    tokens: npt.NDArray[np.int64]
    cached: int
    """Tokens before them, already in the KVCache."""
    blocks: npt.NDArray[np.int32]
    """Blocks of the whole context, front to back."""
    emits: bool
    """Whether logits of the last of them are wanted."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a piece of several tokens lies in the packed batch; single tokens have no span."""

    table_row: int
    start: int
    tokens: int
    cached: int


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Where the contexts of all spans lie, one after the other, as flash attention wants packed requests."""

    blocks: torch.Tensor
    """int64 (context tokens,): the block of every token that the spans attend to."""
    offsets: torch.Tensor
    """int64 (context tokens,): its place in that block."""
    query_starts: torch.Tensor
    """int32 (spans + 1,): rows at which spans begin, counted from the first of them."""
    context_starts: torch.Tensor
    """int32 (spans + 1,): the same for their contexts."""
    longest_query: int
    longest_context: int
    own: "OwnKV | None"
    """None where a span has tokens before it."""


@dataclass(slots=True)
class OwnKV:
    """New keys and values of a batch whose spans attend to nothing else: they need not be gathered from blocks.

    A backend that uses this fills it when it stores a layer, and takes from it when that layer attends. Mutable.
    """

    layer: LayerCache | None = None
    """What it was filled for."""
    both: torch.Tensor | None = None
    """Shape (tokens, 2 * kv_heads, head_width): keys, then values, of all tokens of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Tensors of one iteration on the device that runs it; single-token pieces come first."""

    tokens: torch.Tensor
    """int64 (tokens,): token ids."""
    positions: torch.Tensor
    """int64 (tokens,): place of each token in its request."""
    slots: torch.Tensor
    """int64 (tokens,): where its key and value go, `block * block_size + offset`."""
    tables: torch.Tensor
    """int32 (pieces, longest table): block tables, padded with zeros."""
    lengths: torch.Tensor
    """int32 (pieces,): context of each piece, its new tokens included."""
    singles: int
    """How many leading rows are pieces of one token."""
    spans: tuple[Span, ...]
    """The longer pieces."""
    logit_rows: torch.Tensor
    """int64 (emitting pieces,): rows whose logits are wanted, in the order of the pieces that were given."""
    context: SpanContext | None
    """Context of the spans; None without spans."""


def pack(pieces: Sequence[Piece], block_size_tokens: int, device: torch.device) -> PackedBatch:
    """Pack the pieces of an iteration; `logit_rows` keeps the order they were given in."""
    counts = [len(piece.tokens) for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda i: counts[i] > 1)
    singles = counts.count(1)
    packed = [pieces[i] for i in order]
    cached = np.array([piece.cached for piece in packed], dtype=np.int64)
    new = np.array([counts[i] for i in order], dtype=np.int64)
    if singles == len(pieces):
        starts, rows, positions = range(singles), np.arange(singles), cached
    else:
        starts = (np.cumsum(new) - new).tolist()
        rows = np.repeat(np.arange(len(packed)), new)
        positions = np.arange(len(rows)) + np.repeat(cached - starts, new)
    lengths = cached + new
    tables = _tables(packed, lengths.tolist(), block_size_tokens)
    blocks, offsets = np.divmod(positions, block_size_tokens)
    last_row = {piece: start + counts[piece] - 1 for piece, start in zip(order, starts, strict=True)}
    return PackedBatch(
        tokens=_on(np.concatenate([piece.tokens for piece in packed]), device),
        positions=_on(positions, device),
        slots=_on(tables[rows, blocks].astype(np.int64) * block_size_tokens + offsets, device),
        tables=_on(tables, device),
        lengths=_on(lengths.astype(np.int32), device),
        singles=singles,
        spans=tuple(
            Span(place, starts[place], counts[order[place]], packed[place].cached)
            for place in range(singles, len(packed))
        ),
        logit_rows=_on(np.array([last_row[i] for i, p in enumerate(pieces) if p.emits], dtype=np.int64), device),
        context=_context(tables[singles:], cached[singles:], new[singles:], block_size_tokens, device),
    )


def _context(
    tables: npt.NDArray[np.int32],
    cached: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    block_size_tokens: int,
    device: torch.device,
) -> SpanContext | None:
    if not len(tables):
        return None
    lengths = cached + counts
    starts = np.concatenate(([0], np.cumsum(lengths)))
    rows = np.repeat(np.arange(len(tables)), lengths)
    positions = np.arange(starts[-1]) - starts[rows]
    places, offsets = np.divmod(positions, block_size_tokens)
    query_starts = np.concatenate(([0], np.cumsum(counts)))
    return SpanContext(
        blocks=_on(tables[rows, places].astype(np.int64), device),
        offsets=_on(offsets, device),
        query_starts=_on(query_starts.astype(np.int32), device),
        context_starts=_on(starts.astype(np.int32), device),
        longest_query=int(counts.max()),
        longest_context=int(lengths.max()),
        own=None if cached.any() else OwnKV(),
    )


def _tables(pieces: Sequence[Piece], lengths: Sequence[int], block_size_tokens: int) -> npt.NDArray[np.int32]:
    """Block tables of one width, padded with zeros."""
    widths = [blocks_for(length, block_size_tokens) for length in lengths]
    tables = np.zeros((len(pieces), max(widths)), dtype=np.int32)
    for row, (piece, width) in enumerate(zip(pieces, widths, strict=True)):
        tables[row, :width] = piece.blocks[:width]
    return tables


def _on(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
