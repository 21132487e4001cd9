"""Token eviction: what every method that drops whole tokens of a head shares.

A method of this kind only says which tokens each KV head of each layer keeps; they move into the front of new
blocks, all others are gone, and the position counter keeps the true length.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from mooncake_lab.compression.held import LayerHold, LayerPool, PagedLayer, PrefilledPrompt, take
from mooncake_lab.compression.minicache import MiniCache
from mooncake_lab.compression.session import Method


def window_attention(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Attention weights of the last queries of a prompt, each seeing what came before it and itself.

    Args:
        queries: (w, query_heads, head_width), of the last w tokens.
        keys: (kv_heads, n, head_width), of all n tokens.

    Returns:
        float32 (query_heads, w, n); query head h belongs to KV head `h // (query_heads / kv_heads)`.
    """
    window, heads, width = queries.shape
    context = keys.shape[1]
    grouped = queries.float().view(window, keys.shape[0], -1, width).permute(1, 2, 0, 3)
    scores = torch.einsum("hgwd,hnd->hgwn", grouped, keys.float()) * width**-0.5
    seen = torch.ones(window, context, dtype=torch.bool, device=keys.device).tril(context - window)
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1).reshape(heads, window, context)


def group_mean(per_query_head: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The mean over the query heads of each KV head: (query_heads, ...) -> (kv_heads, ...)."""
    return per_query_head.unflatten(0, (kv_heads, -1)).mean(dim=1)


Keep = Callable[[PrefilledPrompt, int], torch.Tensor | None]
"""From a prefill and a layer: int64 (kv_heads, kept), ascending places of what stays; None keeps everything."""


def hold_kept(prefilled: PrefilledPrompt, pool: LayerPool, keep: Keep) -> tuple[PagedLayer, ...]:
    """The kept tokens of every layer, in blocks."""
    layers: list[PagedLayer] = []
    for layer, (keys, values) in enumerate(zip(prefilled.keys, prefilled.values, strict=True)):
        kept = keep(prefilled, layer)
        sides = (keys, values) if kept is None else (take(keys, kept), take(values, kept))
        layers.append(PagedLayer.of(pool, *sides))
    return tuple(layers)


def with_window(chosen: torch.Tensor, context: int, window: int) -> torch.Tensor:
    """Chosen places (kv_heads, k) in order, then the last `window` of `context` places."""
    recent = torch.arange(context - window, context, device=chosen.device).expand(len(chosen), -1)
    return torch.cat((chosen.sort(dim=-1).values, recent), dim=-1)


class Eviction(Method, Protocol):
    """A method that only says which tokens stay."""

    def keep(self, prefilled: PrefilledPrompt, layer: int) -> torch.Tensor | None:
        """int64 (kv_heads, kept), ascending; None keeps everything."""
        ...


@dataclass(frozen=True, slots=True)
class Combined:
    """Evict, then keep the rest in another way, e.g. SnapKV and KCache.

    Raises:
        ValueError: for MiniCache after an eviction, whose layers no longer hold the same tokens: nothing to merge.
    """

    eviction: Eviction
    then: Method

    def __post_init__(self) -> None:
        if isinstance(self.then, MiniCache):
            raise ValueError(  # noqa: TRY004  # a good type, in a bad place
                f"{self.then} cannot follow {self.eviction}: neighbouring layers must hold the same tokens"
            )

    @property
    def window(self) -> int:
        """The eviction's."""
        return self.eviction.window

    def hold(self, prefilled: PrefilledPrompt, pool: LayerPool) -> tuple[LayerHold, ...]:
        """What stays, kept the second way."""
        keys, values = list(prefilled.keys), list(prefilled.values)
        for layer in range(len(keys)):
            kept = self.eviction.keep(prefilled, layer)
            if kept is not None:
                keys[layer], values[layer] = take(keys[layer], kept), take(values[layer], kept)
        return self.then.hold(replace(prefilled, keys=tuple(keys), values=tuple(values)), pool)
