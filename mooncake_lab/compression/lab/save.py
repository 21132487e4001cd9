"""From a training checkpoint to a model directory that the engine and Hugging Face both load."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mooncake_lab.compression.lab import vocabulary
from mooncake_lab.compression.lab.network import POSITIONS, lab_config


def save_model(state: dict[str, torch.Tensor], directory: Path) -> None:
    """Write `config.json` and `model.safetensors` (float32).

    Args:
        state: parameters by their Hugging Face names.
        directory: made if needed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(), indent=2) + "\n")


def _config() -> dict[str, Any]:
    config = lab_config()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": True,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": POSITIONS,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": vocabulary.BEGIN,
        "eos_token_id": vocabulary.END,
        "torch_dtype": "float32",
    }
