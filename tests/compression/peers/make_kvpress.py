"""Makes `kvpress.safetensors`: what NVIDIA's kvpress keeps, and the keys and queries it decided on.

kvpress asks for pandas below 3 and a transformers below 5.3, so it cannot be installed beside this project. Its
presses are plain torch, though: unpack the wheel and name the folder.

    pip download --no-deps kvpress==0.5.5 -d W && python -m zipfile -e W/kvpress-0.5.5-py3-none-any.whl W/x
    python tests/compression/peers/make_kvpress.py W/x
"""

import importlib
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

TOKENS, WINDOW, KERNEL = 96, 16, 5
RATIOS = (0.25, 0.5, 0.75)


def presses(folder):
    """The two presses, without running kvpress's own __init__, which imports what is not here."""
    package = types.ModuleType("kvpress")
    package.__path__ = [f"{folder}/kvpress"]
    sys.modules["kvpress"] = package
    sys.path.insert(0, folder)
    snapkv = importlib.import_module("kvpress.presses.snapkv_press").SnapKVPress
    streaming = importlib.import_module("kvpress.presses.streaming_llm_press").StreamingLLMPress
    return snapkv, streaming


def main(folder):
    """Run both presses on a small random Llama and write what they kept."""
    snapkv, streaming = presses(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    seen = {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kwargs, index=index: seen.__setitem__(index, kwargs), with_kwargs=True
        )
    cache = DynamicCache(config=config)
    found = {}
    with torch.inference_mode():
        model(torch.randint(50, (1, TOKENS)), past_key_values=cache)
        for index, layer in enumerate(model.model.layers):
            hidden, rope = seen[index]["hidden_states"], seen[index]["position_embeddings"]
            keys, values = cache.layers[index].keys, cache.layers[index].values
            found[f"keys.{index}"] = keys[0].contiguous()
            found[f"queries.{index}"] = queries(layer.self_attn, hidden, rope)
            for ratio in RATIOS:
                count = int(TOKENS * (1 - ratio))
                for name, press in (
                    ("snapkv", snapkv(compression_ratio=ratio, window_size=WINDOW, kernel_size=KERNEL)),
                    ("streaming", streaming(compression_ratio=ratio, n_sink=4)),
                ):
                    about = {"position_embeddings": rope}
                    scores = press.score(layer.self_attn, hidden, keys, values, None, about)
                    kept = scores.topk(count, dim=-1).indices[0].sort(dim=-1).values
                    found[f"{name}.{index}.{count}"] = kept.contiguous()
    save_file(found, Path(__file__).with_name("kvpress.safetensors"))


def queries(attention, hidden, rope):
    """Rotated queries of the last tokens, (window, query_heads, head_width)."""
    rotate_half = importlib.import_module("transformers.models.llama.modeling_llama").rotate_half
    flat = attention.q_proj(hidden)[0].view(TOKENS, 4, 8)
    turned = flat * rope[0][0][:, None] + rotate_half(flat) * rope[1][0][:, None]
    return turned[-WINDOW:].contiguous()


if __name__ == "__main__":
    main(sys.argv[1])
