"""Weights: from a local Hugging Face directory or seeded random; QKV and gate/up fused on the way in."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

import torch
import xxhash

from mooncake_lab.engine.checkpoint import EMBEDDING, HEAD, check_shape, checked, opened, parameter_shapes
from mooncake_lab.engine.config import LlamaConfig

ReadTensor = Callable[[str], torch.Tensor]
"""Gives the tensor of a Hugging Face parameter name."""
_PIECE_BYTES: Final = 64 * 1024**2
"""Brought from a device at once to be digested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's tensors; a linear's weight has shape (outputs, inputs)."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """Queries, then keys, then values, stacked along outputs."""
    output: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    """Gate, then up, stacked along outputs."""
    down: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All tensors of a model."""

    config: LlamaConfig
    embedding: torch.Tensor
    """Shape (vocabulary, width)."""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor
    """Shape (vocabulary, width): the embedding itself where they are tied."""

    def digest(self) -> bytes:
        """A name for the weights, 16 bytes: the xxh3_128 of every byte of every tensor.

        A fine-tune of a single number has another name. It guards against mistakes, not against forgery.
        """
        whole = xxhash.xxh3_128()
        # pinned, since 16 GB in fresh pageable memory would take 5 s to arrive
        pinned = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) if self.embedding.is_cuda else None
        for source in (self, *self.layers):
            for field in fields(source):
                tensor = getattr(source, field.name)
                if isinstance(tensor, torch.Tensor):
                    whole.update(f"{field.name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
                    for piece in tensor.detach().reshape(-1).view(torch.uint8).split(_PIECE_BYTES):
                        host = piece if pinned is None else pinned[: len(piece)].copy_(piece)
                        whole.update(host.numpy().data)
        return whole.digest()


def load_weights(directory: Path, *, device: torch.device, dtype: torch.dtype) -> LlamaWeights:
    """The weights of a local Hugging Face Llama directory: one safetensors file, or shards and their index.

    As in transformers, the single file counts where both are there, and a head of its own counts more than
    `tie_word_embeddings`.

    Raises:
        FileNotFoundError: when the directory has no config or no safetensors.
        ValueError: when a file is truncated, or a tensor is missing, misshapen, or none that a Llama has.
    """
    config, stored = checked(directory)

    def read(name: str) -> torch.Tensor:
        path, inside = stored[name]
        with opened(path, "pt") as file:
            return file.get_tensor(inside)

    if config.tied_embeddings and HEAD in stored and not torch.equal(read(HEAD), read(EMBEDDING)):
        config = replace(config, tied_embeddings=False)
    return assemble(config, read, device=device, dtype=dtype)


def random_weights(
    config: LlamaConfig, *, seed: int = 0, device: torch.device, dtype: torch.dtype
) -> LlamaWeights:
    """Seeded random weights, scaled so that activations and logits keep the size of a trained model's.

    Drawn on the device that holds them: the same seed gives the same weights on one kind of device.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = parameter_shapes(config)

    def draw(name: str) -> torch.Tensor:
        shape = shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=device, dtype=dtype)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)

    return assemble(config, draw, device=device, dtype=dtype)


def assemble(config: LlamaConfig, read: ReadTensor, *, device: torch.device, dtype: torch.dtype) -> LlamaWeights:
    """Fuse tensors read by their Hugging Face names into a model's weights.

    Raises:
        ValueError: when a tensor has an unexpected shape.
    """
    shapes = parameter_shapes(config)

    def place(*names: str) -> torch.Tensor:
        parts = [read(name) for name in names]
        for name, part in zip(names, parts, strict=True):
            check_shape(name, tuple(part.shape), shapes[name])
        parts = [part.to(device=device, dtype=dtype) for part in parts]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    embedding = place(EMBEDDING)
    return LlamaWeights(
        config=config,
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                **{
                    part: place(*(f"model.layers.{index}.{name}.weight" for name in names))
                    for part, names in _PARTS.items()
                }
            )
            for index in range(config.layers)
        ),
        norm=place("model.norm.weight"),
        head=embedding if config.tied_embeddings else place(HEAD),
    )


_PARTS: Final = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The Hugging Face parameters of which each tensor of a layer is made, stacked along outputs."""


def state_dict(weights: LlamaWeights) -> dict[str, torch.Tensor]:
    """The same tensors under their Hugging Face names, fused ones cut into views."""
    shapes = parameter_shapes(weights.config)
    named = {EMBEDDING: weights.embedding, "model.norm.weight": weights.norm, HEAD: weights.head}
    for index, layer in enumerate(weights.layers):
        for part, names in _PARTS.items():
            whole = [f"model.layers.{index}.{name}.weight" for name in names]
            named |= zip(whole, getattr(layer, part).split([shapes[name][0] for name in whole]), strict=True)
    return named
