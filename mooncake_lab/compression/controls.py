"""Controls: what a method must beat to have earned its name, and the oracle that nothing beats."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from mooncake_lab.compression.eviction import hold_kept
from mooncake_lab.compression.held import LayerPool, PagedLayer, PrefilledPrompt, hold_all


@dataclass(frozen=True, slots=True)
class FullCache:
    """Nothing is dropped."""

    @property
    def window(self) -> int:
        """It asks no queries."""
        return 0

    def hold(self, prefilled: PrefilledPrompt, pool: LayerPool) -> tuple[PagedLayer, ...]:
        """All of it."""
        return hold_all(prefilled, pool)


class _Places(ABC):
    """A control that keeps some places of every layer and looks at no attention."""

    __slots__ = ()

    @property
    def window(self) -> int:
        """It asks no queries."""
        return 0

    def hold(self, prefilled: PrefilledPrompt, pool: LayerPool) -> tuple[PagedLayer, ...]:
        """The kept tokens, in blocks."""
        return hold_kept(prefilled, pool, self.keep)

    @abstractmethod
    def keep(self, prefilled: PrefilledPrompt, layer: int) -> torch.Tensor | None:
        """Places each KV head keeps, ascending; None keeps everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTokens(_Places):
    """Any tokens, other ones in every layer and head, and the last few."""

    capacity: int
    recent: int = 16
    seed: int = 0

    def keep(self, prefilled: PrefilledPrompt, layer: int) -> torch.Tensor | None:
        """Places each KV head keeps; they depend on the seed, the layer and the prompt's length alone."""
        heads, context, _ = prefilled.keys[layer].shape
        if context < self.capacity:
            return None
        rng = np.random.default_rng([self.seed, layer, context])
        older = context - self.recent
        rows = [np.sort(rng.permutation(older)[: self.capacity - self.recent]) for _ in range(heads)]
        recent = np.arange(older, context)
        return torch.from_numpy(np.stack([np.concatenate((row, recent)) for row in rows]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentTokens(_Places):
    """The last tokens, and the first few if `sinks` (StreamingLLM: Xiao et al., ICLR 2024, arXiv 2309.17453).

    StreamingLLM also renumbers positions inside the cache, since its text never ends; here prompts fit the model's
    window and tokens keep their true positions.
    """

    capacity: int
    sinks: int = 0

    def keep(self, prefilled: PrefilledPrompt, layer: int) -> torch.Tensor | None:
        """Places each KV head keeps, the same for all."""
        heads, context, _ = prefilled.keys[layer].shape
        if context < self.capacity:
            return None
        places = torch.cat((torch.arange(self.sinks), torch.arange(context - self.capacity + self.sinks, context)))
        return places.expand(heads, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle(_Places):
    """Keep the tokens that the answer depends on, then sinks, then the last tokens.

    The author of the question lists the tokens in `evidence`. In practice they are unknown, so this is no usable
    method; it shows how small a cache could be.
    """

    capacity: int
    evidence: tuple[int, ...]
    sinks: int = 4

    def keep(self, prefilled: PrefilledPrompt, layer: int) -> torch.Tensor | None:
        """Places each KV head keeps, the same for all."""
        heads, context, _ = prefilled.keys[layer].shape
        if context < self.capacity:
            return None
        wanted = dict.fromkeys((*self.evidence, *range(self.sinks), *reversed(range(context))))
        places = sorted(list(wanted)[: self.capacity])
        return torch.tensor(places).expand(heads, -1)
