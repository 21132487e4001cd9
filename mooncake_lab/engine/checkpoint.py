"""The files of a model directory: its config, and where each tensor is stored, without torch.

So a server finds out in milliseconds, before its workers load, whether they will be able to.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, cast

from safetensors import SafetensorError, safe_open

from mooncake_lab.engine.config import LlamaConfig, config_from_shape, read_config, read_json, refuse_partial
from mooncake_lab.perf.specs import model_shape

RANDOM: Final = "random:"
"""Begins the name of a model that has no directory, before the name of its shape."""
_BASE: Final = "model."
"""Begins the names of all parameters but the head, except where the model was saved without its head."""
_EMBEDDING_ALONE: Final = "embed_tokens.weight"
EMBEDDING: Final = f"{_BASE}{_EMBEDDING_ALONE}"
HEAD: Final = "lm_head.weight"
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_NUMBERS: Final = {"F64", "F32", "F16", "BF16"}
"""Types of tensors, by safetensors' names, that hold plain weights."""
_PARTIAL: Final = ("*.incomplete", "*.part", "*.crdownload", "*.aria2")
"""What programs name files whose download has not ended."""


def check_model(name: str) -> LlamaConfig:
    """The config of a model that `load_model` can load, found out in milliseconds, before workers start.

    Raises:
        FileNotFoundError: when there is no such directory, or it has no config or no safetensors.
        ValueError: when the shape is unknown, or the files of the directory are no model of this engine.
    """
    if name.startswith(RANDOM):
        return config_from_shape(model_shape(name.removeprefix(RANDOM)))
    if not Path(name).is_dir():
        raise FileNotFoundError(f"there is no directory {name}; models are not downloaded")
    config, _ = checked(Path(name))
    return config


def checked(directory: Path) -> tuple[LlamaConfig, Mapping[str, tuple[Path, str]]]:
    """The config of a model directory, and for each tensor of the model its file and its name there.

    Each tensor has the shape that the config says. Only the beginnings of the files are read.

    Raises:
        FileNotFoundError: when the directory has no config or no safetensors.
        ValueError: when a file is truncated, or a tensor is missing, misshapen, or none that a Llama has.
    """
    config, stored = _described(directory)
    shapes = parameter_shapes(replace(config, tied_embeddings=False))
    for path in dict.fromkeys(path for path, _ in stored.values()):
        with opened(path) as file:
            for name, (holder, inside) in stored.items():
                if holder == path:
                    part = file.get_slice(inside)
                    check_shape(name, tuple(part.get_shape()), shapes[name], f"{path}: ")
                    if part.get_dtype() not in _NUMBERS:
                        says = f"{path}: tensor {name!r} is of type {part.get_dtype()}"
                        raise ValueError(f"{says}; allowed are {', '.join(sorted(_NUMBERS))}")
    return config, stored


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
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocabulary, config.width)}
    for index in range(config.layers):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (config.width,)
        for name, shape in linears.items():
            shapes[f"{layer}{name}.weight"] = shape
    shapes["model.norm.weight"] = (config.width,)
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocabulary, config.width)
    return shapes


def _described(directory: Path) -> tuple[LlamaConfig, Mapping[str, tuple[Path, str]]]:
    """The config of a model directory, and for each tensor of the model its file and its name there.

    Tied tables are stored once, under either name, or twice.

    Raises:
        FileNotFoundError: when the directory has no config or no safetensors.
        ValueError: when a file is not what it should be, or a tensor is missing or none that a Llama has.
    """
    config, files = read_config(directory), _files(directory)
    if config.layers > len(files):  # else each layer's names would be made, however many there are to be
        says = f"{len(files)} tensors in the safetensors; the config says that there are {config.layers} layers"
        raise ValueError(f"{directory}: {says}")
    needed = parameter_shapes(config)
    if _EMBEDDING_ALONE in files and config.tied_embeddings:  # saved without the head, which is the embedding
        stored = {f"{_BASE}{name}": (path, name) for name, path in files.items()}
        files = {name: path for name, (path, _) in stored.items()}
    else:
        stored = {name: (path, name) for name, path in files.items()}
    stored = {name: place for name, place in stored.items() if name in {*needed, HEAD}}
    if config.tied_embeddings and HEAD in stored and EMBEDDING not in stored:
        stored[EMBEDDING] = stored.pop(HEAD)
    missing = [name for name in needed if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        says = f"no tensor {missing[0]!r}{more} in the safetensors; the config says it is needed"
        raise ValueError(f"{directory}: {says}")
    unknown = [name for name in files if name not in {*needed, HEAD} and not name.endswith("rotary_emb.inv_freq")]
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
        with opened(path) as file:
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


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], where: str = "") -> None:
    """Refuse a tensor of another shape than the config's.

    Raises:
        ValueError: naming the tensor and both shapes.
    """
    if shape != expected:
        raise ValueError(f"{where}tensor {name!r} has shape {shape}; the config says {expected}")


@contextmanager
def opened(path: Path, framework: Literal["numpy", "pt"] = "numpy") -> Generator[Any]:
    """A file of safetensors, open.

    Args:
        path: of the file.
        framework: whose tensors it gives; numpy has no bfloat16.

    Raises:
        OSError: when it cannot be read.
        ValueError: when it is none, or the download of it has not ended.
    """
    with path.open("rb") as begin:
        refuse_partial(path, begin.read(64))
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors, it may be truncated: {error}") from error
