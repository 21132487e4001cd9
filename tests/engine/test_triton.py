"""The GPU kernels beside the dense backend: on a GPU as they are, elsewhere in Triton's interpreter.

Triton is no dependency: it comes with torch on GPU machines. Its interpreter fails with numpy 2.4 and later.
"""

import os

import numpy as np
import pytest
import torch

from mooncake_lab.engine import KVCache, LlamaConfig, choose_backend, make_model, random_weights
from mooncake_lab.engine.backends.dense import DenseBackend
from mooncake_lab.engine.graphs import DecodeGraphs
from mooncake_lab.engine.packing import Piece, pack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="triton is not installed")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("on a CPU, set TRITON_INTERPRET=1 to test the GPU kernels", allow_module_level=True)
if DEVICE.type == "cpu" and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("triton's interpreter does not work with numpy 2.4", allow_module_level=True)

from mooncake_lab.engine.backends.cuda import CudaBackend, stretches  # noqa: E402  # after the guards above

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning"
)  # the interpreter's own
SHAPES = [(4, 2, 16, 4), (8, 1, 128, 16), (2, 2, 20, 3), (6, 2, 64, 16)]


def steps(model, size):
    """Logits and cache of three requests: chunks and decodes mixed, then decodes only."""
    cache = KVCache(model.config, blocks=300, block_size_tokens=size, device=DEVICE, dtype=torch.float32)
    rng = np.random.default_rng(0)
    tables, tokens = rng.permutation(300).astype(np.int32).reshape(3, 100), rng.integers(0, 50, (3, 300))
    done, found = [0, 0, 0], []
    for step in ([50, 1, 7], [1, 70, 9], [1, 1, 1], [1, 1, 1]):
        pieces = [
            Piece(tokens[i, done[i] : done[i] + new], done[i], tables[i], emits=True) for i, new in enumerate(step)
        ]
        batch = pack(pieces, size, DEVICE)
        found.append((batch, model.forward(batch, cache)))
        done = [before + new for before, new in zip(done, step, strict=True)]
    return cache, found


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_cache_are_those_of_the_dense_backend(shape):
    """Chunks, decodes and mixtures of them, for several GQA ratios, head widths and block sizes."""
    query_heads, kv_heads, head_width, size = shape
    config = LlamaConfig(
        layers=2, width=24, query_heads=query_heads, kv_heads=kv_heads, head_width=head_width, ffn_width=40,
        vocabulary=50, max_positions=400,
    )  # fmt: skip
    weights = random_weights(config, device=DEVICE, dtype=torch.float32)
    expected_cache, expected = steps(make_model(weights, DenseBackend()), size)
    cache, found = steps(make_model(weights, CudaBackend()), size)
    assert (cache.data - expected_cache.data).abs().max() < 1e-5
    for (_, logits), (_, wanted) in zip(found, expected, strict=True):
        assert (logits - wanted).abs().max() < 1e-4


def test_recorded_steps_pad_without_a_trace():
    """A batch of three in a step recorded for four: the same logits, and nothing else in the cache changes."""
    config = LlamaConfig(
        layers=2,
        width=24,
        query_heads=4,
        kv_heads=2,
        head_width=16,
        ffn_width=40,
        vocabulary=50,
        max_positions=400,
    )
    model = make_model(random_weights(config, device=DEVICE, dtype=torch.float32), CudaBackend())
    cache, found = steps(model, 4)
    batch, logits = found[-1]
    before = cache.data.clone()
    graphs = DecodeGraphs(model, cache, 100, lambda forward: forward, sizes=(1, 4))
    assert graphs.fits(batch)
    assert not graphs.fits(found[0][0])
    assert (graphs.forward(batch) - logits).abs().max() < 1e-5
    assert (cache.data - before).abs().max() < 1e-5
    assert torch.equal(cache.data == 0, before == 0)


def test_few_requests_still_occupy_the_gpu():
    """Contexts are cut into a power of two of parts, fewer the more requests there are."""
    parts = [stretches(rows, 8) for rows in (1, 2, 8, 64, 256)]
    assert parts == sorted(parts, reverse=True)
    assert all(part & (part - 1) == 0 for part in parts)
    assert parts[-1] == 1


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
@pytest.mark.gpu
def test_a_gpu_generates_the_tokens_of_the_cpu():
    """In float32, greedy tokens with recorded decode steps are those of the dense backend on CPU."""
    from gpu import make_lab, measure

    found = measure(make_lab("lab-tiny", "cuda", "float32"), budget_s=600.0, names=["correctness"])
    assert "rows" in found["correctness"], found
    assert choose_backend(DEVICE, torch.bfloat16).name == "cuda"
