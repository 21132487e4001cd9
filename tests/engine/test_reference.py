"""The reference engine: prefill, then decode, is one forward pass over everything."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from mooncake_lab.engine.reference import ReferenceEngine, llama_config
from mooncake_lab.perf import MODELS, model_shape

TINY = model_shape("lab-tiny")
PROMPT = np.random.default_rng(7).integers(0, TINY.vocabulary, 37)


def test_prefill_then_decode_equals_one_full_forward():
    """In float32, the logits of every decoded token are those of recomputing the whole text without a cache."""
    engine = ReferenceEngine(TINY, seed=3)
    prompt = engine.prefill(PROMPT)
    answer = engine.decode(prompt.cache, np.array([prompt.first_token]), steps=6)
    text = np.concatenate([PROMPT, [prompt.first_token], answer.tokens[:, 0]])
    full = engine.logits(text)
    torch.testing.assert_close(prompt.logits, full[len(PROMPT) - 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answer.logits[:, 0], full[len(PROMPT) : -1], rtol=1e-4, atol=1e-5)
    assert full[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist() == text[len(PROMPT) :].tolist()


def test_a_batch_decodes_what_each_request_decodes_alone():
    """Two requests that share a prompt and go on differently get the tokens they get alone."""
    engine = ReferenceEngine(TINY, seed=3)
    alone = [
        engine.decode(engine.prefill(PROMPT).cache, np.array([token]), steps=4).tokens[:, 0] for token in (5, 9)
    ]
    together = engine.prefill(PROMPT).cache
    together.batch_repeat_interleave(2)
    assert engine.decode(together, np.array([5, 9]), steps=4).tokens.tolist() == np.stack(alone, axis=1).tolist()


def test_the_same_seed_makes_the_same_weights_and_leaves_the_global_generator_alone():
    """Two engines of one seed agree exactly, another seed differs, torch's own stream goes on as before."""
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first, second, other = (ReferenceEngine(TINY, seed=seed).logits(PROMPT) for seed in (1, 1, 2))
    assert torch.rand(1) == expected
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("name", [name for name, shape in MODELS.items() if shape.ffn_matrices == 3])
def test_shapes_count_the_parameters_transformers_builds(name):
    """The count in `perf` is exactly that of the real module, for every Llama."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(model_shape(name)))
    assert sum(weights.numel() for weights in model.parameters()) == model_shape(name).parameters


def test_what_cannot_run_is_refused():
    """A model without a gate, elements of one byte, and an empty prompt are errors that name themselves."""
    with pytest.raises(ValueError, match="gpt3-175b"):
        llama_config(model_shape("gpt3-175b"))
    with pytest.raises(ValueError, match="1 bytes an element"):
        ReferenceEngine(dataclasses.replace(TINY, bytes_per_element=1))
    with pytest.raises(ValueError, match="at least one token"):
        ReferenceEngine(TINY).prefill(np.array([], dtype=np.int64))
