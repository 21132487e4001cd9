"""Weights: from a local Hugging Face directory or seeded random; QKV and gate/up fused on the way in."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from mooncake_lab.engine.config import LlamaConfig, read_config, read_json, refuse_partial

ReadTensor = Callable[[str], torch.Tensor]
"""Gives the tensor of a Hugging Face parameter name."""
_PIECE_BYTES: Final = 64 * 1024**2
"""Brought from a device at once to be digested."""
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_NUMBERS: Final = {"F64", "F32", "F16", "BF16"}
"""Types of tensors, by safetensors' names, that hold plain weights."""
_PARTIAL: Final = ("*.incomplete", "*.part", "*.crdownload", "*.aria2")
"""What programs name files whose download has not ended."""


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
    config, stored = _checked(directory)

    def read(name: str) -> torch.Tensor:
        path, inside = stored[name]
        with _opened(path) as file:
            return file.get_tensor(inside)

    if config.tied_embeddings and _HEAD in stored and not torch.equal(read(_HEAD), read(_EMBEDDING)):
        config = replace(config, tied_embeddings=False)
    return assemble(config, read, device=device, dtype=dtype)


def check_weights(directory: Path) -> LlamaConfig:
    """The config of a model directory in which `load_weights` will find every tensor, in its shape.

    Only the beginnings of the files are read, which takes milliseconds. For its errors see `load_weights`.
    """
    config, _ = _checked(directory)
    return config


def _checked(directory: Path) -> tuple[LlamaConfig, Mapping[str, tuple[Path, str]]]:
    """The config, and where each tensor is stored, in the shape that the config says."""
    config, stored = _described(directory)
    shapes = parameter_shapes(replace(config, tied_embeddings=False))
    for path in dict.fromkeys(path for path, _ in stored.values()):
        with _opened(path) as file:
            for name, (holder, inside) in stored.items():
                if holder == path:
                    part = file.get_slice(inside)
                    _check_shape(name, tuple(part.get_shape()), shapes[name], f"{path}: ")
                    if part.get_dtype() not in _NUMBERS:
                        says = f"{path}: tensor {name!r} is of type {part.get_dtype()}"
                        raise ValueError(f"{says}; allowed are {', '.join(sorted(_NUMBERS))}")
    return config, stored


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
            _check_shape(name, tuple(part.shape), shapes[name])
        parts = [part.to(device=device, dtype=dtype) for part in parts]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    embedding = place(_EMBEDDING)
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
        head=embedding if config.tied_embeddings else place(_HEAD),
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
    named = {_EMBEDDING: weights.embedding, "model.norm.weight": weights.norm, _HEAD: weights.head}
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
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocabulary, config.width)}
    for index in range(config.layers):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (config.width,)
        for name, shape in linears.items():
            shapes[f"{layer}{name}.weight"] = shape
    shapes["model.norm.weight"] = (config.width,)
    if not config.tied_embeddings:
        shapes[_HEAD] = (config.vocabulary, config.width)
    return shapes


def _described(directory: Path) -> tuple[LlamaConfig, Mapping[str, tuple[Path, str]]]:
    """The config of a model directory, and for each tensor of the model its file and its name there.

    Tied tables are stored once, under either name, or twice.

    Raises:
        FileNotFoundError: when the directory has no config or no safetensors.
        ValueError: when a file is not what it should be, or a tensor is missing or none that a Llama has.
    """
    config = read_config(directory)
    files, needed = _files(directory), parameter_shapes(config)
    stored = {name: (path, name) for name, path in files.items() if name in {*needed, _HEAD}}
    if config.tied_embeddings and _HEAD in stored and _EMBEDDING not in stored:
        stored[_EMBEDDING] = stored.pop(_HEAD)
    missing = [name for name in needed if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        says = f"no tensor {missing[0]!r}{more} in the safetensors; the config says it is needed"
        raise ValueError(f"{directory}: {says}")
    unknown = [name for name in files if name not in {*needed, _HEAD} and not name.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise ValueError(f"{directory}: tensor {min(unknown)!r} is none a Llama of its config has")
    return config, stored


def _files(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor: the files say so themselves, and the index only which files there are."""
    single, index = directory / _SINGLE, directory / _INDEX
    if not single.is_file() and not index.is_file():
        begun = [path.name for pattern in _PARTIAL for path in directory.rglob(pattern)]
        why = f"the download of {begun[0]} has not ended" if begun else "pickled weights are not read"
        raise FileNotFoundError(f"{directory} has neither {_SINGLE} nor its index; {why}")
    found = dict[str, Path]()
    for path in [single] if single.is_file() else _shards(index):
        with _opened(path) as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _shards(index: Path) -> list[Path]:
    """The files that an index names.

    Raises:
        FileNotFoundError: when one of them is not there.
        ValueError: when it is no index.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is {weight_map!r}; allowed is an object of tensors and their files")
    names = sorted({str(name) for name in cast("dict[str, object]", weight_map).values()})
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        says = f"{len(missing)} of {len(names)} files are not there, of which the first is {missing[0]}"
        raise FileNotFoundError(f"{index}: {says}; was the model downloaded whole?")
    return [index.parent / name for name in names]


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], where: str = "") -> None:
    if shape != expected:
        raise ValueError(f"{where}tensor {name!r} has shape {shape}; the config says {expected}")


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    with path.open("rb") as begin:
        refuse_partial(path, begin.read(64))
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors, it may be truncated: {error}") from error
