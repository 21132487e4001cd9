"""The engine on a CUDA device: the same tokens and KVCache as on a CPU, over streams, graphs and processes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu import make_lab, measure
from serve import believed

from mooncake_lab.batching import SarathiServe
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.engine import (
    Engine,
    EngineSettings,
    GenerationRequest,
    KVCache,
    LlamaConfig,
    PrefillEngine,
    choose_backend,
    load_model,
    make_model,
    random_weights,
)
from mooncake_lab.engine.graphs import capture_cuda
from mooncake_lab.engine.host_copies import HostCopies
from mooncake_lab.engine.layerwise.prefill import LayerwisePrefill
from mooncake_lab.engine.packing import Piece, pack
from mooncake_lab.engine.pipeline import Crew, CrewSpec, cpp_prefill, runahead_prefill
from mooncake_lab.perf import model_shape
from mooncake_lab.serving import LiveCluster, LiveOptions
from mooncake_lab.store.backends import DramBackend
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

pytestmark = pytest.mark.gpu
MODEL = "random:lab-8m"
VOCABULARY = model_shape("lab-8m").vocabulary
DEVICE = torch.device("cuda")
WIDE_HEADS = LlamaConfig(
    layers=1,
    width=512,
    query_heads=8,
    kv_heads=2,
    head_width=128,
    ffn_width=64,
    vocabulary=100,
    max_positions=3000,
)
"""Those of large models, which flash attention and cuDNN take."""


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


def attended(backend, pieces, *, gather=False):
    """What new tokens attend to in one layer, after queries, keys and values were rotated and stored."""
    model = make_model(random_weights(WIDE_HEADS, device=DEVICE, dtype=torch.bfloat16), backend, digest=b"")
    blocks = [-(-(new + cached) // 16) for new, cached in pieces]
    cache = KVCache(WIDE_HEADS, blocks=sum(blocks), block_size_tokens=16, device=DEVICE, dtype=torch.bfloat16)
    tables = np.split(np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32), np.cumsum(blocks)[:-1])
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
    batch = pack(
        [
            Piece(np.zeros(new, dtype=np.int64), cached, table, emits=True)
            for (new, cached), table in zip(pieces, tables, strict=True)
        ],
        16,
        DEVICE,
    )
    if gather:
        batch = replace(batch, context=replace(batch.context, own=None))
    width = WIDE_HEADS.query_width + 2 * WIDE_HEADS.kv_width
    qkv = torch.randn((len(batch.tokens), width), generator=torch.Generator().manual_seed(1))
    query = backend.rotate_and_store(
        qkv.to(DEVICE, torch.bfloat16), model.rope, batch, cache.layers[0], WIDE_HEADS
    )
    return backend.attend(query, batch, cache.layers[0]).float()


@pytest.mark.parametrize(
    "pieces", [[(2048, 0)], [(1000, 0)], [(300, 0), (700, 0)], [(1, 400), (1, 9), (1024, 0)]], ids=str
)
def test_new_prompts_attend_the_same_however_their_keys_come(pieces):
    """From the batch itself, through cuDNN, or gathered from blocks: within rounding as the dense backend does."""
    fast = choose_backend(DEVICE, torch.bfloat16)
    expected = attended(choose_backend(DEVICE, torch.bfloat16, "dense"), pieces)
    for found in (
        attended(fast, pieces),
        attended(replace(fast, cudnn_tokens=0), pieces),
        attended(fast, pieces, gather=True),
    ):
        assert (found - expected).norm() < 1e-2 * expected.norm()


def test_a_recorded_prefill_computes_what_a_launched_one_does():
    """An iteration with a prompt replayed from a CUDA graph has the logits of the same one launched."""
    model = load_model(MODEL, device="cuda", positions=1024)
    cache = KVCache(model.config, blocks=64, block_size_tokens=16, device=DEVICE, dtype=torch.bfloat16)
    batch = pack(
        [Piece(prompt_of(500).astype(np.int64), 0, np.arange(32, dtype=np.int32), emits=True)], 16, DEVICE
    )
    expected = model.forward(batch, cache).clone()
    replay = capture_cuda(lambda: model.forward(batch, cache))
    for _ in range(2):
        torch.testing.assert_close(replay(), expected)


def test_kvcache_leaves_over_another_stream_unharmed():
    """Each of many copies has the bytes that the computing stream wrote before it, though that goes on at once."""
    copies, started = HostCopies(), []
    for number in range(40):
        span = torch.full((2, 4096, 2, 64), number, device=DEVICE, dtype=torch.int32)
        started.append(copies.start(span + number))
        span.fill_(-1)
    for number, copy in enumerate(started):
        copy.wait()
        assert copy.tensor.is_pinned()
        assert (copy.tensor == 2 * number).all()


def test_workers_on_a_gpu_generate_what_one_engine_does():
    """A prefill and a decode worker share the device; in float32 their greedy tokens are those of one engine."""
    prompts = [prompt_of(tokens) for tokens in (40, 300, 70)]
    model = load_model(MODEL, device="cuda", dtype="float32", positions=512)
    engine = Engine(model, SarathiServe(), EngineSettings(cache_blocks=64, max_request_tokens=512))
    alone = engine.generate(
        [GenerationRequest(prompt=prompt, max_new_tokens=12, end_tokens=()) for prompt in prompts]
    )
    options = LiveOptions(model=MODEL, device="cuda", dtype="float32", spares=0, max_model_len=512)
    with LiveCluster(ClusterSpec.small(), options, model=believed(MODEL)) as live:
        together = live.generate(prompts, max_new_tokens=12)
    assert [tuple(tokens) for tokens in together] == [tuple(output.tokens) for output in alone]
