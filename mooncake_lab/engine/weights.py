"""Weights: from a local Hugging Face directory or seeded random; QKV and gate/up fused on the way in."""

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from mooncake_lab.engine.config import LlamaConfig, read_config

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

    Raises:
        FileNotFoundError: when the directory has no config or no safetensors.
        ValueError: when a file is truncated, or a tensor is missing, misshapen, or none that a Llama has.
    """
    config = read_config(directory)
    files = _files(directory)

    def read(name: str) -> torch.Tensor:
        if name not in files:
            raise ValueError(f"{directory}: no tensor {name!r} in the safetensors; the config says it is needed")
        with _opened(files[name]) as file:
            return file.get_tensor(name)

    unknown = sorted(set(files) - set(parameter_shapes(config)) - {"lm_head.weight"})
    unknown = [name for name in unknown if not name.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise ValueError(f"{directory}: tensor {unknown[0]!r} is none a Llama of its config has")
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
            if tuple(part.shape) != shapes[name]:
                raise ValueError(f"tensor {name!r} has shape {tuple(part.shape)}; the config says {shapes[name]}")
        parts = [part.to(device=device, dtype=dtype) for part in parts]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    embedding = place("model.embed_tokens.weight")
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
        head=embedding if config.tied_embeddings else place("lm_head.weight"),
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
    named = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    named["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        for part, names in _PARTS.items():
            whole = [f"model.layers.{index}.{name}.weight" for name in names]
            named |= zip(whole, getattr(layer, part).split([shapes[name][0] for name in whole]), strict=True)
    return named


def parameter_shapes(config: LlamaConfig) -> Mapping[str, tuple[int, ...]]:
    """The Hugging Face names of a model's parameters and their shapes."""
    linears = {
        "self_attn.q_proj": (config.query_width, config.width),
        "self_attn.k_proj": (config.kv_width, config.width),
        "self_attn.v_proj": (config.kv_width, config.width),
        "self_attn.o_proj": (config.width, config.query_width),
        "mlp.gate_proj": (config.ffn_width, config.width),
        "mlp.up_proj": (config.ffn_width, config.width),
        "mlp.down_proj": (config.width, config.ffn_width),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary, config.width)}
    for index in range(config.layers):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (config.width,)
        for name, shape in linears.items():
            shapes[f"{layer}{name}.weight"] = shape
    shapes["model.norm.weight"] = (config.width,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary, config.width)
    return shapes


def _files(directory: Path) -> Mapping[str, Path]:
    """Which file holds each tensor."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / "model.safetensors"
    if not single.is_file():
        raise FileNotFoundError(
            f"{directory} has neither model.safetensors nor its index; pickled weights are not read"
        )
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors, it may be truncated: {error}") from error
