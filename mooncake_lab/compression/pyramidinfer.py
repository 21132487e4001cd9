"""PyramidInfer: deeper layers compute fewer tokens (Yang et al., Findings of ACL 2024, arXiv 2405.12532).

Not PyramidKV (Cai et al., arXiv 2406.02069), which divides a budget over layers after a full prefill. Here the
*hidden states* of dropped tokens are gone: deeper layers neither compute nor cache them. Generated tokens are
thinned once they are no longer recent. Constants are those of the authors' code and its 7B configuration.
"""

import sys
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling

from mooncake_lab.compression.eviction import window_attention
from mooncake_lab.compression.held import (
    LayerPool,
    NewTokens,
    PagedLayer,
    PrefilledPrompt,
    attend_dense,
    rotate_new,
)
from mooncake_lab.engine.model import LlamaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidInfer:
    """Keep a falling share of the context from layer to layer.

    Raises:
        ValueError: when a share is not above 0 and up to 1, or `exceed` is below 1.
    """

    decay: float = 0.9
    """Share of the context that the deepest layer passes on; 1 drops nothing."""
    recent_ratio: float = 0.2
    """Share of the prompt that counts as recent: these last tokens vote and are always kept."""
    min_context: int = 64
    """A context is never cut down to so few tokens or fewer."""
    sinks: int = 4
    distance_weight: float = 1.2
    """Weight of the last voter; the first has 1."""
    exceed: int = 16
    """Number of generated tokens that are thinned at a time, once all of them are older than the recent ones."""
    generated_ratio: float = 0.9
    """Share of them that the first layer keeps."""
    generated_decay: float = 0.1
    """Share of that share which the deepest layer would keep, along the same cosine."""

    def __post_init__(self) -> None:
        shares = (self.decay, self.recent_ratio, self.generated_ratio, self.generated_decay)
        if not all(0 < share <= 1 for share in shares):
            raise ValueError(f"{self}: decays and ratios must be above 0 and at most 1")
        if self.exceed < 1:
            raise ValueError(f"{self}: generated tokens are thinned {self.exceed} at a time; at least 1 is needed")

    @property
    def window(self) -> int:
        """It asks no queries."""
        return 0

    def ratio(self, layer: int, layers: int) -> float:
        """Share of the context that a layer passes on: a cosine from 1 to the decay."""
        return _cosine(self.decay, layer / layers)

    def generated(self, layer: int, layers: int) -> int:
        """How many of `exceed` old generated tokens this layer keeps, at least one."""
        return max(1, int(self.exceed * self.generated_ratio * _cosine(self.generated_decay, layer / layers)))

    def recent(self, prompt_tokens: int) -> int:
        """How many of the latest tokens vote and always stay; fixed by the prompt."""
        return 1 + int(self.recent_ratio * prompt_tokens)

    @torch.inference_mode()
    def prefill(self, model: LlamaModel, tokens: np.ndarray) -> PrefilledPrompt:
        """Compute a prompt, shape (n,), with fewer tokens from layer to layer."""
        ops, config, device = model.backend, model.config, model.embedding.device
        positions = torch.arange(len(tokens), device=device)
        recent = self.recent(len(tokens))
        hidden, update = F.embedding(torch.from_numpy(tokens).to(device), model.embedding), None
        sides: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, layer in enumerate(model.layers):
            normed = ops.add_norm(hidden, update, layer.attention_norm, config.norm_epsilon)
            new = NewTokens(positions, (len(positions),), model.rope, config)
            query, store = rotate_new(ops, layer.qkv(normed), new)
            sides.append((store.keys[0], store.values[0]))
            attended = attend_dense(ops, query, sides[-1:], new)
            normed = ops.add_norm(hidden, layer.output(attended), layer.ffn_norm, config.norm_epsilon)
            update = ops.feed_forward(normed, layer.gate_up, layer.down)
            kept = self.keep(query[-recent:], store.keys[0], self.ratio(index, config.layers))
            if kept is not None:
                hidden, update, positions = hidden[kept], update[kept], positions[kept]
        normed = ops.add_norm(
            hidden[-1:], None if update is None else update[-1:], model.norm, config.norm_epsilon
        )
        return PrefilledPrompt(
            tokens=len(tokens),
            keys=tuple(keys for keys, _ in sides),
            values=tuple(values for _, values in sides),
            queries=(),
            logits=model.head(normed)[0],
        )

    def hold(self, prefilled: PrefilledPrompt, pool: LayerPool) -> tuple[PagedLayer, ...]:
        """What each layer computed, in blocks; what is generated will be thinned there."""
        recent, layers = self.recent(prefilled.tokens), len(prefilled.keys)
        held: list[PagedLayer] = []
        for index, sides in enumerate(zip(prefilled.keys, prefilled.values, strict=True)):
            layer = ThinnedLayer.of(pool, *sides)
            layer.begin(self, recent, self.generated(index, layers))
            held.append(layer)
        return tuple(held)

    def keep(self, voters: torch.Tensor, keys: torch.Tensor, ratio: float) -> torch.Tensor | None:
        """Which rows the next layer computes, ascending; None for all.

        Args:
            voters: rotated queries of the recent tokens, (recent, query_heads, head_width).
            keys: of all tokens of this layer, (kv_heads, tokens, head_width).
            ratio: share of the context to pass on.
        """
        context = keys.shape[1] - len(voters)
        count = int(context * ratio)
        if count <= max(self.min_context, self.sinks) or count == context:
            return None
        weights = torch.linspace(1, self.distance_weight, len(voters), device=keys.device)
        scores = (window_attention(voters, keys)[..., :context].mean(dim=0) * weights[:, None]).sum(dim=0)
        scores[: self.sinks] = torch.inf
        chosen = scores.topk(count).indices.sort().values
        return torch.cat((chosen, torch.arange(context, keys.shape[1], device=keys.device)))


@final
@dataclass(slots=True, eq=False)
class ThinnedLayer(PagedLayer):
    """A layer whose generated tokens are thinned, `exceed` at a time, once they are older than the recent ones.

    The number of recent tokens is fixed by the prompt here. They vote as in prefill, but only the last `exceed` of
    them: a query takes memory, too. Mutable: it grows, and shrinks.
    """

    _method: PyramidInfer = field(default_factory=PyramidInfer)
    _recent: int = sys.maxsize
    """Thins nothing until it is told otherwise."""
    _kept: int = 1
    """Number of tokens kept from every `exceed`."""
    _settled: int = 0
    """Tokens that are never looked at again: the prompt's, and what thinning left."""
    _voters: torch.Tensor | None = None
    """Rotated queries of the latest tokens, (tokens, query_heads, head_width)."""

    def begin(self, method: PyramidInfer, recent: int, kept: int) -> None:
        """What it holds now is the prompt."""
        self._method, self._recent, self._kept, self._settled = method, recent, kept, self.tokens

    @property
    def device_bytes(self) -> int:
        """Whole blocks, and the voters' queries."""
        voters = 0 if self._voters is None else self._voters.nbytes
        return len(self.blocks) * self.pool.cache.block_bytes + voters

    def release(self) -> None:
        """Its blocks are free, and the voters gone."""
        PagedLayer.release(self)
        self._voters = None

    def asked(self, queries: torch.Tensor) -> None:
        """Thin what has become old."""
        exceed = self._method.exceed
        latest = queries if self._voters is None else torch.cat((self._voters, queries))
        self._voters = latest[-min(exceed, self._recent) :].clone()
        while self.tokens - self._settled >= self._recent + exceed:
            self._thin(exceed, self._voters)

    def _thin(self, exceed: int, voters: torch.Tensor) -> None:
        first, end = self._settled, self._settled + exceed
        weights = torch.linspace(1, self._method.distance_weight, len(voters), device=voters.device)
        votes = window_attention(voters, self.read()[0])[..., first:end].mean(dim=0)
        chosen = first + (votes * weights[:, None]).sum(dim=0).topk(self._kept).indices.sort().values
        places = torch.arange(self.tokens, device=chosen.device)
        self.keep(torch.cat((places[:first], chosen, places[end:])))
        self._settled = first + self._kept


def _cosine(least: float, depth: float) -> float:
    """From 1 at depth 0 to `least` at depth 1."""
    return float((1 - least) * (np.cos(np.pi * depth) + 1) / 2 + least)
