"""The forward pass for CUDA on fake tensors: devices, shapes, types and signatures of operators, without a GPU."""

import contextlib
import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda import fake_cuda
from torch.utils._python_dispatch import TorchDispatchMode

from mooncake_lab.engine.checkpoint import parameter_shapes
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.graphs import GRAPH_SIZES, DecodeGraphs, capture_cuda
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.model import make_model
from mooncake_lab.engine.packing import Piece, pack
from mooncake_lab.engine.rope import make_rope
from mooncake_lab.engine.weights import LlamaWeights, assemble

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


def rotate_and_store(qkv, cosines, sines, positions, slots, keys, values, query, own):
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
    if own is not None:
        same(qkv.dtype, own)
        assert own.shape == (tokens, 2 * keys.shape[1], width)


def silu_and_multiply(gate_up, out):
    """The gate and the other half side by side."""
    same(out.dtype, gate_up, out)
    assert gate_up.shape == (out.shape[0], 2 * out.shape[1])


def paged_decode(query, keys, values, tables, lengths, out, stretches, tile):
    """One row of tables and lengths for each query; the context is cut into a power of two."""
    same(query.dtype, query, keys, values, out)
    same(torch.int32, tables, lengths)
    assert query.shape[1:] == out.shape[1:]
    assert len(query) <= len(out)
    assert len(query) == len(tables) == len(lengths)
    assert query.shape[1] % keys.shape[1] == 0
    assert stretches & (stretches - 1) == 0
    assert tile is None


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
    module = importlib.import_module(f"{name}.cuda")
    # torch's CUDA build asks the driver, which a machine without a GPU lacks; the CPU build says no
    monkeypatch.setattr(module, "can_use_cudnn_attention", lambda _: False)
    yield module.CudaBackend()
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


def test_a_block_table_comes_to_the_device_once(backend):
    """Reading and writing take the table that `KVCache.table` brought: no layer brings it again."""
    with fake_cuda():
        _, cache = model_and_cache(backend, TWO_LAYERS_OF["8B"], torch.bfloat16)
        table = cache.table(np.arange(64, dtype=np.int32))
        assert (table.device, table.dtype, table.shape) == (CUDA, torch.int64, (64,))
        with Operators() as seen:
            cache.write(1, table, 100, cache.read(1, table, 100, 900))
    assert not seen.between_devices


def test_the_steps_of_all_batch_sizes_are_recorded_ahead(backend):
    """For at most 18 requests the sizes up to 24 are recorded, each once; steps that come later record nothing."""
    recorded = []

    def capture(forward):
        logits = forward()
        recorded.append(len(logits))
        return lambda: logits

    with fake_cuda():
        model, cache = model_and_cache(backend, TWO_LAYERS_OF["8B"], torch.bfloat16)
        graphs = DecodeGraphs(model, cache, 64, capture)
        graphs.prepare(18)
        assert sorted(recorded) == [1, 2, 4, 8, 16, 24]
        graphs.prepare(24)
        for requests in range(1, 19):
            graphs.forward(pack([piece(700, 1)] * requests, BLOCK_TOKENS, CUDA))
        assert len(recorded) == 6
        graphs.prepare(10_000)
    assert sorted(recorded) == list(GRAPH_SIZES)


class Operators(TorchDispatchMode):
    """Notes the operators that run: how large their outputs are, and which bring a tensor to another device."""

    def __init__(self):
        super().__init__()
        self.names, self.between_devices = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        if func.overloadpacket is torch.ops.aten._to_copy and (kwargs or {}).get("device", CUDA) != args[0].device:
            self.between_devices.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("pieces", "gathers"),
    [([(0, 2048)], 0), ([(0, 512), (0, 100)], 0), ([(4096, 512)], 2), ([(700, 1), (0, 512)], 0)],
    ids=["new", "two new", "chunk", "piggybacked"],
)
def test_prompts_attend_without_needless_copies(backend, pieces, gathers):
    """Keys and values of new prompts are not gathered, outputs not copied, and indices not computed per layer."""
    config = TWO_LAYERS_OF["8B"]
    with fake_cuda():
        _, cache = model_and_cache(backend, config, torch.bfloat16)
        batch = pack([piece(*each) for each in pieces], BLOCK_TOKENS, CUDA)
        layer, tokens = cache.layers[1], len(batch.tokens)
        qkv = torch.empty(tokens, config.query_width + 2 * config.kv_width, dtype=torch.bfloat16, device=CUDA)
        rope = make_rope(config, 8192, CUDA)
        query = backend.rotate_and_store(qkv, rope, batch, layer, config)
        with Operators() as seen:
            attended = backend.attend(query, batch, layer)
    assert attended.shape == (tokens, config.query_width)
    assert seen.names.count("index") == gathers
    assert seen.names.count("copy_") == bool(batch.singles)  # of the longer pieces behind the single tokens
    assert not {"floor_divide", "remainder", "clone"} & set(seen.names)


def test_a_long_new_prompt_takes_cudnn_where_there_is_one(backend, monkeypatch):
    """A prompt of whole thousands, alone and new, goes to cuDNN; others, and all where it does not run, do not."""
    module, config = sys.modules[type(backend).__module__], TWO_LAYERS_OF["8B"]
    taken, runs = [], True
    monkeypatch.setattr(module, "can_use_cudnn_attention", lambda _: runs)
    monkeypatch.setattr(module, "SDPAParams", lambda *sides: [each.shape for each in sides[:3]])
    monkeypatch.setattr(module, "_attend_cudnn", lambda query, *_: taken.append(len(query)) or query)
    short = replace(backend, cudnn_tokens=0)

    def attend(chosen, *pieces):
        batch = pack([piece(*each) for each in pieces], BLOCK_TOKENS, CUDA)
        qkv = torch.empty(
            len(batch.tokens), config.query_width + 2 * config.kv_width, dtype=torch.bfloat16, device=CUDA
        )
        query = chosen.rotate_and_store(qkv, rope, batch, layer, config)
        assert chosen.attend(query, batch, layer).shape == (len(batch.tokens), config.query_width)

    with fake_cuda():
        _, cache = model_and_cache(backend, config, torch.bfloat16)
        layer, rope = cache.layers[0], make_rope(config, 8192, CUDA)
        attend(backend, (0, 2048))
        attend(backend, (700, 1), (0, 1024))
        assert taken == [2048, 1024]
        attend(backend, (0, 2047))
        attend(backend, (0, 1024), (0, 1024))
        attend(backend, (1024, 1024))
        attend(short, (0, 2048))
        runs = False
        attend(backend, (0, 2048))
    assert taken == [2048, 1024]


def test_other_threads_may_use_the_device_while_a_step_is_recorded(monkeypatch):
    """A recording is disturbed by its own thread only: loaders pin memory and record events meanwhile."""
    how = []

    class Recording(contextlib.nullcontext):
        def __init__(self, _graph, **options):
            super().__init__()
            how.append(options)

    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, fake in (
        ("Stream", lambda: stream),
        ("stream", contextlib.nullcontext),
        ("current_stream", lambda: stream),
        ("CUDAGraph", lambda: SimpleNamespace(replay=lambda: None)),
        ("graph", Recording),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    runs = []
    replay = capture_cuda(lambda: runs.append(1) or torch.ones(2))
    assert torch.equal(replay(), torch.ones(2))
    assert how == [{"capture_error_mode": "thread_local"}]
    assert len(runs) == 4  # three that compile and warm up, one that is recorded


def test_a_known_digest_is_not_computed_again(backend, monkeypatch):
    """`make_model` takes the digest of weights that it is given; 16 GB are not brought to the host for it."""
    monkeypatch.setattr(LlamaWeights, "digest", lambda _: pytest.fail("the digest was computed"))
    shapes = parameter_shapes(TWO_LAYERS_OF["8B"])
    with fake_cuda():
        weights = assemble(
            TWO_LAYERS_OF["8B"],
            lambda name: torch.empty(shapes[name], dtype=torch.bfloat16, device=CUDA),
            device=CUDA,
            dtype=torch.bfloat16,
        )
        assert make_model(weights, backend, positions=64, digest=b"known").weights_digest == b"known"
