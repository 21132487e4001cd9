"""Fast backends compute what the dense one computes, operation by operation."""

import subprocess
import sys

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mooncake_lab.engine.backends import DenseBackend, choose_backend, plain_linear, prepacked_linear
from mooncake_lab.engine.backends import linear as linears
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.packing import Piece, pack
from mooncake_lab.engine.rope import make_rope

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
DTYPES = st.sampled_from(sorted(TOLERANCE, key=str))
quick = settings(max_examples=25, deadline=None)


def fast(dtype):
    return choose_backend(CPU, dtype, "cpu")


@st.composite
def batches(draw):
    """Pieces of requests on random blocks, decodes and chunks mixed, and the shapes they run in."""
    config = LlamaConfig(
        layers=1, width=8, query_heads=draw(st.sampled_from([2, 4, 8])), kv_heads=draw(st.sampled_from([1, 2])),
        head_width=draw(st.sampled_from([4, 16, 36, 128])), ffn_width=8, vocabulary=8,
    )  # fmt: skip
    size, seed = draw(st.sampled_from([1, 5, 16])), draw(st.integers(0, 999))
    shapes = draw(st.lists(st.tuples(st.sampled_from([1, 1, 2, 30]), st.integers(0, 150)), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(seed)
    each = 180 // size + 1
    free = torch.randperm(each * len(shapes), generator=generator).int().numpy()
    pieces = [
        Piece(torch.zeros(new).long().numpy(), cached, free[i * each : (i + 1) * each], emits=True)
        for i, (new, cached) in enumerate(shapes)
    ]
    return config, pack(pieces, size, CPU), size, each * len(shapes), generator


class TestCpuBackend:
    @quick
    @given(batches(), DTYPES)
    def test_attention(self, drawn, dtype):
        """Paged decode and split prefill attention agree with a full score matrix, for any GQA, width, block."""
        config, batch, size, blocks, generator = drawn
        cache = KVCache(config, blocks=blocks, block_size_tokens=size, device=CPU, dtype=dtype)
        cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
        query = torch.randn(len(batch.tokens), config.query_heads, config.head_width, generator=generator).to(
            dtype
        )
        expected = DenseBackend().attend(query, batch, cache.layers[0])
        found = fast(dtype).attend(query, batch, cache.layers[0])
        assert (found - expected).abs().max() < TOLERANCE[dtype]

    @quick
    @given(batches(), DTYPES)
    def test_rotate_and_store(self, drawn, dtype):
        """Rotated queries and everything that lands in the cache agree; nothing else in the cache changes."""
        config, batch, size, blocks, generator = drawn
        width = config.query_width + 2 * config.kv_width
        qkv = torch.randn(len(batch.tokens), width, generator=generator).to(dtype)
        rope = make_rope(config, 200, CPU)
        caches = [
            KVCache(config, blocks=blocks, block_size_tokens=size, device=CPU, dtype=dtype) for _ in range(2)
        ]
        for cache in caches:
            cache.data.fill_(7.0)
        queries = [
            backend.rotate_and_store(qkv, rope, batch, cache.layers[0], config)
            for backend, cache in zip((DenseBackend(), fast(dtype)), caches, strict=True)
        ]
        assert (queries[0] - queries[1]).abs().max() <= TOLERANCE[dtype]
        assert (caches[0].data - caches[1].data).abs().max() <= TOLERANCE[dtype]

    @quick
    @given(st.integers(1, 20), st.integers(1, 200), DTYPES, st.booleans(), st.integers(0, 99))
    def test_add_norm(self, tokens, width, dtype, add, seed):
        """Sum and normalisation agree, and the sum is left in place."""
        generator = torch.Generator().manual_seed(seed)
        hidden, update, weight = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((tokens, width), (tokens, width), width)
        )
        copies = [hidden.clone(), hidden.clone()]
        normed = [
            backend.add_norm(copy, update if add else None, weight, 1e-5)
            for backend, copy in zip((DenseBackend(), fast(dtype)), copies, strict=True)
        ]
        assert torch.equal(*copies)
        assert torch.allclose(normed[0], normed[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    @quick
    @given(st.sampled_from([1, 5, 256, 300]), DTYPES, st.integers(0, 99))
    def test_feed_forward(self, tokens, dtype, seed):
        """Agrees for few tokens and for more than it takes at a time, for gates of any size."""
        generator = torch.Generator().manual_seed(seed)
        inputs = (torch.randn(tokens, 8, generator=generator) * 10).to(dtype)
        up, down = (torch.randn(shape, generator=generator).to(dtype) for shape in ((24, 8), (8, 12)))
        found, expected = (
            ops.feed_forward(inputs, plain_linear(up), plain_linear(down)) for ops in (fast(dtype), DenseBackend())
        )
        assert torch.allclose(found, expected, atol=2e-3, rtol=TOLERANCE[dtype])

    def test_threads_of_torch_stay_as_they_were(self):
        """Compiled kernels leave the number of threads as it was set."""
        script = """
import torch
torch.set_num_threads(1)
from mooncake_lab.engine import CoupledEngine, EngineSettings, load_model
model = load_model('random:lab-tiny', device='cpu')
CoupledEngine(model, settings=EngineSettings(cache_blocks=4)).generate([[1, 2]])
print(torch.get_num_threads())
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout == "1\n"


class TestLinear:
    @pytest.mark.skipif(not linears.prepacked_linear_available(torch.float32), reason="no oneDNN in this torch")
    @quick
    @given(st.integers(1, 70), st.integers(1, 65), st.integers(1, 40), DTYPES, st.integers(0, 99))
    def test_prepacked_is_plain(self, tokens, inputs, outputs, dtype, seed):
        """The reordered weight computes what the plain one does, in each type that the processor reorders."""
        assume(linears.prepacked_linear_available(dtype))
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, inputs, generator=generator).to(dtype)
        weight = torch.randn(outputs, inputs, generator=generator).div(inputs**0.5).to(dtype)
        found, expected = prepacked_linear(weight)(x), plain_linear(weight)(x)
        assert torch.allclose(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


class TestKVCache:
    @quick
    @given(st.sampled_from([1, 3, 8]), st.integers(0, 30), st.integers(1, 30), DTYPES)
    def test_what_is_written_is_read_and_nothing_else_changes(self, size, start, tokens, dtype):
        """A span written across blocks comes back; every other place keeps what it held."""
        config = LlamaConfig(layers=2, width=8, query_heads=2, kv_heads=2, head_width=4, ffn_width=8, vocabulary=8)
        cache = KVCache(config, blocks=70, block_size_tokens=size, device=CPU, dtype=dtype)
        span = torch.randn(2, tokens, 2, 4).to(dtype)
        blocks = torch.randperm(70).tolist()
        cache.write(1, blocks, start, span)
        assert torch.equal(cache.read(1, blocks, start, start + tokens), span)
        assert int((cache.data != 0).sum()) == int((span != 0).sum())


def test_a_widened_linear_is_the_rounded_product():
    """Computed in float32 and rounded once: the product in bfloat16 with float32 sums, as processors have it."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=draw).bfloat16()
    for rows in (1, 3, 17):
        inputs = torch.randn(rows, 40, generator=draw).bfloat16()
        exact = inputs.double() @ weight.double().T
        found = linears.widened_linear(weight)(inputs)
        assert found.dtype == torch.bfloat16
        assert (found.double() - exact).abs().max() <= exact.abs().max() * 2**-8
