"""A layer that is rebuilt each time it is read: a smaller form of the prompt, and newer tokens in blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from mooncake_lab.compression.dense import attend_dense
from mooncake_lab.compression.held import LayerHold, NewTokens
from mooncake_lab.compression.paged import PagedLayer, append
from mooncake_lab.engine.backends.protocol import Backend

Restore = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Gives keys and values of the prompt, each (kv_heads, tokens, head_width)."""


@dataclass(slots=True, eq=False)
class RestoredLayer:
    """One layer of a request. Mutable: its tail grows."""

    restore: Restore
    prompt_tokens: int
    stored_bytes: int
    """Bytes of the smaller form; a form that two layers share is counted once, with the first."""
    tail: PagedLayer

    @property
    def tokens(self) -> int:
        """Tokens of prompt and tail."""
        return self.prompt_tokens + self.tail.tokens

    @property
    def device_bytes(self) -> int:
        """Bytes of the smaller form and of the tail's blocks."""
        return self.stored_bytes + self.tail.device_bytes

    @property
    def host_bytes(self) -> int:
        """None."""
        return 0

    def release(self) -> None:
        """The tail's blocks are free; the rest is freed with its last holder."""
        self.tail.release()
        self.stored_bytes = 0

    def attend(self, others: Sequence[LayerHold], qkv: torch.Tensor, new: NewTokens, ops: Backend) -> torch.Tensor:
        """Rebuild, append, attend."""
        holds = cast("Sequence[RestoredLayer]", (self, *others))
        store = self.tail.pool.cache.layers[0]
        query = ops.rotate_and_store(qkv, new.rope, append([hold.tail for hold in holds], new), store, new.config)
        sides = [_joined(hold.restore(), hold.tail.read()) for hold in holds]
        return attend_dense(ops, query, sides, new)


def _joined(
    prompt: tuple[torch.Tensor, torch.Tensor], tail: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (torch.cat((old.to(new.dtype), new), dim=1) for old, new in zip(prompt, tail, strict=True))
    return keys, values
