"""What a Llama is: its sizes, its rotary embedding, and where both are written down."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mooncake_lab.perf.specs import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those first trained on.

    `linear` divides every frequency by `factor`; `llama3` divides the low ones only, with a ramp
    between the two cut-offs (in turns over `original_positions`).

    Raises:
        ValueError: when the factor is not positive or the cut-offs are not in order.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if self.factor <= 0 or not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(f"{self} is not a rope scaling: factor > 0 and 0 < low < high cut-off are needed")


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
        ValueError: when it describes something this engine does not compute.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} is not a Hugging Face model directory: it has no config.json")
    raw = json.loads(path.read_text(encoding="utf-8"))
    told = directory / "generation_config.json"
    if (
        told.is_file()
    ):  # what `generate` of transformers goes by; instruction-tuned models end with more tokens there
        ends = json.loads(told.read_text(encoding="utf-8")).get("eos_token_id")
        raw |= {} if ends is None else {"eos_token_id": ends}
    return config_from_mapping(raw, source=str(path))


def config_from_mapping(raw: Mapping[str, Any], *, source: str = "config") -> LlamaConfig:
    """The config that a Hugging Face `config.json`, of any version of transformers, describes.

    Raises:
        ValueError: naming `source` and what in it this engine does not compute.
    """
    computed = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, allowed in computed.items():
        if raw.get(name, allowed) != allowed:
            raise ValueError(f"{source}: {name} is {raw[name]!r}; this engine computes {allowed!r} only")
    missing = [name for name in _REQUIRED if name not in raw]
    if missing:
        raise ValueError(f"{source}: no {', '.join(missing)}; a Llama config needs them")
    heads = int(raw["num_attention_heads"])
    rope = {"rope_theta": raw.get("rope_theta", 10000.0)} | dict(raw.get("rope_scaling") or {})
    rope |= dict(raw.get("rope_parameters") or {})
    ends = raw.get("eos_token_id")
    return LlamaConfig(
        layers=int(raw["num_hidden_layers"]),
        width=int(raw["hidden_size"]),
        query_heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_width=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        ffn_width=int(raw["intermediate_size"]),
        vocabulary=int(raw["vocab_size"]),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_scaling(rope, source),
        max_positions=int(raw.get("max_position_embeddings", 2048)),
        end_tokens=() if ends is None else tuple(ends) if isinstance(ends, list) else (int(ends),),
    )


_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


def _scaling(rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    """The scaling of a rope table, whose key for its kind was once `type` and is now `rope_type`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(rope["factor"]))
    if kind != "llama3":
        raise ValueError(f"{source}: rope type {kind!r} is not computed here; allowed are default, linear, llama3")
    return RopeScaling(
        kind="llama3",
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
    )
