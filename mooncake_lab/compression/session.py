"""Prefill, compress, decode: the engine's model over KVCaches that methods have made smaller.

The forward pass is `engine.LlamaModel.forward` with the backend's own kernels; only where a layer's keys and
values lie differs from layer to layer, so the operations that touch them are routed to each layer's hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.compression.held import (
    Held,
    LayerHold,
    LayerPool,
    NewTokens,
    PagedLayer,
    PrefilledPrompt,
    make_pool,
)
from mooncake_lab.engine.backends.protocol import Backend, Linear
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.packing import PackedBatch
from mooncake_lab.engine.rope import Rope

Tokens = npt.NDArray[np.int64]
"""Token ids."""


class Method(Protocol):
    """One way to a smaller KVCache: a frozen dataclass of its knobs."""

    @property
    def window(self) -> int:
        """How many of the prompt's last queries it wants to see."""
        ...

    def hold(self, prefilled: PrefilledPrompt, pool: LayerPool) -> tuple[LayerHold, ...]:
        """The layers, made smaller, in the pool's memory."""
        ...


@runtime_checkable
class PrefillMethod(Method, Protocol):
    """A method that already computes less."""

    def prefill(self, model: LlamaModel, tokens: Tokens) -> PrefilledPrompt:
        """Compute a prompt its own way."""
        ...


class Session:
    """One model and a pool of layer blocks. Mutable: requests come and go.

    Args:
        model: what computes, on whatever device and backend.
        room_tokens: tokens of all layers that the pool has blocks for.
        block_size_tokens: of its blocks.
    """

    def __init__(self, model: LlamaModel, *, room_tokens: int = 4096, block_size_tokens: int = 16) -> None:
        self.plain = model
        self.model = replace(model, backend=cast("Backend", RoutedBackend(model.backend)))
        self.pool = make_pool(
            model.config,
            tokens=room_tokens,
            block_size_tokens=block_size_tokens,
            device=model.embedding.device,
            dtype=model.embedding.dtype,
        )

    def prefill(self, tokens: Tokens, *, window: int = 0) -> PrefilledPrompt:
        """Compute a whole prompt, exactly; the blocks it took are free again.

        Args:
            tokens: of the prompt, shape (n,).
            window: how many of its last queries to keep.
        """
        held = Held(0, tuple(PagedLayer(self.pool, [], 0) for _ in range(self.plain.config.layers)))
        queries: list[torch.Tensor] = []
        logits = self.extend([held], tokens[None], queries=queries)
        sides = [cast("PagedLayer", layer).read() for layer in held.layers]
        held.release()
        return PrefilledPrompt(
            tokens=len(tokens),
            keys=tuple(keys for keys, _ in sides),
            values=tuple(values for _, values in sides),
            queries=tuple(query[max(0, len(query) - window) :] for query in queries),
            logits=logits[0],
        )

    def start(self, tokens: Tokens, method: Method) -> tuple[Held, torch.Tensor]:
        """Prefill a prompt as a method wants it, and hold what it keeps; with the last token's logits."""
        if isinstance(method, PrefillMethod):
            prefilled = method.prefill(self.plain, tokens)
        else:
            prefilled = self.prefill(tokens, window=method.window)
        return self.hold(prefilled, method), prefilled.logits

    def hold(self, prefilled: PrefilledPrompt, method: Method) -> Held:
        """What a method keeps of a prefill; the caller releases it."""
        return Held(prefilled.tokens, method.hold(prefilled, self.pool))

    def extend(
        self,
        helds: Sequence[Held],
        tokens: Tokens,
        *,
        every: bool = False,
        queries: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run the same number of further tokens through each request.

        Args:
            helds: requests whose layers are all held in one way.
            tokens: shape (requests, new tokens).
            every: whether logits of all of them are wanted, not only of each request's last.
            queries: gets the rotated queries, a layer after the other.

        Returns:
            Logits, (requests, vocabulary), or (requests * new tokens, vocabulary) with `every`.
        """
        count, device = tokens.shape[1], self.plain.embedding.device
        first = np.array([held.position for held in helds])
        positions = torch.from_numpy((first[:, None] + np.arange(count)).ravel()).to(device)
        new = NewTokens(positions, (count,) * len(helds), self.plain.rope, self.plain.config, queries)
        routes = _Routes(
            tuple(_Route(layers, new) for layers in zip(*(held.layers for held in helds), strict=True))
        )
        rows = torch.arange(tokens.size, device=device)
        flat = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64).ravel()).to(device)
        batch = _tokens_only(flat, positions, rows if every else rows[count - 1 :: count])
        logits = self.model.forward(batch, cast("Any", routes))
        for held in helds:
            held.position += count
        return logits

    def generate(self, held: Held, first_token: int, new_tokens: int) -> list[int]:
        """Greedy tokens after a first one, which is among them."""
        tokens = [first_token]
        while len(tokens) < new_tokens:
            logits = self.extend([held], np.array([[tokens[-1]]]))
            tokens.append(int(logits[0].argmax()))
        return tokens


@dataclass(frozen=True, slots=True)
class _Route:
    """Stands where the model expects a layer's cache: the same layer of every request of the batch."""

    holds: tuple[LayerHold, ...]
    new: NewTokens


@dataclass(frozen=True, slots=True)
class _Routes:
    layers: tuple[_Route, ...]


@dataclass(frozen=True, slots=True)
class RoutedBackend:
    """A backend whose cache operations go to each layer's hold, and all others to the backend it stands for."""

    inner: Backend

    @property
    def name(self) -> str:
        """Delegates to the inner backend."""
        return self.inner.name

    def linears(self, weights: Sequence[torch.Tensor]) -> Sequence[Linear]:
        """Delegates to the inner backend."""
        return self.inner.linears(weights)

    def add_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Delegates to the inner backend."""
        return self.inner.add_norm(hidden, update, weight, epsilon)

    def rotate_and_store(
        self, qkv: torch.Tensor, rope: Rope, batch: PackedBatch, cache: _Route, config: LlamaConfig
    ) -> torch.Tensor:
        """Nothing yet: where keys and values go, and how they come back, is one matter, `attend`'s."""
        del rope, batch, cache, config
        return qkv

    def attend(self, query: torch.Tensor, batch: PackedBatch, cache: _Route) -> torch.Tensor:
        """Whatever the layer's hold does."""
        del batch
        return cache.holds[0].attend(cache.holds[1:], query, cache.new, self.inner)

    def feed_forward(self, normed: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        """Delegates to the inner backend."""
        return self.inner.feed_forward(normed, gate_up, down)


def _tokens_only(tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> PackedBatch:
    """A batch as far as the model itself looks at it; holds know the rest."""
    nothing = torch.empty(0, dtype=torch.int64)
    return PackedBatch(
        tokens=tokens,
        positions=positions,
        slots=nothing,
        tables=nothing,
        lengths=nothing,
        singles=0,
        spans=(),
        logit_rows=rows,
        context=None,
    )
