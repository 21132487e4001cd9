"""From a name to a model that is ready to run: a directory of weights, or a random model of a named shape."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from mooncake_lab.batching import SarathiServe
from mooncake_lab.engine.backends import choose_backend
from mooncake_lab.engine.checkpoint import RANDOM
from mooncake_lab.engine.config import NUMBER_BYTES, config_from_shape
from mooncake_lab.engine.loop import Engine, EngineSettings
from mooncake_lab.engine.model import LlamaModel, make_model
from mooncake_lab.engine.sequence import GenerationRequest
from mooncake_lab.engine.weights import load_weights, random_weights
from mooncake_lab.perf.specs import model_shape

DTYPES: Final[Mapping[str, torch.dtype]] = {name: getattr(torch, name) for name in NUMBER_BYTES}
"""Types of numbers by the names of the command line."""


def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str | None = None,
    backend: str = "auto",
    seed: int = 0,
    positions: int | None = None,
) -> LlamaModel:
    """The model of a Hugging Face directory, or `random:SHAPE`, seeded, of a shape in `perf.MODELS`.

    Args:
        name: the directory, or `random:SHAPE`.
        device: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on.
        dtype: float32, bfloat16 or float16; None takes float32 on CPU and bfloat16 on GPU.
        backend: auto, dense, cpu or cuda.
        seed: of random weights.
        positions: longest context the rotary table is made for; None takes the model's context length.

    Raises:
        FileNotFoundError: when the directory has no config or no safetensors.
        ValueError: when the shape, the device, the dtype or the backend is unknown, or weights do not fit.
    """
    place = _device(device)
    kind = _kind(dtype, place)
    if place.type == "cuda" and ":" in str(place):
        torch.cuda.set_device(place)  # own kernels and recorded graphs run on the current device
    operators = choose_backend(place, kind, backend)
    if name.startswith(RANDOM):
        config = config_from_shape(model_shape(name.removeprefix(RANDOM)))
        weights = random_weights(config, seed=seed, device=place, dtype=kind)
    else:
        weights = load_weights(Path(name), device=place, dtype=kind)
    return make_model(weights, operators, positions=positions)


def warm_up(model: LlamaModel) -> None:
    """Run a prefill and a decode once, so that what is compiled on first use is compiled."""
    engine = Engine(model, SarathiServe(), EngineSettings(block_size_tokens=16, cache_blocks=4))
    engine.generate(GenerationRequest(prompt=[0] * tokens, max_new_tokens=3, end_tokens=()) for tokens in (1, 3))


def _kind(dtype: str | None, place: torch.device) -> torch.dtype:
    numbers = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    if numbers not in DTYPES:
        raise ValueError(f"unknown dtype {numbers!r}; allowed are {', '.join(DTYPES)}")
    return DTYPES[numbers]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; allowed are auto, cpu, cuda, cuda:1 and so on") from error
    if device.type not in {"cpu", "cuda"}:
        raise ValueError(f"this engine runs on cpu and cuda, not on {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch finds no GPU here")
    return device
