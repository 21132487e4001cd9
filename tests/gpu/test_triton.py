"""The GPU kernels beside the dense backend: on a GPU as they are, elsewhere in Triton's interpreter.

Triton is no dependency: it comes with torch on GPU machines. Its interpreter fails with numpy 2.4 and later, and
takes milliseconds for each program of a kernel, so the shapes are small.
"""

import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from mooncake_lab.engine import KVCache, LlamaConfig, make_model, random_weights
from mooncake_lab.engine.backends.dense import DenseBackend
from mooncake_lab.engine.graphs import DecodeGraphs
from mooncake_lab.engine.packing import Piece, pack
from mooncake_lab.engine.rope import make_rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="triton is not installed; `make test-kernels` installs it")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("on a CPU, set TRITON_INTERPRET=1 to test the GPU kernels", allow_module_level=True)
if DEVICE.type == "cpu" and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("triton's interpreter does not work with numpy 2.4", allow_module_level=True)

from mooncake_lab.engine.backends import cuda, triton_kernels  # noqa: E402  # after the guards above

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning"
)  # the interpreter's own
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
"""float16, because the interpreter cuts bfloat16 off where a GPU rounds it."""
SHAPES = [(4, 2, 16, 4), (8, 1, 128, 16), (2, 2, 20, 3), (6, 2, 64, 16), (3, 1, 136, 5)]
"""Query heads, KV heads, head width, block size; above a width of 128 decode attention has smaller tiles."""


def config_of(shape):
    query_heads, kv_heads, head_width, _ = shape
    return LlamaConfig(
        layers=2, width=24, query_heads=query_heads, kv_heads=kv_heads, head_width=head_width, ffn_width=40,
        vocabulary=50, max_positions=400,
    )  # fmt: skip


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def pieces_on_random_blocks(new_and_cached):
    """Each request on blocks of its own, in no order."""
    tables = np.random.default_rng(0).permutation(len(new_and_cached) * 90).astype(np.int32)
    tables = tables.reshape(len(new_and_cached), 90)
    return [
        Piece(np.arange(new) % 50, cached, table, emits=True)
        for (new, cached), table in zip(new_and_cached, tables, strict=True)
    ]


def same(found, expected):
    """Within rounding; in float16, where steps are rounded in between, nearly always to the same number."""
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    if found.dtype == torch.float16:
        assert (found != expected).float().mean() < 0.05


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("width", [1, 24, 64, 700])
def test_add_norm(width, add, dtype):
    """Sum and normalisation agree, for widths that are no power of two, and the sum is left in place."""
    hidden, update, weight = (
        drawn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(3, width), (3, width), (width,)])
    )
    copies = [hidden.clone(), hidden.clone()]
    normed, expected = (
        backend.add_norm(copy, update if add else None, weight, 1e-5)
        for backend, copy in zip((cuda.CudaBackend(), DenseBackend()), copies, strict=True)
    )
    assert torch.equal(*copies)
    same(normed, expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [6, 1024, 1500])
def test_silu_and_multiply(width, dtype):
    """Agrees for less than one program of a row, for exactly one, and for one and a part."""
    normed, down = drawn(3, 8, dtype=dtype) * 3, lambda activated: activated
    (gate_up,) = DenseBackend().linears([drawn(2 * width, 8, dtype=dtype, seed=1)])
    found, expected = (each.feed_forward(normed, gate_up, down) for each in (cuda.CudaBackend(), DenseBackend()))
    same(found, expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotate_and_store(shape, dtype):
    """Queries, stored keys and values agree; a token without a slot is not stored, and nothing else changes."""
    config, size = config_of(shape), shape[-1]
    batch = pack(pieces_on_random_blocks([(1, 7), (1, 16), (3, 15)]), size, DEVICE)
    qkv = drawn(5, config.query_width + 2 * config.kv_width, dtype=dtype)
    caches = [KVCache(config, blocks=270, block_size_tokens=size, device=DEVICE, dtype=dtype) for _ in range(2)]
    for cache in caches:
        cache.data.fill_(7.0)
    padded = replace(batch, slots=batch.slots.clone().index_fill_(0, torch.tensor([1], device=DEVICE), -1))
    rope = make_rope(config, 200, DEVICE)
    query = cuda.CudaBackend().rotate_and_store(qkv, rope, padded, caches[0].layers[1], config)
    expected = DenseBackend().rotate_and_store(qkv, rope, batch, caches[1].layers[1], config)
    block, offset = divmod(int(batch.slots[1]), size)
    for side in (caches[1].layers[1].keys, caches[1].layers[1].values):
        side[block, :, offset] = 7.0
    same(query, expected)
    same(caches[0].data, caches[1].data)


@pytest.mark.parametrize("shape", SHAPES)
def test_keys_and_values_are_left_beside_the_cache(shape):
    """Rotated keys, and values, of all tokens, in their order: what would be gathered from the blocks."""
    config, size = config_of(shape), shape[-1]
    batch = pack(pieces_on_random_blocks([(1, 0), (5, 0), (size + 2, 0)]), size, DEVICE)
    qkv = drawn(size + 8, config.query_width + 2 * config.kv_width)
    cache = KVCache(config, blocks=270, block_size_tokens=size, device=DEVICE, dtype=torch.float32)
    layer, rope, (query, alone) = (
        cache.layers[0],
        make_rope(config, 200, DEVICE),
        qkv.new_empty(2, len(qkv), *shape[:3:2]),
    )
    own = qkv.new_empty(len(qkv), 2 * config.kv_heads, config.head_width)
    where = (rope.cosines, rope.sines, batch.positions, batch.slots, layer.keys, layer.values)
    triton_kernels.rotate_and_store(qkv, *where, alone)
    triton_kernels.rotate_and_store(qkv, *where, query, own)
    assert torch.equal(query, alone)
    blocks, offsets = batch.slots // size, batch.slots % size
    gathered = [side[blocks, :, offsets] for side in (layer.keys, layer.values)]
    assert torch.equal(own, torch.cat(gathered, dim=1))


def test_prompts_that_are_new_attend_to_themselves():
    """Keys and values come from the batch for the layer that was stored last, and from the blocks for another."""
    config = config_of((4, 2, 16, 4))
    batch = pack(pieces_on_random_blocks([(1, 9), (5, 0), (6, 0)]), 4, DEVICE)
    cache = KVCache(config, blocks=270, block_size_tokens=4, device=DEVICE, dtype=torch.float32)
    cache.data.copy_(drawn(*cache.data.shape))
    own, layer = batch.context.own, cache.layers[0]
    own.layer, own.both = layer, drawn(12, 4, 16, seed=1)
    keys, values = cuda.contexts(batch.context, layer, 11)
    assert torch.equal(torch.cat((keys, values), dim=1), own.both[1:])
    other = cache.layers[1]
    for found, side in zip(cuda.contexts(batch.context, other, 11), (other.keys, other.values), strict=True):
        assert torch.equal(found, side[batch.slots[1:] // 4, :, batch.slots[1:] % 4])
    chunk = pack(pieces_on_random_blocks([(5, 0), (6, 3)]), 4, DEVICE)
    assert chunk.context.own is None


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_attention(shape, parts):
    """Agrees for contexts around the edges of tiles and parts; for an empty context, which pads, it is zero."""
    config, size = config_of(shape), shape[-1]
    lengths = [1, 64, 65, 190]
    batch = pack(pieces_on_random_blocks([(1, length - 1) for length in lengths]), size, DEVICE)
    cache = KVCache(config, blocks=360, block_size_tokens=size, device=DEVICE, dtype=torch.float32)
    cache.data.copy_(drawn(*cache.data.shape))
    layer, query = cache.layers[1], drawn(len(lengths), config.query_heads, config.head_width, seed=1) * 2
    expected = DenseBackend().attend(query, batch, layer).view_as(query)
    held = batch.lengths.clone()
    held[0], expected[0] = 0, 0.0
    found = torch.full_like(query, 9.0)
    triton_kernels.paged_decode(query, layer.keys, layer.values, batch.tables, held, found, parts)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tile", triton_kernels.DECODE_TILES, ids=str)
def test_every_tile_attends_the_same(tile):
    """Tiles differ in speed only."""
    config = config_of((6, 2, 64, 16))
    batch = pack(pieces_on_random_blocks([(1, 0), (1, 128), (1, 130)]), 16, DEVICE)
    cache = KVCache(config, blocks=270, block_size_tokens=16, device=DEVICE, dtype=torch.float32)
    cache.data.copy_(drawn(*cache.data.shape))
    layer, query = cache.layers[0], drawn(3, 6, 64, seed=1)
    expected = DenseBackend().attend(query, batch, layer).view_as(query)
    found = torch.empty_like(query)
    where = (layer.keys, layer.values, batch.tables, batch.lengths)
    triton_kernels.paged_decode(query, *where, found, 2, tile)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_decode_attention_of_large_scores():
    """Scores that would overflow the exponential are taken relative to the highest, over tiles and over parts."""
    config = config_of((4, 2, 16, 4))
    batch = pack(pieces_on_random_blocks([(1, 150), (1, 70)]), 4, DEVICE)
    cache = KVCache(config, blocks=180, block_size_tokens=4, device=DEVICE, dtype=torch.float32)
    cache.data.copy_(drawn(*cache.data.shape) * 20)
    layer, query = cache.layers[0], drawn(2, 4, 16, seed=1) * 20
    expected = DenseBackend().attend(query, batch, layer).view_as(query)
    for parts in (1, 4):
        found = torch.empty_like(query)
        triton_kernels.paged_decode(query, layer.keys, layer.values, batch.tables, batch.lengths, found, parts)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def steps(model, size):
    """Logits and cache of three requests: chunks and decodes mixed, then decodes only."""
    cache = KVCache(model.config, blocks=300, block_size_tokens=size, device=DEVICE, dtype=torch.float32)
    rng = np.random.default_rng(0)
    tables, tokens = rng.permutation(300).astype(np.int32).reshape(3, 100), rng.integers(0, 50, (3, 300))
    done, found = [0, 0, 0], []
    for step in ([9, 1, 3], [1, 6, 2], [1, 1, 1]):
        pieces = [
            Piece(tokens[i, done[i] : done[i] + new], done[i], tables[i], emits=True) for i, new in enumerate(step)
        ]
        batch = pack(pieces, size, DEVICE)
        found.append((batch, model.forward(batch, cache)))
        done = [before + new for before, new in zip(done, step, strict=True)]
    return cache, found


@pytest.fixture
def few_parts(monkeypatch):
    """In the interpreter, contexts are cut into four parts or two instead of 64."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(cuda, "CudaBackend", partial(cuda.CudaBackend, decode_programs=8))


@pytest.mark.usefixtures("few_parts")
def test_logits_and_cache_are_those_of_the_dense_backend():
    """The whole model agrees over chunks, decodes and mixtures of them."""
    weights = random_weights(config_of((4, 2, 16, 4)), device=DEVICE, dtype=torch.float32)
    expected_cache, expected = steps(make_model(weights, DenseBackend()), 4)
    cache, found = steps(make_model(weights, cuda.CudaBackend()), 4)
    assert (cache.data - expected_cache.data).abs().max() < 1e-5
    for (_, logits), (_, wanted) in zip(found, expected, strict=True):
        assert (logits - wanted).abs().max() < 1e-4


@pytest.mark.usefixtures("few_parts")
def test_recorded_steps_pad_without_a_trace():
    """A batch of three in a step recorded for four: the same logits, and nothing else in the cache changes."""
    weights = random_weights(config_of((4, 2, 16, 4)), device=DEVICE, dtype=torch.float32)
    model = make_model(weights, cuda.CudaBackend())
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
    parts = [cuda.stretches(rows, 8) for rows in (1, 2, 8, 64, 256)]
    assert parts == sorted(parts, reverse=True)
    assert all(part & (part - 1) == 0 for part in parts)
    assert parts[-1] == 1
