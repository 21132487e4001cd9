"""The network as it is trained: a plain Llama in torch, whose parameters bear their Hugging Face names.

The engine computes the same function from the saved weights, over a paged cache and without gradients.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling
from safetensors.torch import save_file
from torch import nn

from mooncake_lab.compression.lab import tasks as vocabulary
from mooncake_lab.engine.config import LlamaConfig, config_from_shape
from mooncake_lab.engine.rope import inverse_frequencies, make_rope
from mooncake_lab.perf.models import model_shape

POSITIONS: Final = 2048
"""Longest context the model is made for (tokens); it is trained on half of that."""


_ROPE_THETA: Final = 500_000.0
"""As in Llama 3: at 10,000 only 8 of 32 elements turn slowly enough to compare contents 1,000 tokens apart."""
_ALIKE: Final = 0.5
"""First element of every token's vector before training; what all tokens have in common."""
_SHARPNESS: Final = 9.0
"""Length of each turned pair of the heads that look back: a gap of some 8 in their scores."""


def lab_config() -> LlamaConfig:
    """The configuration of `lab-recall`."""
    shape = config_from_shape(model_shape("lab-recall"), max_positions=POSITIONS)
    return replace(shape, rope_theta=_ROPE_THETA)


class Norm(nn.Module):
    """RMS normalisation."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape as `hidden`."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


class Attention(nn.Module):
    """Causal attention of grouped query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.width, config.query_width, bias=False)
        self.k_proj = nn.Linear(config.width, config.kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, config.kv_width, bias=False)
        self.o_proj = nn.Linear(config.query_width, config.width, bias=False)

    def forward(self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width), same shape back."""
        rows, tokens, _ = hidden.shape

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(rows, tokens, -1, self.config.head_width).transpose(1, 2)

        query, key = (_turn(heads(part(hidden)), cosines, sines) for part in (self.q_proj, self.k_proj))
        group = self.config.query_heads // self.config.kv_heads
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, heads(self.v_proj(hidden))))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).reshape(rows, tokens, -1))


class FeedForward(nn.Module):
    """`down(silu(gate) * up)`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width), same shape back."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """Attention and feed-forward, each around a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.width, config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.width, config.norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width), same shape back."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosines, sines)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Stack(nn.Module):
    """The input table, the layers and the last normalisation."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.width, config.norm_epsilon)


class LabNetwork(nn.Module):
    """A trainable Llama with tied embeddings, seeded by torch's global generator."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = Stack(config)
        rope = make_rope(config, config.max_positions, torch.device("cpu"))
        self.cosines: torch.Tensor
        self.sines: torch.Tensor
        self.register_buffer("cosines", rope.cosines, persistent=False)
        self.register_buffer("sines", rope.sines, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=((2 * config.layers if last else 1) * parameter.shape[1]) ** -0.5)
        _look_back(self.model, config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (rows, tokens, vocabulary) of int64 tokens (rows, tokens)."""
        hidden = self.model.embed_tokens(tokens)
        cosines, sines = self.cosines[: tokens.shape[1]], self.sines[: tokens.shape[1]]
        for layer in self.model.layers:
            hidden = layer(hidden, cosines, sines)
        return F.linear(self.model.norm(hidden), self.model.embed_tokens.weight)


@torch.no_grad()
def _look_back(model: Stack, config: LlamaConfig) -> None:
    """Let the first KV head of the first layer begin by looking at the token before.

    Training finds this by itself, on a plateau that takes most of its time; then induction follows within a few
    hundred steps. All tokens share their first element, and the head's queries and keys read it: keys turned by
    the angle of one position make scores largest one position back. Training may change all of it.
    """
    model.embed_tokens.weight[:, 0] = _ALIKE
    length = (_ALIKE**2 + 1) ** 0.5  # of a token's vector; after normalisation its square is the width
    seen = _ALIKE / length * config.width**0.5
    fast = inverse_frequencies(config)[:4]
    half, group = config.head_width // 2, config.query_heads // config.kv_heads
    attention = cast("Layer", model.layers[0]).self_attn
    for head in range(group):
        first = head * config.head_width
        attention.q_proj.weight[first : first + len(fast), 0] += _SHARPNESS / seen
    attention.k_proj.weight[: len(fast), 0] += _SHARPNESS / seen * fast.cos()
    attention.k_proj.weight[half : half + len(fast), 0] += _SHARPNESS / seen * fast.sin()


def _turn(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """`engine.rope.rotate`, for heads of shape (rows, heads, tokens, head_width)."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(heads.dtype)


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
