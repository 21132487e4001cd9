"""What a device must be able to do to run a Llama: the operations of a layer behind one small interface."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import KVCache, LayerCache
from mooncake_lab.engine.packing import PackedBatch
from mooncake_lab.engine.rope import Rope

if TYPE_CHECKING:
    from mooncake_lab.engine.model import LlamaModel

Linear = Callable[[torch.Tensor], torch.Tensor]
"""(tokens, inputs) -> (tokens, outputs)."""


class WholeStep(Protocol):
    """All layers of some batches at once, where calls between operators would cost more than their work."""

    def fits(self, batch: PackedBatch) -> bool:
        """Whether it can run a batch."""
        ...

    def forward(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        """Logits of the wanted rows, (rows, vocabulary)."""
        ...


class Backend(Protocol):
    """The operations of a Llama layer on one kind of device, and where there is one, a whole decode step."""

    @property
    def name(self) -> str:
        """What it is called in results."""
        ...

    def linears(self, weights: Sequence[torch.Tensor]) -> Sequence[Linear]:
        """Linear operators of weights of one shape, prepared once for this device."""
        ...

    def add_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add `update` to `hidden` in place, then return its RMS normalisation."""
        ...

    def rotate_and_store(
        self, qkv: torch.Tensor, rope: Rope, batch: PackedBatch, cache: LayerCache, config: LlamaConfig
    ) -> torch.Tensor:
        """Rotate and store keys, store values; the rotated queries, (tokens, query_heads, head_width)."""
        ...

    def attend(self, query: torch.Tensor, batch: PackedBatch, cache: LayerCache) -> torch.Tensor:
        """Causal attention of each new token to its request's context: (tokens, query_heads * head_width)."""
        ...

    def feed_forward(self, normed: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        """`down(silu(gate) * up)`."""
        ...

    def whole_step(self, model: "LlamaModel") -> WholeStep | None:
        """A model's own whole step; None where the backend has no such step."""
        ...
