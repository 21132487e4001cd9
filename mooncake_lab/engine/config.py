"""What a Llama is: its sizes, its rotary embedding, and where both are written down."""

import json
import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast, final

from mooncake_lab.perf.specs import ModelShape

NUMBER_BYTES: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""The types of numbers in which a model computes, by the names of the command line, and the size of one."""
_MOST: Final = 2**31 - 1
"""Of any size."""
_LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those first trained on.

    `linear` divides every frequency by `factor`; `llama3` divides the low ones only, with a ramp
    between the two cut-offs (in turns over `original_positions`). Where the cut-offs are not in order there is no
    ramp, and the first divides high from low.

    Raises:
        ValueError: when a number is not positive.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        cut_offs = (self.low_frequency_factor, self.high_frequency_factor, self.original_positions)
        if min(self.factor, *cut_offs) <= 0:
            raise ValueError(f"{self} is not a rope scaling: every number must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The dimensions and constants of a Llama-family model, under the names of `perf.ModelShape`.

    Raises:
        ValueError: when a size is not positive, heads do not divide, or the head width is odd.
    """

    layers: int
    width: int
    query_heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    vocabulary: int
    tied_embeddings: bool = False
    """Whether the input table is also the output head."""
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 131072
    """Longest context of a request (tokens)."""
    end_tokens: tuple[int, ...] = ()
    """Token ids that end an output, unless a request says otherwise."""

    def __post_init__(self) -> None:
        sizes = (self.layers, self.width, self.query_heads, self.kv_heads, self.head_width, self.ffn_width)
        if min(*sizes, self.vocabulary, self.max_positions) < 1:
            raise ValueError(f"{self} has a size below 1")
        if self.query_heads % self.kv_heads or self.head_width % 2:
            raise ValueError(
                f"{self.query_heads} query heads of width {self.head_width} on {self.kv_heads} KV heads:"
                " the first must be a multiple of the last, and the width even"
            )

    @property
    def query_width(self) -> int:
        """Elements of all query heads of one token."""
        return self.query_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Elements of all keys (or all values) of one token and layer."""
        return self.kv_heads * self.head_width

    @property
    def linear_parameters(self) -> int:
        """Weights that every decode step reads: all matrices, and the output head once."""
        attention = 2 * self.width * (self.query_width + self.kv_width)
        return self.layers * (attention + 3 * self.width * self.ffn_width) + self.vocabulary * self.width

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """KVCache bytes of one token over all layers."""
        return 2 * self.layers * self.kv_width * bytes_per_element


def config_from_shape(shape: ModelShape, *, max_positions: int = 131072) -> LlamaConfig:
    """The Llama of a named model shape.

    Raises:
        ValueError: when the shape's feed-forward is not Llama's gated one.
    """
    if shape.ffn_matrices != 3:
        raise ValueError(f"model {shape.name!r} has {shape.ffn_matrices} feed-forward matrices; a Llama has 3")
    return LlamaConfig(
        layers=shape.layers,
        width=shape.width,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_width=shape.head_width,
        ffn_width=shape.ffn_width,
        vocabulary=shape.vocabulary,
        tied_embeddings=shape.tied_embeddings,
        max_positions=max_positions,
    )


def read_config(directory: Path) -> LlamaConfig:
    """The config of a Hugging Face model directory, with the end tokens of its generation config where it has one.

    Raises:
        FileNotFoundError: when there is no `config.json`.
        ValueError: when a file is not what it should be, or describes something this engine does not compute.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} is not a Hugging Face model directory: it has no config.json")
    config = config_from_mapping(read_json(path), source=str(path))
    told = directory / "generation_config.json"
    # what `generate` of transformers goes by; instruction-tuned models end with more tokens there
    ends = _Fields(read_json(told) if told.is_file() else {}, str(told)).end_tokens(config.vocabulary)
    return config if ends is None else replace(config, end_tokens=ends)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory.

    Raises:
        OSError: when it cannot be read.
        ValueError: naming the file, and what it is instead.
    """
    body = path.read_bytes()
    refuse_partial(path, body)
    try:
        found = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        says = f"its {len(body)} bytes are no JSON ({error})"
        raise ValueError(f"{path}: {says}; was it downloaded whole?") from error
    if isinstance(found, dict):
        return cast("dict[str, Any]", found)
    raise ValueError(f"{path}: it holds {type(found).__name__}; an object is needed")


def refuse_partial(path: Path, begin: bytes) -> None:
    """Refuse what a download leaves in the place of a file: nothing, or a pointer of Git LFS.

    Args:
        path: of the file.
        begin: its first bytes.

    Raises:
        ValueError: naming the file, and what it is instead.
    """
    if not begin.strip():
        raise ValueError(f"{path} is empty; was it downloaded whole?")
    if begin.startswith(_LFS_POINTER):
        raise ValueError(f"{path} is a pointer of Git LFS, not the file itself; `git lfs pull` fetches it")


def config_from_mapping(raw: Mapping[str, Any], *, source: str = "config") -> LlamaConfig:
    """The config that a Hugging Face `config.json`, of any version of transformers, describes.

    A field that is missing has the default of transformers. A field that may not be null there may not be here.

    Raises:
        ValueError: naming `source`, the field, and what is allowed.
    """
    for name, allowed in _COMPUTED.items():
        if raw.get(name, allowed[0]) not in allowed:
            only = " or ".join(map(repr, allowed))
            raise ValueError(f"{source}: {name} is {raw[name]!r}; this engine computes {only} only")
    missing = [name for name in _REQUIRED if name not in raw]
    if missing:
        raise ValueError(f"{source}: no {', '.join(missing)}; a Llama config needs them")
    fields = _Fields(raw, source)
    heads, width, vocabulary = (fields.size(name) for name in ("num_attention_heads", "hidden_size", "vocab_size"))
    rope, positions = fields.rope(), min(fields.size("max_position_embeddings", 2048, most=math.inf), _MOST)
    try:
        scaling = _scaling(rope, raw, positions)
        if scaling is not None and scaling.kind == "linear":  # the field counts them before they are stretched
            positions = int(min(positions * scaling.factor, _MOST))
        return LlamaConfig(
            layers=fields.size("num_hidden_layers"),
            width=width,
            query_heads=heads,
            kv_heads=fields.size("num_key_value_heads", heads, null=heads),
            head_width=fields.size("head_dim", width // heads, null=width // heads),
            ffn_width=fields.size("intermediate_size"),
            vocabulary=vocabulary,
            tied_embeddings=fields.flag("tie_word_embeddings"),
            norm_epsilon=fields.number("rms_norm_eps", 1e-6),
            rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
            rope_scaling=scaling,
            max_positions=positions,
            end_tokens=fields.end_tokens(vocabulary) or (),
        )
    except ValueError as error:
        raise ValueError(str(error) if source in str(error) else f"{source}: {error}") from error


_REQUIRED: Final = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
_COMPUTED: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "model_type": ("llama",), "hidden_act": ("silu", "swish"), "attention_bias": (False,),
        "mlp_bias": (False,), "quantization_config": (None,),
    }
)  # fmt: skip
"""The values of fields whose other values this engine does not compute; the first is that of a missing field."""


@final
@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one file, or of a table in it, of which only the wanted type is taken."""

    raw: Mapping[str, Any]
    source: str
    """Begins each error."""

    def size(self, name: str, default: int | None = None, *, null: int | None = None, most: float = _MOST) -> int:
        """A whole number of at least 1; `null` stands for one that is there and null."""
        value = self.raw.get(name, default)
        value = null if value is None and name in self.raw else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self._wrong(name, f"a whole number from 1 to {_MOST}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.raw.get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        raise self._wrong(name, "a number above 0")

    def flag(self, name: str) -> bool:
        """True or false; false where there is none."""
        value = self.raw.get(name, False)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def end_tokens(self, vocabulary: int) -> tuple[int, ...] | None:
        """The ids of `eos_token_id` that the model knows; None where the field is missing or null."""
        value = self.raw.get("eos_token_id")
        if value is None:
            return None
        ends = cast("list[object]", value) if isinstance(value, list) else [value]
        if not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
            raise self._wrong("eos_token_id", "a token id, a list of them, or null")
        return tuple(end for end in cast("list[int]", ends) if 0 <= end < vocabulary)

    def rope(self) -> "_Fields":
        """The table of the rotary embedding: `rope_scaling` of transformers 4, else `rope_parameters` of 5."""
        name = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        table = self.raw.get(name)
        if not isinstance(table, dict | None):
            raise self._wrong(name, "an object or null")
        nested = [key for key, value in (table or {}).items() if isinstance(value, dict)]
        if nested:
            says = f"{name} has a table of its own for {nested[0]!r}; a Llama has one for all layers"
            raise ValueError(f"{self.source}: {says}")
        return _Fields(table or {}, f"{self.source}: {name}")

    def _wrong(self, name: str, allowed: str) -> ValueError:
        is_value = "is missing" if name not in self.raw else f"is {reprlib.repr(self.raw[name])}"
        return ValueError(f"{self.source}: {name} {is_value}; allowed is {allowed}")


def _scaling(rope: _Fields, raw: Mapping[str, Any], positions: int) -> RopeScaling | None:
    """The scaling of a rope table, whose key for its kind was once `type` and is now `rope_type`.

    The positions first trained on may stand beside the table, where they count more than in it, or nowhere, where
    they are those of the model: so does transformers.
    """
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        allowed = "default, linear, llama3"
        raise ValueError(f"{rope.source}: rope type {kind!r} is not computed here; allowed are {allowed}")
    part = rope.raw.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if part not in (None, 1.0):
        raise ValueError(f"{rope.source}: partial_rotary_factor is {part!r}; this engine computes 1.0 only")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor"))
    original = "original_max_position_embeddings"
    outside = _Fields(raw, rope.source.rpartition(": ")[0])
    return RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_frequency_factor=rope.number("low_freq_factor"),
        high_frequency_factor=rope.number("high_freq_factor"),
        original_positions=int((outside if original in raw else rope).number(original, positions)),
    )
