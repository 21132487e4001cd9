# /// script
# dependencies = ["gguf==0.19.0", "safetensors", "numpy"]
# ///
"""A model of Hugging Face's format as a GGUF file for llama.cpp; run as a program for its server.

Run: python benchmarks/peers/gguf_file.py FOLDER {float32,bfloat16}

The folder has the weights in float32.
"""

# pyright: basic
# this environment has not the libraries

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file


def write_gguf(directory: Path, dtype: str, *, vocabulary: bool = False) -> Path:
    """The weights as llama.cpp names and orders them, beside them; a server needs a vocabulary, any will do."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    path = directory / f"{dtype}.gguf"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kind = gguf.GGMLQuantizationType.F32 if dtype == "float32" else gguf.GGMLQuantizationType.BF16
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, config["vocab_size"] if vocabulary else 0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        turned = tensor
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # neighbours, not halves, are rotated together
            count = heads if "q_proj" in name else kv_heads
            turned = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        called = names.get_name(name, try_suffixes=(".weight",))
        if called is None:
            raise ValueError(f"llama.cpp has no name for {name}")
        plain = tensor.ndim == 1  # it wants norms in float32
        stored = gguf.GGMLQuantizationType.F32 if plain else kind
        writer.add_tensor(called, gguf.quants.quantize(np.ascontiguousarray(turned), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Words that stand for themselves, after three special tokens and all bytes; 0 writes none."""
    if not size:
        writer.add_tokenizer_model("none")
        return
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))][:size]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256][:size]
    tokens += [f"▁t{number}" for number in range(len(tokens), size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([*types, *[kinds.NORMAL] * (size - len(types))])


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), sys.argv[2], vocabulary=True)
