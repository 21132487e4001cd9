"""The engine on a CUDA device: the same tokens and KVCache as on a CPU, over streams, graphs and processes."""

import numpy as np
import pytest
import torch
from gpu import make_lab, measure

from mooncake_lab.engine import EngineSettings, PrefillEngine, choose_backend, load_model
from mooncake_lab.engine.layerwise.prefill import LayerwisePrefill
from mooncake_lab.engine.pipeline import Crew, CrewSpec, cpp_prefill, runahead_prefill
from mooncake_lab.perf import model_shape
from mooncake_lab.store.backends import DramBackend
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

pytestmark = pytest.mark.gpu
MODEL = "random:lab-8m"
VOCABULARY = model_shape("lab-8m").vocabulary


def prompt_of(tokens):
    """A prompt of random tokens."""
    return np.random.default_rng(0).integers(0, VOCABULARY, tokens).astype(np.int32)


def test_a_gpu_generates_the_tokens_of_the_cpu():
    """In float32, greedy tokens with recorded decode steps are those of the dense backend on CPU."""
    found = measure(make_lab("lab-tiny", "cuda", "float32"), budget_s=600.0, names=["correctness"])
    assert "rows" in found["correctness"], found
    assert choose_backend(torch.device("cuda"), torch.bfloat16).name == "cuda"


def test_over_a_store_the_tokens_are_the_same():
    """With CUDA streams and events: stored from, and loaded into, the device, the tokens do not change."""
    # float32, because in 16 bits a chunk of 184 tokens rounds otherwise than a prompt of 3000
    model, prompt = load_model(MODEL, device="cuda", dtype="float32", positions=4096), prompt_of(3000)
    room = EngineSettings(block_size_tokens=16, cache_blocks=600, max_batch_tokens=4096, prefix_caching=False)
    expected = PrefillEngine(model, room).prefill(prompt)
    arena = DramBackend(512 * 2**20)
    try:
        with (
            TieredStore([TierSettings(medium=arena)]) as store,
            LayerwisePrefill(PrefillEngine(model, room), store, block_tokens=256) as layerwise,
        ):
            for loaded in (0, 2816):
                result = layerwise.prefill(prompt)
                layerwise.flush()
                assert (result.loaded_tokens, result.prefill.first_token) == (loaded, expected.first_token)
            store.check()
            assert store.leaked_bytes() == 0
    finally:
        arena.close()


@pytest.mark.parametrize("way", ["cpp", "runahead"])
def test_gpus_prefill_together(way):
    """A prompt cut over GPUs: NCCL where every process has one, gloo through host memory where they share it."""
    prompt, room = prompt_of(230), EngineSettings(cache_blocks=32)  # not 85 % of the GPU, which the crew shares
    alone = PrefillEngine(load_model(MODEL, device="cuda", dtype="float32"), room).prefill(prompt)
    with Crew(CrewSpec(model=MODEL, processes=2, device="cuda", timeout_s=300)) as crew:
        if way == "cpp":
            found = cpp_prefill(crew, prompt, chunk_tokens=64)
        else:
            found = runahead_prefill(crew, prompt, bounds=(130, 230))
    assert found.first_token == alone.first_token
    for ours, theirs in zip(found.kv, alone.kv.layers, strict=True):
        torch.testing.assert_close(ours, theirs.cpu(), rtol=0, atol=1e-3)
