"""The Llama forward pass over packed tokens. It knows tokens and blocks, and nothing of requests or policies."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling

from mooncake_lab.engine.backends.protocol import Backend, Linear, WholeStep
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.packing import PackedBatch
from mooncake_lab.engine.rope import Rope, make_rope
from mooncake_lab.engine.weights import LlamaWeights

LayerHook = Callable[[int], None]
"""Called with a layer's index once its keys and values are in the cache."""


@dataclass(frozen=True, slots=True)
class LayerOperators:
    """One layer's operators."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """A Llama ready to run on one device."""

    config: LlamaConfig
    backend: Backend
    embedding: torch.Tensor
    layers: tuple[LayerOperators, ...]
    norm: torch.Tensor
    head: Linear
    rope: Rope
    weights_digest: bytes
    """Which weights these are; see `LlamaWeights.digest`."""
    step: WholeStep | None = None
    """A faster way for the batches that fit it."""

    def forward(self, batch: PackedBatch, cache: KVCache, on_layer: LayerHook | None = None) -> torch.Tensor:
        """Logits of the wanted rows, (rows, vocabulary); keys and values of all new tokens go into the cache."""
        if self.step is not None and on_layer is None and self.step.fits(batch):
            return self.step.forward(batch, cache)
        return self.layer_by_layer(batch, cache, on_layer)

    @torch.inference_mode()
    def layer_by_layer(self, batch: PackedBatch, cache: KVCache, on_layer: LayerHook | None) -> torch.Tensor:
        """`forward` with the operators of the backend, one layer after the other."""
        ops, epsilon = self.backend, self.config.norm_epsilon
        hidden, update = F.embedding(batch.tokens, self.embedding), None
        for index, (layer, stored) in enumerate(zip(self.layers, cache.layers, strict=True)):
            normed = ops.add_norm(hidden, update, layer.attention_norm, epsilon)
            query = ops.rotate_and_store(layer.qkv(normed), self.rope, batch, stored, self.config)
            if on_layer is not None:
                on_layer(index)
            attended = ops.attend(query, batch, stored)
            if index + 1 == len(self.layers):  # the other rows are not read any more
                hidden, attended = hidden[batch.logit_rows], attended[batch.logit_rows]
            normed = ops.add_norm(hidden, layer.output(attended), layer.ffn_norm, epsilon)
            update = ops.feed_forward(normed, layer.gate_up, layer.down)
        return self.head(ops.add_norm(hidden, update, self.norm, epsilon))


def make_model(
    weights: LlamaWeights, backend: Backend, *, positions: int | None = None, digest: bytes | None = None
) -> LlamaModel:
    """Prepare weights for a backend; `positions` bounds the rotary table where the model's context length is long.

    `digest` is that of the weights, where it is known: 16 GB on a GPU take 5 to 10 s to digest.
    """
    config, device, layers = weights.config, weights.embedding.device, weights.layers
    qkv = backend.linears([layer.qkv for layer in layers])
    output = backend.linears([layer.output for layer in layers])
    gate_up = backend.linears([layer.gate_up for layer in layers])
    down = backend.linears([layer.down for layer in layers])
    rope = make_rope(config, min(config.max_positions, positions or config.max_positions), device)
    model = LlamaModel(
        config=config,
        backend=backend,
        embedding=weights.embedding,
        layers=tuple(
            LayerOperators(layer.attention_norm, qkv[i], output[i], layer.ffn_norm, gate_up[i], down[i])
            for i, layer in enumerate(layers)
        ),
        norm=weights.norm,
        head=backend.linears([weights.head])[0],
        rope=rope,
        weights_digest=weights.digest() if digest is None else digest,
    )
    return replace(model, step=backend.whole_step(model))
