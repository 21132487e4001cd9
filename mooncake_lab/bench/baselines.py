"""What the engine is measured against: the same weights in transformers, as `generate` and as its own batching."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from mooncake_lab.batching import BatchingPolicy, SarathiServe
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.loop import Engine
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.sequence import GenerationRequest
from mooncake_lab.engine.settings import EngineSettings
from mooncake_lab.engine.weights import LlamaWeights, state_dict

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import LlamaConfig as HuggingFaceConfig
    from transformers import LlamaForCausalLM

Tokens = list[list[int]]
"""Token ids of several requests."""


class Subject(Protocol):
    """Something that generates greedily for several prompts at once."""

    def generate(self, prompts: Tokens, new_tokens: Sequence[int]) -> Tokens:
        """Exactly `new_tokens[i]` tokens for prompt `i`, in order."""
        ...


@dataclass(frozen=True, slots=True)
class OurEngine:
    """This package's engine; prefixes are not reused, as in the baselines."""

    engine: Engine

    def generate(self, prompts: Tokens, new_tokens: Sequence[int]) -> Tokens:
        """All at once, under the engine's policy."""
        outputs = self.engine.generate(
            GenerationRequest(prompt=prompt, max_new_tokens=count, end_tokens=())
            for prompt, count in zip(prompts, new_tokens, strict=True)
        )
        return [list(output.tokens) for output in outputs]


@dataclass(frozen=True, slots=True)
class HuggingFaceGenerate:
    """transformers' `generate` with its dynamic cache: one batch, padded on the left, as long as its longest."""

    model: "LlamaForCausalLM"

    @torch.inference_mode()
    def generate(self, prompts: Tokens, new_tokens: Sequence[int]) -> Tokens:
        """One padded batch; what it generates beyond a request's tokens is dropped."""
        from transformers import GenerationConfig

        longest, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor(
            [[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.model.device
        )
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        how = GenerationConfig(do_sample=False, max_new_tokens=max(new_tokens), pad_token_id=0)
        out: Tokens = self.model.generate(ids, attention_mask=mask, generation_config=how)[:, longest:].tolist()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]  # partly typed
        return [tokens[:count] for tokens, count in zip(out, new_tokens, strict=True)]


@dataclass(frozen=True, slots=True)
class HuggingFaceContinuous:
    """transformers' own continuous batching over a paged cache."""

    model: Any
    settings: Mapping[str, Any]

    @torch.inference_mode()
    def generate(self, prompts: Tokens, new_tokens: Sequence[int]) -> Tokens:
        """All at once; starting and stopping its manager is part of it, warming up is not."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        how = GenerationConfig(do_sample=False, max_new_tokens=max(new_tokens), eos_token_id=-1, pad_token_id=0)
        config = ContinuousBatchingConfig(**self.settings)
        found: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=how, continuous_batching_config=config, block=True, timeout=5, warmup=False
        ) as manager:
            ids = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, new_tokens, strict=True)]
            while len(found) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
                elif not manager.is_running():
                    raise RuntimeError(f"transformers' batching stopped after {len(found)} of {len(ids)} requests")
        return [found[request_id] for request_id in ids]


def our_engine(
    model: LlamaModel,
    *,
    cache_tokens: int,
    chunk_tokens: int = 512,
    policy: BatchingPolicy | None = None,
    block_size_tokens: int = 16,
) -> OurEngine:
    """This package's engine, with space for `cache_tokens` of KVCache."""
    settings = EngineSettings(
        block_size_tokens=block_size_tokens,
        cache_blocks=-(-cache_tokens // block_size_tokens),
        max_batch_tokens=max(chunk_tokens, 256),
        prefix_reuse=False,
        keep_log=False,
    )
    return OurEngine(Engine(model, policy or SarathiServe(chunk_tokens=chunk_tokens), settings))


def hugging_face(weights: LlamaWeights) -> "LlamaForCausalLM":
    """The same weights in transformers, sharing their memory where they are not prepared otherwise."""
    from transformers import LlamaForCausalLM

    config = weights.config
    if config.rope_scaling is not None:
        raise ValueError("peers are built for models without rope scaling; measure with another shape")
    with torch.device("meta"):
        model = LlamaForCausalLM(_config(config))
    model.load_state_dict(state_dict(weights), assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(weights.embedding.device)
    model.generation_config.eos_token_id = None
    return model.eval()


def _config(config: LlamaConfig) -> "HuggingFaceConfig":
    from transformers import LlamaConfig as HuggingFaceConfig

    return HuggingFaceConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.ffn_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.query_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_width,
        rms_norm_eps=config.norm_epsilon,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tied_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.ffn_bias,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


PEERS: Final[Mapping[str, str]] = MappingProxyType(
    {"hf": "transformers generate", "hf-continuous": "transformers continuous batching", "none": "nobody"}
)
"""Peers by the names of the command line."""
