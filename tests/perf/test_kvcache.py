"""KVCache by kind of attention: values of released models, the projections of transformers, and laws.

The released configs' values are those of the model cards; for the Qwen3, MiniMax, Kimi, DeepSeek and GLM models
they are also in the calculator of Mooncake's authors (kvcache.ai, `models.yaml` of 2026-05-20), whose rules for
MLA and indexers are those here. What is expected is written as the arithmetic of these rules.
"""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.perf import KVCacheShape, LayerGroup, kvcache_of_config, linear_kvcache, model_shape

N = 131_072


def gqa(kind, layers, heads, kv_heads, width, **others):
    """A config whose layers have KV heads."""
    return {
        "model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width, "torch_dtype": "bfloat16", **others,
    }  # fmt: skip


def mla(kind, layers, heads, **others):
    """A config of latent attention."""
    return {
        "model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, **others,
    }  # fmt: skip


def dsa(kind, layers, heads, index_heads):
    """The same with an indexer."""
    return mla(kind, layers, heads, index_head_dim=128, index_n_heads=index_heads, index_topk=2048)


QWEN3_NEXT = gqa(
    "qwen3_next", 48, 16, 2, 256, full_attention_interval=4, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
)  # fmt: skip
KIMI_LINEAR = mla(
    "kimi_linear", 27, 32, hidden_size=2304, mla_use_nope=True, head_dim=72,
    linear_attn_config={
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
        "short_conv_kernel_size": 4, "kda_layers": [*range(1, 4), *range(5, 8)],
    },
)  # fmt: skip
JAMBA = gqa(
    "jamba", 32, 32, 8, 128, hidden_size=4096, attn_layer_period=8, attn_layer_offset=4, mamba_d_conv=4,
    mamba_d_state=16, mamba_expand=2, mamba_dt_rank=256,
)  # fmt: skip
GRANITE_H = gqa(
    "granitemoehybrid", 40, 32, 8, 128, hidden_size=4096, mamba_d_conv=4, mamba_d_state=128, mamba_expand=2,
    mamba_n_groups=1, mamba_n_heads=128, mamba_d_head=64,
    layer_types=["attention" if i in {5, 15, 25, 35} else "mamba" for i in range(40)],
)  # fmt: skip
FP8 = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}

CONFIGS = {
    "Llama 3.1 70B": (gqa("llama", 80, 64, 8, 128), 327_680 * N),
    "Llama 3.1 405B, FP8 KVCache": (gqa("llama", 126, 128, 8, 128, quantization_config=FP8), 258_048 * N),
    "Qwen3-235B-A22B": (gqa("qwen3_moe", 94, 64, 4, 128), 94 * 2 * 4 * 128 * 2 * N),
    "Qwen3-32B": (gqa("qwen3", 64, 64, 8, 128, use_sliding_window=False), 262_144 * N),
    "Qwen3-0.6B": (gqa("qwen3", 28, 16, 8, 128), 114_688 * N),
    "Qwen2.5-7B": (
        {**gqa("qwen2", 28, 28, 4, None), "hidden_size": 3584, "sliding_window": 131072,
         "use_sliding_window": False, "max_window_layers": 28},
        57_344 * N,
    ),
    "MiniMax-M2": (gqa("minimax_m2", 62, 48, 8, 128, use_mtp=True, num_mtp_modules=3), 253_952 * N),
    "Kimi K2": (mla("kimi_k2", 61, 64), 70_272 * N),
    "Kimi K2.5": (
        {"model_type": "kimi_k25", "text_config": mla("kimi_k2", 61, 64), "vision_config": {"depth": 27}},
        70_272 * N,
    ),
    "DeepSeek-V3": (mla("deepseek_v3", 61, 128, num_nextn_predict_layers=1), 70_272 * N),
    "DeepSeek-V3.2": (dsa("deepseek_v32", 61, 128, 64), 61 * (512 + 64 + 128) * 2 * N),
    "GLM-5": (dsa("glm_moe_dsa", 78, 64, 32), 78 * 704 * 2 * N),
    "gpt-oss-120b": (gqa("gpt_oss", 36, 64, 8, 64, sliding_window=128), 18 * 2 * 8 * 64 * 2 * (N + 128)),
    "Gemma 3 27B": (
        {"model_type": "gemma3", "torch_dtype": "bfloat16", "mm_tokens_per_image": 256,
         "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
                         "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
                         "sliding_window_pattern": 6}},
        2 * 16 * 128 * 2 * (10 * N + 52 * 1024),
    ),
    "Mistral 7B v0.1": (gqa("mistral", 32, 32, 8, 128, sliding_window=4096), 32 * 4096 * 4096),
    "Mistral 7B v0.3": (gqa("mistral", 32, 32, 8, 128, sliding_window=None), 32 * 4096 * N),
    "Command R7B": (
        gqa("cohere2", 32, 32, 8, 128, sliding_window=4096, sliding_window_pattern=4), 4096 * (8 * N + 24 * 4096)
    ),
    "Qwen3-Next-80B-A3B": (
        QWEN3_NEXT, 12 * 2 * 2 * 256 * 2 * N + 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
    ),
    "Kimi-Linear-48B-A3B": (
        KIMI_LINEAR, 7 * 576 * 2 * N + 20 * (32 * 128 * 128 * 4 + 3 * 32 * 128 * 3 * 2)
    ),
    "Jamba v0.1": (JAMBA, 4 * 2 * 8 * 128 * 2 * N + 28 * (8192 * 16 * 4 + 8192 * 3 * 2)),
    "Granite 4.0 H Small": (
        GRANITE_H, 4 * 2 * 8 * 128 * 2 * N + 36 * (8192 * 128 * 4 + (8192 + 2 * 128) * 3 * 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_released_models_have_the_expected_bytes(name):
    """A request of 131,072 tokens holds the bytes that the model's rule gives."""
    raw, expected = CONFIGS[name]
    assert kvcache_of_config(raw).kv_bytes(N) == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_unknown_fields_are_refused_by_name(name):
    """A field that nobody looked at is refused, in a wrapper, too; null and false are not."""
    raw, expected = CONFIGS[name]
    for place in [raw, *([raw["text_config"]] if "text_config" in raw else [])]:
        for value in (7, "seven", {"a": 1}, True):
            place["kv_sharing_layers"] = value
            with pytest.raises(ValueError, match="kv_sharing_layers: not known for a"):
                kvcache_of_config(raw)
            assert kvcache_of_config(raw, ignored=["kv_sharing_layers"]).kv_bytes(N) == expected
        place["kv_sharing_layers"] = None
        assert kvcache_of_config(raw).kv_bytes(N) == expected
        del place["kv_sharing_layers"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not known; there are bamba, "),
        ({"model_type": None}, "model_type None is not known"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; a whole number from 1"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824; allowed are 1 to 10000"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"sliding_window": 4096}, "sliding_window: not known for a 'llama'"),
        ({"layer_types": ["full_attention"] * 80}, "layer_types: not known for a 'llama'"),
        ({"torch_dtype": "int3"}, "KVCache of type 'int3'; allowed are float32, "),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 6}}}, "KVCache of type '6 bits'"),
    ],
)
def test_what_is_wrong_is_named(change, says):
    """A wrong value, a field of another family, and a model of an unknown kind are refused by name."""
    with pytest.raises(ValueError, match=says):
        kvcache_of_config({**gqa("llama", 80, 64, 8, 128), **change})


@pytest.mark.parametrize(
    ("types", "says"),
    [
        (["full_attention"] * 35, "has 35 entries for 36 layers"),
        (["full_attention"] * 35 + ["chunked_attention"], "has chunked_attention; allowed are full_attention"),
        (["full_attention"] * 35 + [3], "a list with a word for each layer"),
        ("full_attention", "a list with a word for each layer"),
    ],
)
def test_wrong_layer_types_are_named(types, says):
    """Layers of an unknown kind, too few of them, and what is no list are refused."""
    with pytest.raises(ValueError, match=says):
        kvcache_of_config(gqa("gpt_oss", 36, 64, 8, 64, sliding_window=128, layer_types=types))


LENGTHS = st.integers(0, 300_000)
GROUPS = st.lists(
    st.builds(
        LayerGroup, kind=st.just("made"), layers=st.integers(1, 60), token_bytes=st.integers(1, 4096),
        window_tokens=st.none() | st.integers(1, 9000), read_at_most_tokens=st.none() | st.integers(1, 9000),
        state_bytes=st.integers(0, 10**6), factors=st.just("made"),
    ),
    min_size=1, max_size=4,
)  # fmt: skip
SHAPES = st.builds(
    KVCacheShape, name=st.just("made"), groups=GROUPS.map(tuple), checkpoint_tokens=st.integers(1, 3000)
)


@given(SHAPES, LENGTHS, LENGTHS)
def test_longer_requests_hold_and_read_no_less(shape, one, other):
    """Bytes and read tokens never fall as a request grows, and a step reads no more than its tokens."""
    short, long = sorted((one, other))
    assert 0 <= shape.kv_bytes(short) <= shape.kv_bytes(long)
    assert 0 <= shape.read_tokens(short) <= shape.read_tokens(long) * (1 + 1e-12)
    assert shape.read_tokens(long) <= long * (1 + 1e-12)


@given(SHAPES, LENGTHS)
def test_growth_is_constant_between_windows(shape, tokens):
    """Between two of `windows`, each token adds the same bytes and read tokens."""
    bounds = [0, *shape.windows, 10**6]
    low = max(bound for bound in bounds if bound <= tokens)
    high = min(bound for bound in bounds if bound > tokens)
    if low + 1 < high:  # the first token brings the states
        low = max(low, 1)
        steps = [
            shape.kv_bytes(n + 1) - shape.kv_bytes(n)
            for n in (low, max(low, tokens) if tokens < high else low, high - 1)
        ]
        assert len({*steps}) == 1
        assert shape.read_growth(low) == pytest.approx(shape.read_growth(high - 1), rel=1e-6, abs=1e-6)


@given(SHAPES, LENGTHS)
def test_a_reusable_prefix_ends_on_a_checkpoint(shape, matched):
    """Reuse is a whole number of checkpoints, less than one below what matched; all of it where all is kept."""
    reusable = shape.reusable_tokens(matched)
    if shape.checkpoint_bytes():
        assert reusable % shape.checkpoint_tokens == 0
        assert reusable <= matched < reusable + shape.checkpoint_tokens
    else:
        assert reusable == matched


@given(LENGTHS)
def test_a_named_shape_is_linear(tokens):
    """Of LLaMA3-70B all three quantities are what they were: a factor, and twice the identity."""
    shape = model_shape("llama3-70b")
    found = linear_kvcache(shape)
    assert found.is_linear
    assert found.kv_bytes(tokens) == tokens * shape.kv_bytes_per_token
    assert found.read_tokens(tokens) == found.reusable_tokens(tokens) == tokens
    assert isinstance(found.read_tokens(tokens), int)
    assert (found.windows, found.checkpoint_bytes()) == ((), 0)


def test_a_step_of_gpt_oss_reads_half_of_a_long_request():
    """With every second layer windowed, a long request reads half its tokens and half the window."""
    shape = kvcache_of_config(CONFIGS["gpt-oss-120b"][0])
    assert shape.read_tokens(100) == 100
    assert shape.read_tokens(N) == (N + 128) / 2
    assert shape.windows == (128,)
    assert shape.reusable_tokens(1000) == 512


TERM = re.compile(r"([\d,.]+)? ?(n|min\(n, ([\d,]+)\))?")


def evaluated(equation, n):
    """The sum that an equation says, for a length."""
    total = 0
    for term in equation.partition(" = ")[2].split(" + "):
        factor, kept, bound = TERM.fullmatch(term).groups()
        number = float((factor or "1").replace(",", ""))
        total += number * (1 if kept is None else n if bound is None else min(n, int(bound.replace(",", ""))))
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_equations_say_what_is_computed(name):
    """The printed equations, evaluated, are the bytes and the read tokens."""
    shape = kvcache_of_config(CONFIGS[name][0])
    held, read, _ = shape.equations()
    for n in (1, 1000, N):
        assert evaluated(held, n) == shape.kv_bytes(n)
        assert evaluated(read, n) == pytest.approx(shape.read_tokens(n), rel=1e-3)


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"token_bytes": -1}, {"window_tokens": 0}, {"token_bytes": 0}])
def test_impossible_layers_are_refused(wrong):
    """Layers have positive counts and windows, and keep something."""
    with pytest.raises(ValueError, match=r"out of range|keeps nothing"):
        LayerGroup(**{"kind": "made", "layers": 1, "token_bytes": 2, "factors": "2", **wrong})
    state = LayerGroup(kind="made", layers=1, state_bytes=5, factors="5")
    with pytest.raises(ValueError, match="no layer that keeps tokens"):
        KVCacheShape(name="made", groups=(state,))
    with pytest.raises(ValueError, match="checkpoint every 0 tokens"):
        KVCacheShape(
            name="made", groups=(LayerGroup(kind="a", layers=1, token_bytes=1, factors=""),), checkpoint_tokens=0
        )


JUNK = st.sampled_from(
    [None, True, False, 0, -1, 3, 2**40, 1.5, "", "many", [], [3], ["full_attention"], {}, {"a": 1}, [[]]]
)


@given(st.sampled_from([*CONFIGS]), st.data())
def test_no_value_of_a_field_breaks_the_reader(name, data):
    """Whatever stands in a field, there is a KVCache, or one sentence that begins with the name of the file."""
    raw = CONFIGS[name][0]
    inner = dict(raw.get("text_config") or raw)
    for field in data.draw(st.lists(st.sampled_from([*inner, "layer_types", "quantization_config"]), max_size=3)):
        inner[field] = data.draw(JUNK)
    raw = {**raw, "text_config": inner} if "text_config" in raw else inner
    try:
        said = "here: " * (kvcache_of_config(raw, source="here").kv_bytes(1000) > 0)
    except ValueError as error:
        said = str(error)
    assert said.startswith("here: ")


PAGE = (Path(__file__).parents[2] / "book" / "models.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.+) \| (.+) \| (.+ n.*) \| ([\d.]+) \| ([\d,]+) \|$", re.MULTILINE)


def test_the_page_has_the_numbers_of_the_package():
    """Each row of the table of models is what is computed here: layers, equation, GiB and read tokens."""
    rows = ROW.findall(PAGE)
    assert len(rows) == 9
    for name, layers, equation, gib, read in rows:
        shape = kvcache_of_config(CONFIGS[name][0])
        counted = [group.layers for group in shape.groups if group.kind != "indexer"]
        assert [int(number) for number in re.findall(r"\d+", layers)] == counted
        assert f"kv_bytes(n) = {equation}" == shape.equations()[0]
        assert (gib, read) == (f"{shape.kv_bytes(N) / 2**30:.2f}", f"{shape.read_tokens(N):,.0f}")


def test_the_example_of_the_page_is_what_is_printed(tmp_path):
    """The output on the page is that of the command for this config."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["gpt-oss-120b"][0]))
    found = CliRunner().invoke(app, ["model", "describe", str(path), "--tokens", "131072"])
    assert found.exit_code == 0, found.output
    assert found.stdout in PAGE


TINY = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8, "moe_intermediate_size": 16, "pad_token_id": None,
}  # fmt: skip
FEW_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
BUILT = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 32}, "granite": {}, "mistral": {"head_dim": 24},
    "mixtral": FEW_EXPERTS, "gpt_oss": {**FEW_EXPERTS, "head_dim": 16}, "gemma2": {"head_dim": 48},
    "gemma3_text": {"head_dim": 48}, "cohere2": {}, "olmo3": {}, "glm4_moe": {**FEW_EXPERTS, "n_group": 1},
    "qwen3_next": {**FEW_EXPERTS, "head_dim": 32, "linear_num_value_heads": 8, "linear_num_key_heads": 4},
    "deepseek_v3": {
        **FEW_EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 32, "n_group": 1,
        "topk_group": 1,
    },
    "jamba": {**FEW_EXPERTS, "mamba_dt_rank": 4},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [3]},
}  # fmt: skip


@pytest.mark.parametrize("kind", BUILT)
def test_widths_are_those_of_the_layers_that_transformers_builds(kind):
    """Bytes a token are the outputs of its key and value projections; a convolution has as many channels."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **{**TINY, **BUILT[kind]})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    widths, channels = 0, []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in {"k_proj", "v_proj", "kv_a_proj_with_mqa"}:
            widths += module.out_features
        elif last == "conv1d":
            channels.append(module.in_channels)
    told = {name: value for name, value in config.to_dict().items() if value is not None}
    found = kvcache_of_config(told, kv_dtype="bfloat16")
    assert found.full_token_bytes == 2 * widths > 0
    states = [group for group in found.groups if group.state_bytes]
    assert sum(group.layers for group in states) == len(channels)
    for group in states:
        assert f" + {channels[0]} x 3 x 2 B)" in group.factors
