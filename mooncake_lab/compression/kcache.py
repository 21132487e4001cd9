"""KCache: keys stay, values wait in host memory and a few come back each step (He & Wu, arXiv 2404.18057).

The paper's text leaves open whether weights are renormalised and whether the query heads of a KV head fetch
together; both are knobs here. Prefill is exact, and so are the scores: nothing is ever lost, only not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from mooncake_lab.compression.eviction import window_attention
from mooncake_lab.compression.held import LayerHold, LayerPool, NewTokens, PrefilledPrompt, rotate_new
from mooncake_lab.engine.backends.protocol import Backend

_ROOM_STEP = 64
"""Tokens an arena grows by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KCache:
    """Fetch the values of the `top` largest weights.

    Raises:
        ValueError: when `top` is below 1.
    """

    top: int = 64
    shared: bool = True
    """Whether the query heads of a KV head fetch one set, chosen by their mean weight, or each its own."""
    renormalise: bool = True

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ValueError(f"{self}: at least one value must be fetched")

    @property
    def window(self) -> int:
        """It asks no queries."""
        return 0

    def hold(self, prefilled: PrefilledPrompt, pool: LayerPool) -> tuple["OffloadedLayer", ...]:
        """Keys where the model computes, values in host memory (pinned, where there is a GPU)."""
        del pool
        return tuple(
            OffloadedLayer(self, Arena(keys), Arena(values, host=True))
            for keys, values in zip(prefilled.keys, prefilled.values, strict=True)
        )

    def mix(self, weights: torch.Tensor, values: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, int]:
        """Attention outputs from the fetched values alone, and how many bytes were fetched.

        Args:
            weights: float32 (query_heads, tokens, n), on the device.
            values: (kv_heads, n, head_width), in host memory.
            kv_heads: of the model.

        Returns:
            float32 (query_heads, tokens, head_width), and bytes.
        """
        heads, tokens, context = weights.shape
        grouped = weights.unflatten(0, (kv_heads, -1))
        ranked = grouped.mean(dim=1, keepdim=True) if self.shared else grouped
        chosen = ranked.topk(min(self.top, context), dim=-1).indices  # (kv_heads, sets, tokens, top)
        places = chosen.to(values.device)
        head = torch.arange(kv_heads, device=values.device)[:, None, None, None]
        fetched = values[head, places].to(weights.device)
        taken = grouped.gather(-1, chosen.expand(-1, grouped.shape[1], -1, -1))
        if self.renormalise:
            taken = taken / taken.sum(dim=-1, keepdim=True)
        mixed = (taken[..., None] * fetched.float()).sum(dim=-2)
        return mixed.reshape(heads, tokens, -1), fetched.nbytes


class Arena:
    """Rows (kv_heads, tokens, head_width) that grow at the end. Mutable.

    Args:
        rows: the first ones.
        host: whether they lie in host memory, pinned where there is a GPU.
    """

    def __init__(self, rows: torch.Tensor, *, host: bool = False) -> None:
        self._host = host
        self.used = 0
        self._buffer = self._make(rows, rows.shape[1])
        self.append(rows)

    @property
    def bytes(self) -> int:
        """Bytes of its memory, the unused part included."""
        return self._buffer.nbytes

    @property
    def rows(self) -> torch.Tensor:
        """All rows, a view."""
        return self._buffer[:, : self.used]

    def append(self, rows: torch.Tensor) -> None:
        """More rows."""
        wanted = self.used + rows.shape[1]
        if wanted > self._buffer.shape[1]:
            larger = self._make(rows, wanted)
            larger[:, : self.used] = self.rows
            self._buffer = larger
        self._buffer[:, self.used : wanted] = rows
        self.used = wanted

    def release(self) -> None:
        """Its memory is free."""
        self._buffer, self.used = self._buffer[:, :0].clone(), 0

    def _make(self, like: torch.Tensor, tokens: int) -> torch.Tensor:
        shape = (like.shape[0], -(-tokens // _ROOM_STEP) * _ROOM_STEP, like.shape[2])
        if not self._host:
            return like.new_empty(shape)
        return torch.empty(shape, dtype=like.dtype, pin_memory=torch.cuda.is_available())


@dataclass(slots=True, eq=False)
class OffloadedLayer:
    """One layer of a request. Mutable: it grows, and counts what it fetches."""

    how: KCache
    keys: Arena
    values: Arena
    fetched_bytes: int = field(default=0)

    @property
    def tokens(self) -> int:
        """Whose keys it holds."""
        return self.keys.used

    @property
    def device_bytes(self) -> int:
        """Keys only."""
        return self.keys.bytes

    @property
    def host_bytes(self) -> int:
        """Values only."""
        return self.values.bytes

    def release(self) -> None:
        """Both sides are free."""
        self.keys.release()
        self.values.release()

    def attend(self, others: Sequence[LayerHold], qkv: torch.Tensor, new: NewTokens, ops: Backend) -> torch.Tensor:
        """Exact weights over all keys; values of the largest alone."""
        holds = cast("Sequence[OffloadedLayer]", (self, *others))
        query, fresh = rotate_new(ops, qkv, new)
        mixed: list[torch.Tensor] = []
        for row, (hold, queries) in enumerate(zip(holds, query.split(new.counts), strict=True)):
            hold.keys.append(fresh.keys[row])
            hold.values.append(fresh.values[row].to(hold.values.rows.device))
            weights = window_attention(queries, hold.keys.rows)
            out, fetched = hold.how.mix(weights, hold.values.rows, new.config.kv_heads)
            hold.fetched_bytes += fetched
            mixed.append(out.transpose(0, 1).flatten(1))
        return torch.cat(mixed).to(query.dtype)
