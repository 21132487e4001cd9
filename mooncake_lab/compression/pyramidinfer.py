"""PyramidInfer: deeper layers compute fewer tokens (Yang et al., Findings of ACL 2024, arXiv 2405.12532).

Not PyramidKV (Cai et al., arXiv 2406.02069), which divides a budget over layers after a full prefill. Here the
*hidden states* of dropped tokens are gone: deeper layers neither compute nor cache them. The constants are those
of the authors' shipped configuration for 7B models; generated tokens are not thinned, since answers are short.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling

from mooncake_lab.compression.dense import attend_dense, rotate_new
from mooncake_lab.compression.held import LayerPool, NewTokens, Prefilled
from mooncake_lab.compression.paged import PagedLayer, hold_all
from mooncake_lab.compression.votes import window_attention
from mooncake_lab.engine.model import LlamaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidInfer:
    """Keep a falling share of the context from layer to layer.

    Raises:
        ValueError: when a share is not above 0 and up to 1.
    """

    decay: float = 0.9
    """Share of the context that the deepest layer passes on; 1 drops nothing."""
    recent_ratio: float = 0.2
    """Of the prompt: the last tokens, which vote and always stay."""
    min_context: int = 64
    """A context is never cut down to so few tokens or fewer."""
    sinks: int = 4
    distance_weight: float = 1.2
    """Weight of the last voter; the first has 1."""

    def __post_init__(self) -> None:
        if not (0 < self.decay <= 1 and 0 < self.recent_ratio <= 1):
            raise ValueError(f"{self}: decay and recent ratio must be above 0 and at most 1")

    @property
    def window(self) -> int:
        """It asks no queries."""
        return 0

    def ratio(self, layer: int, layers: int) -> float:
        """Share of the context that a layer passes on: a cosine from 1 to the decay."""
        return (1 - self.decay) * (np.cos(np.pi * layer / layers) + 1) / 2 + self.decay

    @torch.inference_mode()
    def prefill(self, model: LlamaModel, tokens: np.ndarray) -> Prefilled:
        """Compute a prompt, shape (n,), with fewer tokens from layer to layer."""
        ops, config, device = model.backend, model.config, model.embedding.device
        positions = torch.arange(len(tokens), device=device)
        recent = 1 + int(self.recent_ratio * len(tokens))
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
        return Prefilled(
            tokens=len(tokens),
            keys=tuple(keys for keys, _ in sides),
            values=tuple(values for _, values in sides),
            queries=(),
            logits=model.head(normed)[0],
        )

    def hold(self, prefilled: Prefilled, pool: LayerPool) -> tuple[PagedLayer, ...]:
        """What each layer computed, in blocks."""
        return hold_all(prefilled, pool)

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
