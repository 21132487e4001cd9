"""Two methods after one another: first which tokens stay, then how what stays is kept."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from mooncake_lab.compression.held import LayerHold, LayerPool, PrefilledPrompt, take
from mooncake_lab.compression.minicache import MiniCache
from mooncake_lab.compression.session import Method


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
