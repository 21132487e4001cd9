"""The forward pass for CUDA on fake tensors: devices, shapes, types and signatures of operators, without a GPU."""

import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda import fake_cuda

from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.graphs import GRAPH_SIZES, DecodeGraphs
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.model import make_model
from mooncake_lab.engine.packing import Piece, pack
from mooncake_lab.engine.weights import LlamaWeights, assemble, parameter_shapes

CUDA = torch.device("cuda", 0)
BLOCK_TOKENS = 16
TWO_LAYERS_OF = {
    "8B": LlamaConfig(
        layers=2, width=4096, query_heads=32, kv_heads=8, head_width=128, ffn_width=14336, vocabulary=128256
    ),
    "70B": LlamaConfig(
        layers=2, width=8192, query_heads=64, kv_heads=8, head_width=128, ffn_width=28672, vocabulary=128256
    ),
}


def same(dtype, *tensors):
    """All are on the GPU, contiguous, and of a type."""
    for tensor in tensors:
        assert tensor.device == CUDA
        assert tensor.is_contiguous()
        assert tensor.dtype == dtype


def add_norm(hidden, update, weight, epsilon, normed):
    """What the kernel reads and writes: rows of one width."""
    same(hidden.dtype, hidden, weight, normed, *([] if update is None else [update]))
    assert hidden.shape == normed.shape == (hidden if update is None else update).shape
    assert weight.shape == hidden.shape[1:]
    assert epsilon > 0


def rotate_and_store(qkv, cosines, sines, positions, slots, keys, values, query):
    """Queries, keys and values of a token lie side by side; each of its tables has a row for each token."""
    tokens, heads, width = query.shape
    same(qkv.dtype, qkv, query, keys, values)
    same(torch.float32, cosines, sines)
    same(torch.int64, positions, slots)
    assert keys.shape == values.shape
    assert keys.shape[2:] == (BLOCK_TOKENS, width)
    assert qkv.shape == (tokens, (heads + 2 * keys.shape[1]) * width)
    assert positions.shape == slots.shape == (tokens,)
    assert cosines.shape[1] == sines.shape[1] == width // 2


def silu_and_multiply(gate_up, out):
    """The gate and the other half side by side."""
    same(out.dtype, gate_up, out)
    assert gate_up.shape == (out.shape[0], 2 * out.shape[1])


def paged_decode(query, keys, values, tables, lengths, out, stretches):
    """One row of tables and lengths for each query; the context is cut into a power of two."""
    same(query.dtype, query, keys, values, out)
    same(torch.int32, tables, lengths)
    assert query.shape[1:] == out.shape[1:]
    assert len(query) <= len(out)
    assert len(query) == len(tables) == len(lengths)
    assert query.shape[1] % keys.shape[1] == 0
    assert stretches & (stretches - 1) == 0


@pytest.fixture
def backend(monkeypatch):
    """The CUDA backend, its kernels replaced by checks of what they are given."""
    name = "mooncake_lab.engine.backends"
    kernels = SimpleNamespace(
        add_norm=add_norm,
        rotate_and_store=rotate_and_store,
        silu_and_multiply=silu_and_multiply,
        paged_decode=paged_decode,
    )
    monkeypatch.setitem(sys.modules, f"{name}.triton_kernels", kernels)
    monkeypatch.setattr(sys.modules[name], "triton_kernels", kernels, raising=False)
    monkeypatch.delitem(sys.modules, f"{name}.cuda", raising=False)
    monkeypatch.setattr(LlamaWeights, "digest", lambda _: b"of no bytes")
    yield importlib.import_module(f"{name}.cuda").CudaBackend()
    sys.modules.pop(f"{name}.cuda", None)


def model_and_cache(backend, config, dtype, blocks=4096):
    """A model without bytes."""
    shapes = parameter_shapes(config)

    def read(name):
        return torch.empty(shapes[name], dtype=dtype, device=CUDA)

    weights = assemble(config, read, device=CUDA, dtype=dtype)
    cache = KVCache(config, blocks=blocks, block_size_tokens=BLOCK_TOKENS, device=CUDA, dtype=dtype)
    return make_model(weights, backend, positions=8192), cache


def piece(cached, new):
    """New tokens after cached ones, in blocks of their own."""
    blocks = np.arange(-(-(cached + new) // BLOCK_TOKENS), dtype=np.int32)
    return Piece(np.zeros(new, dtype=np.int64), cached, blocks, emits=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", TWO_LAYERS_OF)
@pytest.mark.parametrize(
    "pieces",
    [[(0, 2048)], [(0, 512), (4096, 512)], [(700, 1)] * 32, [(700, 1)] * 3 + [(4096, 512)], [(0, 1)]],
    ids=["prefill", "chunks", "decode", "piggybacked", "one token"],
)
def test_a_forward_pass_has_logits_of_each_piece(backend, size, pieces, dtype):
    """Prefill, chunks, decode and both together run from tokens to logits on one device and in one type."""
    config = TWO_LAYERS_OF[size]
    with fake_cuda():
        model, cache = model_and_cache(backend, config, dtype)
        batch = pack([piece(*each) for each in pieces], BLOCK_TOKENS, CUDA)
        logits = model.forward(batch, cache)
    assert logits.shape == (len(pieces), config.vocabulary)
    same(dtype, logits)


@pytest.mark.parametrize("requests", [1, 3, 17, 256])
def test_a_recorded_step_has_the_static_shapes_of_the_next_size(backend, requests):
    """A batch is copied into the tensors that were recorded for the next larger size; its own rows come back."""
    config, recorded = TWO_LAYERS_OF["8B"], []

    def capture(forward):
        logits = forward()
        recorded.append(len(logits))
        return lambda: logits

    with fake_cuda():
        model, cache = model_and_cache(backend, config, torch.bfloat16)
        graphs = DecodeGraphs(model, cache, 64, capture)
        batch = pack([piece(700, 1)] * requests, BLOCK_TOKENS, CUDA)
        assert graphs.fits(batch)
        logits = [graphs.forward(batch), graphs.forward(batch)]
    assert recorded == [next(size for size in GRAPH_SIZES if size >= requests)]
    assert {each.shape for each in logits} == {(requests, config.vocabulary)}


def test_kvcache_leaves_and_comes_back_on_the_device(backend):
    """A copy of a range of positions has the shape of a span, and is written where it came from."""
    with fake_cuda():
        _, cache = model_and_cache(backend, TWO_LAYERS_OF["8B"], torch.bfloat16)
        span = cache.read(1, range(64), 100, 900)
        cache.write(1, range(64), 100, span)
    assert span.shape == (2, 800, 8, 128)
    same(torch.bfloat16, span)


def test_a_tensor_left_on_the_host_is_found(backend):
    """The check notices what it is for: a batch that was packed for another device does not run."""
    with fake_cuda():
        model, cache = model_and_cache(backend, TWO_LAYERS_OF["8B"], torch.bfloat16)
        batch = pack([piece(0, 64)], BLOCK_TOKENS, torch.device("cpu"))
        with pytest.raises((RuntimeError, AssertionError)):
            model.forward(batch, cache)
