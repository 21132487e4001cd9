"""The KVCache of a model from its Hugging Face `config.json`.

Which fields bear on the KVCache depends on `model_type`: each family has a function here. Every other field has to
be one of those that are known not to (`NEUTRAL`), or null or false: a field that nobody looked at could change the
answer, so it is refused by name. Draft layers for speculative decoding, scales of quantised KVCache, and padding
of states are not counted.

Sources of the rules: the configuration and modeling files of transformers 5, the model cards of the families, and
for MLA and indexers the calculator of Mooncake's authors (kvcache.ai), whose rules are the same.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

from mooncake_lab.perf.kvcache import DEFAULT_CHECKPOINT_TOKENS, KVCacheShape, LayerGroup

KV_DTYPES: Final[Mapping[str, int]] = MappingProxyType(
    {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4}
)
"""Types of the numbers in a KVCache, and their bits."""
_MOST_LAYERS: Final = 10_000
_LARGEST: Final = 2**31 - 1
"""Of any size."""
_STATE_DTYPE: Final = "float32"
"""Of recurrent states, unless the config says otherwise: vLLM and transformers keep them in float32."""

NEUTRAL: Final = frozenset(
    {
        "_name_or_path", "activation", "add_bos_token", "alibi", "architectures", "attention_bias",
        "attention_dropout", "attention_multiplier", "attention_out_bias", "attention_value_scale",
        "attn_logit_softcapping", "auto_map", "aux_loss_alpha", "bias", "bos_token_id", "chunk_size",
        "chunk_size_feed_forward", "clip_qkv", "decoder_sparse_step", "dt_rank", "dtype", "embd_pdrop",
        "embedding_multiplier", "eos_token_id", "ep_size", "expand", "expert_layer_offset", "expert_layer_period",
        "experts_per_token", "ffn_dim_multiplier", "final_logit_softcapping", "first_k_dense_replace",
        "full_attn_alpha_factor", "full_attn_beta_factor", "hidden_act", "hidden_activation", "hidden_dropout",
        "id2label", "image_token_id", "image_token_index", "index_n_heads", "indexer_rope_interleave",
        "initial_context_length", "initializer_range", "intermediate_size", "is_encoder_decoder", "label2id",
        "layer_norm_eps", "layer_norm_epsilon", "linear_attn_alpha_factor", "linear_attn_beta_factor",
        "logit_scale", "logits_scaling", "mamba_chunk_size", "mamba_conv_bias", "mamba_dt_rank",
        "mamba_hidden_act",
        "mamba_proj_bias", "max_position_embeddings", "mlp_alpha_factor", "mlp_beta_factor", "mlp_bias",
        "mlp_hidden_act", "mlp_layer_types", "mlp_only_layers", "model_max_length", "model_type",
        "moe_intermediate_size", "moe_latent_size", "moe_layer_freq", "moe_renormalize",
        "moe_router_activation_func", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap",
        "mtp_layers_block_type", "mtp_num_hidden_layers", "mtp_transformer_layers", "n_group", "n_routed_experts",
        "n_shared_experts", "norm_eps", "norm_topk_prob", "normalization_function", "num_expert_group",
        "num_experts", "num_experts_per_tok", "num_experts_per_token", "num_local_experts", "num_logits_to_keep",
        "num_mtp_modules", "num_nextn_predict_layers", "num_shared_experts", "original_max_position_embeddings",
        "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
        "partial_rotary_factor", "position_embedding_type", "pretraining_tp", "problem_type", "q_lora_rank",
        "qk_head_dim", "qk_nope_head_dim", "query_pre_attn_scalar", "rescale_prenorm_residual", "resid_pdrop",
        "residual_dropout", "residual_in_fp32", "residual_multiplier", "return_dict", "rms_norm_eps",
        "rope_interleave", "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim",
        "routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise", "scoring_func", "seq_aux",
        "shared_expert_intermediate_size", "shared_intermediate_size", "swiglu_alpha", "swiglu_limit",
        "tie_word_embeddings", "time_step_floor", "time_step_limit", "time_step_max", "time_step_min",
        "time_step_rank", "tokenizer_class", "topk_group", "topk_method", "torch_dtype", "transformers_version",
        "use_associative_scan", "use_bias", "use_bidirectional_attention", "use_cache", "use_conv_bias",
        "use_mamba_kernels", "use_mambapy", "use_mtp", "use_qk_norm", "video_token_id", "vision_end_token_id",
        "vision_start_token_id", "vocab_size", "z_loss_coefficient",
    }
)  # fmt: skip
"""Fields that change nothing of the KVCache, whatever their value."""
_OF_WHOLE: Final = NEUTRAL | frozenset(
    {
        "audio_config", "boi_token_index", "eoi_token_index", "image_processor", "mm_tokens_per_image",
        "projection_hidden_size", "projection_layer_norm_eps", "projector_hidden_act", "vision_config",
        "vision_feature_layer",
    }
)  # fmt: skip
"""Likewise, of a model that wraps a language model in its `text_config`."""
_WRAPPERS: Final = frozenset(
    {"gemma3", "kimi_k25", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"}
)


@dataclass(slots=True)
class _Config:
    """The fields of a config. Mutable: it notes which were read."""

    raw: Mapping[str, Any]
    source: str
    token_bits: int
    read: set[str] = field(default_factory=set[str])

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; a missing or null one has the default."""
        return self._number(name, 1, default)

    def layers(self) -> int:
        """How many layers there are."""
        layers = self.size("num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise ValueError(f"{self.source}: num_hidden_layers is {layers}; allowed are 1 to {_MOST_LAYERS}")
        return layers

    def count(self, name: str) -> int:
        """A whole number of at least 0; a missing or null one is 0."""
        return self._number(name, 0, 0)

    def _number(self, name: str, least: int, default: int | None) -> int:
        value = self.given(name)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST:
            return value
        shown = "is missing" if value is None else f"is {reprlib.repr(value)}"
        allowed = f"a whole number from {least} to {_LARGEST}"
        raise ValueError(f"{self.source}: {name} {shown}; {allowed} is needed")

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing or null."""
        value = self.given(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise ValueError(f"{self.source}: {name} is {reprlib.repr(value)}; true or false is needed")

    def dtype(self, *names: str, default: str) -> str:
        """The first of these fields that is there, which names a type of numbers."""
        told = [value for value in map(self.given, names) if value is not None]
        value = str(told[0]).removeprefix("torch.") if told else default
        if value not in KV_DTYPES:
            known = ", ".join(KV_DTYPES)
            raise ValueError(f"{self.source}: {names[0]} is {reprlib.repr(value)}; allowed are {known}")
        return value

    def places(self, name: str) -> list[int]:
        """A list of numbers of layers; a missing or null one is empty."""
        value = self.given(name)
        numbers = cast("list[object]", value) if isinstance(value, list) else []
        if (value is not None and numbers is not value) or any(type(each) is not int for each in numbers):
            raise ValueError(
                f"{self.source}: {name} is {reprlib.repr(value)}; a list of numbers of layers is needed"
            )
        return cast("list[int]", numbers)

    def given(self, name: str) -> Any:
        """The value of a field; None where it is missing."""
        self.read.add(name)
        return self.raw.get(name)

    def names(self, name: str) -> list[str] | None:
        """A list of words, one for each layer; None where there is none."""
        value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in cast("list[object]", value)):
            shown = reprlib.repr(value)
            raise ValueError(f"{self.source}: {name} is {shown}; a list with a word for each layer is needed")
        return cast("list[str]", value)

    def refuse_unread(self, neutral: frozenset[str]) -> None:
        """Refuse fields that no rule looked at.

        Raises:
            ValueError: naming them.
        """
        unread = [
            name
            for name, value in self.raw.items()
            if name not in self.read and name not in neutral and value is not None and value is not False
        ]
        if unread:
            kind = self.raw.get("model_type")
            raise ValueError(
                f"{self.source}: {', '.join(unread)}: not known for a {kind!r}, and the KVCache may depend on it;"
                " name it as one to ignore if it does not"
            )


_Rule: TypeAlias = Callable[[_Config], Sequence[LayerGroup | None]]


def kvcache_of_config(
    raw: Mapping[str, Any],
    *,
    source: str = "config.json",
    kv_dtype: str | None = None,
    checkpoint_tokens: int = DEFAULT_CHECKPOINT_TOKENS,
    ignored: Sequence[str] = (),
) -> KVCacheShape:
    """The KVCache of the model that a Hugging Face config describes.

    Args:
        raw: the JSON object.
        source: begins each error.
        kv_dtype: of keys and values; by default what the config says (of its KVCache, else of the model), else
            bfloat16.
        checkpoint_tokens: from one checkpoint of windows and states to the next.
        ignored: fields to take as neutral.

    Raises:
        ValueError: naming the field, and what is allowed.
    """
    neutral = frozenset(ignored)
    wrapped = raw.get("text_config")
    if str(raw.get("model_type")) in _WRAPPERS and isinstance(wrapped, dict):
        outer = _Config(raw, source, 16, {"text_config"})
        outer.given("quantization_config")
        outer.refuse_unread(_OF_WHOLE | neutral)
        inherited = {name: raw[name] for name in ("torch_dtype", "dtype", "quantization_config") if name in raw}
        raw, source = inherited | cast("dict[str, Any]", wrapped), f"{source}: text_config"
    dtype = kv_dtype or _kv_dtype(raw)
    if dtype not in KV_DTYPES:
        raise ValueError(f"{source}: KVCache of type {dtype!r}; allowed are {', '.join(KV_DTYPES)}")
    config, kind = _Config(raw, source, KV_DTYPES[dtype]), raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted({*FAMILIES, *_WRAPPERS}))
        raise ValueError(f"{source}: model_type {kind!r} is not known; there are {known}")
    config.given("quantization_config")
    groups = [group for group in FAMILIES[kind](config) if group is not None]
    config.refuse_unread(NEUTRAL | neutral)
    if not any(group.token_bytes for group in groups):
        raise ValueError(f"{source}: none of the layers is full attention; at least one is needed")
    return KVCacheShape(name=_name(raw), groups=tuple(groups), checkpoint_tokens=checkpoint_tokens)


def _name(raw: Mapping[str, Any]) -> str:
    return str(raw.get("_name_or_path") or raw["model_type"])


def _kv_dtype(raw: Mapping[str, Any]) -> str:
    """What the config says of the type of its KVCache, else of its weights."""
    quantised: Any = raw.get("quantization_config")
    scheme = cast("dict[str, Any]", quantised).get("kv_cache_scheme") if isinstance(quantised, dict) else None
    if isinstance(scheme, dict):
        told = cast("dict[str, Any]", scheme)
        bits = told.get("num_bits")
        if bits == 8:
            return "fp8" if told.get("type") == "float" else "int8"
        return "int4" if bits == 4 else f"{reprlib.repr(bits)} bits"
    return str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def _bytes(config: _Config, elements: int, bits: int | None = None) -> int:
    """Bytes of so many numbers, of keys and values unless another width is given."""
    return elements * (config.token_bits if bits is None else bits) // 8


def _word(bits: int) -> str:
    return f"{bits // 8 if bits >= 8 else bits / 8:g} B"


def _heads(config: _Config) -> tuple[int, str]:
    """Bytes of one token in a layer that keeps keys and values of its KV heads, and how they come about."""
    query_heads = config.size("num_attention_heads")
    heads = config.size("num_key_value_heads", query_heads)
    config.read.add("hidden_size")
    width = config.size(
        "head_dim", None if config.given("head_dim") else config.size("hidden_size") // query_heads
    )
    words = f"2 x {heads} KV heads x {width} x {_word(config.token_bits)}"
    return _bytes(config, 2 * heads * width), words


def _attention(config: _Config, layers: int, window: int | None = None) -> list[LayerGroup]:
    """Layers with KV heads: full attention, or a window."""
    if not layers:
        return []
    token_bytes, factors = _heads(config)
    kind = "full attention" if window is None else "sliding window"
    return [LayerGroup(kind=kind, layers=layers, token_bytes=token_bytes, window_tokens=window, factors=factors)]


def _full(config: _Config) -> list[LayerGroup]:
    return _attention(config, config.layers())


def _windowed(pattern: Callable[[_Config, int], bool]) -> _Rule:
    """Layers with a window, where `layer_types` says so, else where the family has them.

    Args:
        pattern: whether layer i has a window, by the family's rule.
    """

    def rule(config: _Config) -> list[LayerGroup]:
        layers, window = config.layers(), config.given("sliding_window")
        types, by_rule = config.names("layer_types"), [pattern(config, i) for i in range(layers)]
        if types is not None:
            _check_types(config, types, layers, {"full_attention", "sliding_attention"})
            by_rule = [each == "sliding_attention" for each in types]
        sliding = sum(by_rule) if window is not None else 0
        found = _attention(config, layers - sliding)
        return found + (_attention(config, sliding, config.size("sliding_window")) if sliding else [])

    return rule


def _check_types(config: _Config, types: Sequence[str], layers: int, allowed: set[str]) -> None:
    unknown = sorted({*types} - allowed)
    if unknown or len(types) != layers:
        what = f"has {', '.join(unknown)}" if unknown else f"has {len(types)} entries for {layers} layers"
        raise ValueError(
            f"{config.source}: layer_types {what}; allowed are {', '.join(sorted(allowed))}, one a layer"
        )


def _every(default: int) -> Callable[[_Config, int], bool]:
    """Every so many layers one has full attention, and the others have windows."""

    def has_window(config: _Config, layer: int) -> bool:
        name = "sliding_window_pattern" if "sliding_window_pattern" in config.raw else "_sliding_window_pattern"
        config.read |= {"sliding_window_pattern", "_sliding_window_pattern"}
        return (layer + 1) % config.size(name, default) != 0

    return has_window


def _late_windows(config: _Config, layer: int) -> bool:
    """Qwen's: the layers from `max_window_layers` on, if windows are in use at all."""
    return config.flag("use_sliding_window") and layer >= config.count("max_window_layers")


def _qwen(config: _Config) -> Sequence[LayerGroup | None]:
    if not config.flag("use_sliding_window"):  # the field `sliding_window` has a value nevertheless
        config.read |= {"sliding_window", "max_window_layers", "layer_types"}
        return _full(config)
    return _windowed(_late_windows)(config)


def _latent_layers(config: _Config, layers: int, read_at_most_tokens: int | None = None) -> LayerGroup:
    """Layers that keep one latent vector and one rotary key for all heads."""
    config.read |= {"num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "v_head_dim"}
    rank, rotary = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    return LayerGroup(
        kind="latent attention (MLA)",
        layers=layers,
        token_bytes=_bytes(config, rank + rotary),
        read_at_most_tokens=read_at_most_tokens,
        factors=f"({rank} latent + {rotary} rotary) x {_word(config.token_bits)}",
    )


def _latent(config: _Config) -> list[LayerGroup]:
    """MLA in every layer; with an indexer, that one's keys, too (DSA)."""
    layers = config.layers()
    if config.given("index_topk") is None:
        return [_latent_layers(config, layers)]
    group = _latent_layers(config, layers, config.size("index_topk"))
    _indexed(config, layers)
    width = config.size("index_head_dim")
    words = f"{width} x {_word(config.token_bits)}"
    indexer = LayerGroup(kind="indexer", layers=layers, token_bytes=_bytes(config, width), factors=words)
    return [group, indexer]


def _indexed(config: _Config, layers: int) -> None:
    """Refuse sparse models whose layers differ."""
    for name, only in (("layer_types", "indexed_attention"), ("indexer_types", "full")):
        types = config.names(name)
        if types is not None and (len(types) != layers or {*types} != {only}):
            raise ValueError(f"{config.source}: {name} has other entries than {layers} times {only!r}")


def _state_bits(config: _Config) -> int:
    return KV_DTYPES[config.dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype", default=_STATE_DTYPE)]


def _states(
    config: _Config, kind: str, layers: int, state: int, channels: int, kernel: int, words: str
) -> LayerGroup | None:
    """Layers with a recurrent state and the last inputs of a convolution, one fewer than its kernel is long.

    Args:
        config: the fields.
        kind: in words.
        layers: how many.
        state: numbers of the recurrent state.
        channels: of the convolution.
        kernel: its length.
        words: how the state's numbers come about.

    Returns:
        None where there are no such layers.
    """
    bits = _state_bits(config)
    if not layers:
        return None
    convolution = _bytes(config, channels * (kernel - 1), max(config.token_bits, 16))
    return LayerGroup(
        kind=kind,
        layers=layers,
        state_bytes=_bytes(config, state, bits) + convolution,
        factors=f"({words} x {_word(bits)} + {channels} x {kernel - 1} x {_word(max(config.token_bits, 16))})",
    )


def _types(config: _Config, layers: int, default: Callable[[int], str]) -> list[str]:
    """`full_attention` or `linear_attention` of each layer."""
    types = config.names("layer_types") or [default(i) for i in range(layers)]
    types = [{"attention": "full_attention", "mamba": "linear_attention"}.get(each, each) for each in types]
    _check_types(config, types, layers, {"full_attention", "linear_attention"})
    return types


def _delta_net(config: _Config) -> list[LayerGroup | None]:
    """Qwen3-Next and Qwen3.5: gated delta networks, and full attention in every fourth layer."""
    layers, every = config.layers(), config.size("full_attention_interval", 4)
    types = _types(config, layers, lambda i: "linear_attention" if (i + 1) % every else "full_attention")
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    key_width, value_width = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    full = types.count("full_attention")
    states = _states(
        config,
        "gated delta network",
        layers - full,
        value_heads * key_width * value_width,
        2 * key_heads * key_width + value_heads * value_width,
        config.size("linear_conv_kernel_dim"),
        f"{value_heads} heads x {key_width} x {value_width}",
    )
    return [*_attention(config, full), states]


def _kimi_linear(config: _Config) -> list[LayerGroup | None]:
    """Kimi Linear: delta attention (KDA), and MLA in every fourth layer."""
    layers, table = config.layers(), config.given("linear_attn_config")
    if isinstance(table, dict):
        told = _Config(cast("dict[str, Any]", table), f"{config.source}: linear_attn_config", config.token_bits)
        full = min(layers, len(told.places("full_attn_layers")))
        told.read.add("kda_layers")
        heads, width, kernel = (told.size(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
        told.refuse_unread(frozenset())
    else:
        full = _types(config, layers, lambda i: "linear_attention" if (i + 1) % 4 else "full_attention").count(
            "full_attention"
        )
        heads, width = config.size("linear_num_heads"), config.size("linear_head_dim")
        kernel = config.size("linear_conv_kernel_dim")
    config.given("mla_use_nope")
    states = _states(
        config, "delta attention (KDA)", layers - full, heads * width * width, 3 * heads * width, kernel,
        f"{heads} heads x {width} x {width}",
    )  # fmt: skip
    return [_latent_layers(config, full) if full else None, states]


def _jamba(config: _Config) -> list[LayerGroup | None]:
    """Jamba: Mamba, and attention in one layer of each period."""
    layers = config.layers()
    period, offset = config.size("attn_layer_period"), config.count("attn_layer_offset")
    full = sum(i % period == offset for i in range(layers))
    inner = config.size("mamba_expand") * config.size("hidden_size")
    width = config.size("mamba_d_state")
    states = _states(
        config, "Mamba", layers - full, inner * width, inner, config.size("mamba_d_conv"), f"{inner} x {width}"
    )
    return [*_attention(config, full), states]


def _mamba2(config: _Config) -> list[LayerGroup | None]:
    """Bamba and Granite 4: Mamba 2, and attention in some layers."""
    layers, indices = config.layers(), config.places("attn_layer_indices")
    types = _types(config, layers, lambda i: "full_attention" if i in indices else "linear_attention")
    full = types.count("full_attention")
    inner = config.size("mamba_expand") * config.size("hidden_size")
    state, groups = config.size("mamba_d_state"), config.size("mamba_n_groups", 1)
    heads = config.size("mamba_n_heads")
    config.given("mamba_d_head")  # may be "auto": the inner width over the heads
    states = _states(
        config, "Mamba 2", layers - full, inner * state, inner + 2 * groups * state, config.size("mamba_d_conv"),
        f"{heads} heads x {inner // heads} x {state}",
    )  # fmt: skip
    return [*_attention(config, full), states]


FAMILIES: Final[Mapping[str, _Rule]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "granite", "granitemoe", "glm4_moe", "minimax_m2", "olmo2"), _full),
        **dict.fromkeys(("mistral", "mixtral", "phi3"), _windowed(lambda _config, _layer: True)),
        **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _qwen),
        **dict.fromkeys(("gemma2", "gpt_oss"), _windowed(lambda _config, layer: layer % 2 == 0)),
        "gemma3_text": _windowed(_every(6)),
        **dict.fromkeys(("cohere2", "olmo3", "exaone4"), _windowed(_every(4))),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa"), _latent),
        **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _delta_net),
        "kimi_linear": _kimi_linear,
        "jamba": _jamba,
        **dict.fromkeys(("bamba", "granitemoehybrid"), _mamba2),
    }
)
"""The rule of each `model_type`."""
