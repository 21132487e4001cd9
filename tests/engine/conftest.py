"""Small Llamas, as Hugging Face holds them and as the engine does."""

from dataclasses import dataclass

import numba
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from transformers import LlamaConfig as HuggingFaceConfig
from transformers import LlamaForCausalLM

from mooncake_lab.engine import choose_backend, make_model
from mooncake_lab.engine.config import config_from_mapping
from mooncake_lab.engine.weights import assemble

CPU = torch.device("cpu")
VOCABULARY = 61


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models gain nothing from threads, and lose much where other tests run beside them."""
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


@dataclass(frozen=True)
class Twins:
    """One model twice: as transformers runs it, and its weights as the engine holds them."""

    hugging_face: LlamaForCausalLM

    @property
    def config(self):
        return config_from_mapping(self.hugging_face.config.to_dict())

    def weights(self, dtype=torch.float32):
        state = self.hugging_face.state_dict()
        return assemble(self.config, state.__getitem__, device=CPU, dtype=dtype)

    def model(self, backend="cpu", dtype=torch.float32):
        return make_model(self.weights(dtype), choose_backend(CPU, dtype, backend))

    @torch.inference_mode()
    def logits(self, tokens):
        return self.hugging_face(torch.as_tensor(np.asarray(tokens), dtype=torch.int64)[None]).logits[0]

    def greedy(self, prompt, new_tokens):
        ids = torch.as_tensor(np.asarray(prompt), dtype=torch.int64)[None]
        out = self.hugging_face.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
        )
        return tuple(out[0, len(prompt) :].tolist())


def make_twins(seed=0, **changes):
    """A seeded random model whose logits spread as a trained one's."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
        "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(HuggingFaceConfig(**(sizes | changes))).eval()
    return Twins(model)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
ROPES = [{"rope_type": "default", "rope_theta": 1000.0}, LLAMA3]


@st.composite
def twins(draw):
    """Any Llama: layers 1 to 4, GQA 1 to 8, head sizes 16 to 128, tied or not, either rope."""
    kv_heads = draw(st.sampled_from([1, 2]))
    return make_twins(
        draw(st.integers(0, 3)),
        num_hidden_layers=draw(st.integers(1, 4)),
        num_attention_heads=kv_heads * draw(st.sampled_from([1, 2, 4, 8])),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 20, 64, 128])),
        tie_word_embeddings=draw(st.booleans()),
        rope_parameters=draw(st.sampled_from(ROPES)),
    )


@pytest.fixture(scope="session")
def make():
    """Makes a model: `make(seed, **changes)`."""
    return make_twins


@pytest.fixture(scope="session")
def any_llama():
    """A strategy of models, to be drawn from."""
    return twins()


@pytest.fixture(scope="session")
def small():
    """One model for tests of everything but models."""
    return make_twins(rope_parameters=LLAMA3)


@pytest.fixture(scope="session")
def model(small):
    """The same in the engine."""
    return small.model()


@pytest.fixture(scope="session")
def prompts():
    """Makes random prompts, `prompts(seed, count, longest=60, common=0)`: `common` equal tokens, then others."""

    def some(seed, count, longest=60, common=0):
        rng = np.random.default_rng(seed)
        start = rng.integers(0, VOCABULARY, common)
        ends = [rng.integers(0, VOCABULARY, rng.integers(1, longest)) for _ in range(count)]
        return [np.concatenate([start, end]).astype(np.int32) for end in ends]

    return some
