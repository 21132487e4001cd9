"""SnapKV: the last queries of a prompt vote on what stays (Li et al., NeurIPS 2024, arXiv 2404.14469).

The official code repeats keys to all query heads first, and so loses the saving of grouped queries; here, as in
NVIDIA's kvpress, the query heads of a KV head vote together and their mean decides.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling

from mooncake_lab.compression.eviction import group_mean, hold_kept, window_attention, with_window
from mooncake_lab.compression.held import LayerPool, PagedLayer, PrefilledPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV:
    """Keep `capacity` tokens per head: the observation window, and those it votes for.

    Raises:
        ValueError: when the window does not fit the capacity or the kernel is even.
    """

    capacity: int
    """Tokens kept per head, the window among them (the paper's formula has a ratio, its code this)."""
    window: int = 16
    kernel: int = 5
    """Width of the pooling that spreads a vote to its neighbours; 1 means no pooling."""
    pooling: Literal["max", "avg"] = "max"

    def __post_init__(self) -> None:
        if not 0 < self.window < self.capacity:
            raise ValueError(
                f"SnapKV.window is {self.window}; at least 1 and less than capacity, {self.capacity}, is needed"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"SnapKV.kernel is {self.kernel}; a positive odd number is needed")

    def hold(self, prefilled: PrefilledPrompt, pool: LayerPool) -> tuple[PagedLayer, ...]:
        """The kept tokens, in blocks."""
        return hold_kept(prefilled, pool, self.keep)

    def keep(self, prefilled: PrefilledPrompt, layer: int) -> torch.Tensor | None:
        """The positions that each KV head keeps; None if the prompt is shorter than the capacity."""
        keys = prefilled.keys[layer]
        if keys.shape[1] < self.capacity:
            return None
        scores = group_mean(pooled(self.votes(prefilled, layer), self.kernel, self.pooling), len(keys))
        chosen = scores.topk(self.capacity - self.window, dim=-1).indices
        return with_window(chosen, keys.shape[1], self.window)

    def votes(self, prefilled: PrefilledPrompt, layer: int) -> torch.Tensor:
        """The sum of the window's attention to each earlier token, (query_heads, n - window)."""
        queries = prefilled.queries[layer][-self.window :]
        weights = window_attention(queries, prefilled.keys[layer])
        return weights[..., : -self.window].sum(dim=1)


def pooled(votes: torch.Tensor, kernel: int, pooling: Literal["max", "avg"]) -> torch.Tensor:
    """Votes (heads, tokens) smoothed along tokens, same shape; beyond the ends there is nothing to vote for."""
    if kernel == 1:
        return votes
    pool = F.max_pool1d if pooling == "max" else F.avg_pool1d
    return pool(votes[None], kernel, stride=1, padding=kernel // 2)[0]
