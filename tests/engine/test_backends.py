"""Fast backends compute what the dense one computes, operation by operation."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.engine.backends import DenseBackend, choose_backend, cpu_kernels, cpu_prefill
from mooncake_lab.engine.backends.onednn import bfloat16_linear
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
            ops.feed_forward(inputs, *DenseBackend().linears([up, down])) for ops in (fast(dtype), DenseBackend())
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
    @quick
    @given(st.integers(0, 300), st.integers(1, 65), st.integers(1, 40), DTYPES, st.integers(0, 99))
    def test_panels_are_the_plain_product(self, tokens, inputs, outputs, dtype, seed):
        """Weights in panels compute what the plain ones do, for any shape and for no token, layer by layer."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, inputs, generator=generator).to(dtype)
        weights = [torch.randn(outputs, inputs, generator=generator).div(inputs**0.5).to(dtype) for _ in range(2)]
        for weight, linear in zip(weights, fast(dtype).linears(weights), strict=True):
            assert linear(x).dtype == dtype
            assert torch.allclose(linear(x), F.linear(x, weight), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    @quick
    @given(st.integers(1, 150), st.integers(0, 149), st.integers(0, 99))
    def test_a_token_is_computed_alike_in_any_company(self, tokens, row, seed):
        """The outputs of a token have the same bits alone and among others."""
        generator = torch.Generator().manual_seed(seed)
        x, weight = torch.randn(tokens, 50, generator=generator), torch.randn(33, 50, generator=generator)
        (linear,) = fast(torch.float32).linears([weight])
        row %= tokens
        assert torch.equal(linear(x)[row], linear(x[row : row + 1])[0])

    def test_bfloat16_is_rounded_once(self):
        """Sums are float32 and rounded at their end: as near to the exact product as bfloat16 can be."""
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(24, 40, generator=draw).bfloat16()
        (linear,) = fast(torch.bfloat16).linears([weight])
        for rows in (1, 3, 17):
            inputs = torch.randn(rows, 40, generator=draw).bfloat16()
            exact = inputs.double() @ weight.double().T
            assert (linear(inputs).double() - exact).abs().max() <= exact.abs().max() * 2**-8

    @quick
    @given(st.integers(1, 40), st.integers(1, 65), st.integers(1, 40), st.integers(0, 99))
    def test_onednn_is_the_plain_product(self, tokens, inputs, outputs, seed):
        """What processors with bfloat16 instructions use for many tokens."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, inputs, generator=generator).bfloat16()
        weight = torch.randn(outputs, inputs, generator=generator).div(inputs**0.5).bfloat16()
        assert torch.allclose(bfloat16_linear(weight)(x), F.linear(x, weight), atol=3e-2, rtol=3e-2)


class TestLongContexts:
    def test_a_broken_number_breaks_one_request(self):
        """A key that is no number spoils the request that sees it; the others of the batch are computed."""
        config = LlamaConfig(
            layers=1, width=8, query_heads=2, kv_heads=1, head_width=16, ffn_width=8, vocabulary=8
        )
        cache = KVCache(config, blocks=4, block_size_tokens=4, device=CPU, dtype=torch.float32)
        cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
        pieces = [Piece(np.zeros(1, np.int64), 3, np.array([block], np.int32), emits=True) for block in (0, 1)]
        pieces += [Piece(np.zeros(2, np.int64), 2, np.array([block], np.int32), emits=True) for block in (2, 3)]
        query = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1))
        batch = pack(pieces, 4, CPU)
        whole = fast(torch.float32).attend(query, batch, cache.layers[0])
        cache.layers[0].keys[[0, 2]] = float("nan")
        broken = fast(torch.float32).attend(query, batch, cache.layers[0])
        assert torch.equal(broken[[1, 4, 5]], whole[[1, 4, 5]])

    @pytest.mark.parametrize("kv_heads", [1, 3, 4])
    def test_threads_share_heads_and_change_nothing(self, kv_heads):
        """However many heads a thread takes together, the same bits come out."""
        keys, values = np.random.default_rng(0).standard_normal((2, 12, kv_heads, 7, 20)).astype(np.float32)
        query = np.random.default_rng(1).standard_normal((4, 3 * kv_heads, 20)).astype(np.float32)
        tables = np.random.default_rng(2).permutation(12).astype(np.int32).reshape(4, 3)
        lengths, found = np.array([1, 21, 8, 14], np.int32), []
        for threads in (1, 2, 3, 8):
            found.append(np.empty((4, 3 * kv_heads * 20), np.float32))
            cpu_kernels.paged_decode(query, keys, values, tables, lengths, threads, found[-1])
        assert all(np.array_equal(each, found[0]) for each in found)

    @pytest.mark.parametrize(("new", "cached", "size"), [(300, 0, 16), (300, 333, 16), (2, 700, 7), (130, 250, 1)])
    @pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
    def test_chunks_beyond_a_tile(self, new, cached, size, dtype):
        """A chunk of several tiles over a context of several pieces is a full score matrix."""
        config = LlamaConfig(
            layers=1, width=8, query_heads=6, kv_heads=2, head_width=36, ffn_width=8, vocabulary=8
        )
        generator = torch.Generator().manual_seed(new)
        blocks = (new + cached) // size + 1
        cache = KVCache(config, blocks=blocks, block_size_tokens=size, device=CPU, dtype=dtype)
        cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
        table = torch.randperm(blocks, generator=generator).int().numpy()
        batch = pack([Piece(np.zeros(new, np.int64), cached, table, emits=True)], size, CPU)
        query = (torch.randn(new, 6, 36, generator=generator) * 3).to(dtype)
        found = fast(dtype).attend(query, batch, cache.layers[0])
        expected = DenseBackend().attend(query, batch, cache.layers[0])
        assert (found - expected).abs().max() < TOLERANCE[dtype]


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


@pytest.mark.parametrize("name", ["cpu_linear", "cpu_prefill", "cpu_step"])
def test_an_edited_kernel_is_compiled_anew_wherever_it_is_used(name):
    """Numba's cache knows a file by its content, so a file has the digest of those whose kernels it uses."""
    folder = Path(cpu_kernels.__file__).parent
    text = (folder / f"{name}.py").read_text(encoding="utf-8")
    used = sorted(set(re.findall(r"backends\.(cpu_\w+) import", text)))
    content = b"".join((folder / f"{each}.py").read_bytes() for each in used)
    digest = hashlib.sha256(content).hexdigest()[:16]
    assert f"\n# digest of the kernels that numba compiles into these: {digest}\n" in text


def test_prefill_attention_gives_the_same_bits_wherever_its_arrays_lie():
    """Compiled loops may take another path by the addresses of their arrays; the results do not tell."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((64, 4, 16)).astype(np.float32)
    keys, values = rng.standard_normal((2, 4, 2, 16, 16)).astype(np.float32)
    table, apart, found = np.arange(4, dtype=np.int32), [], set()
    for _ in range(300):
        out = np.empty((64, 64), np.float32)
        apart.append(np.empty(rng.integers(1, 5000), np.uint8))  # so that the next arrays lie elsewhere
        cpu_prefill.paged_prefill(query, keys, values, table, 0, out)
        found.add(out.tobytes())
    assert len(found) == 1
