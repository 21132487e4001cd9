"""Layer-wise prefill: the same tokens with and without a store, whatever the store does, and real overlap."""

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_lab.engine import EngineSettings, GenerationRequest, PrefillEngine
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.layerwise.loader import LayerLoader
from mooncake_lab.engine.layerwise.prefill import KVWriter, LayerwisePrefill, LeavingKV, StoredBlocks
from mooncake_lab.store.backends import DramBackend, SsdBackend
from mooncake_lab.store.backends.ssd import model_folder
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

ROOM = EngineSettings(
    block_size_tokens=8, cache_blocks=60, max_batch_tokens=64, max_requests=8, prefix_caching=False
)
TOKEN = b"a token of the tests"
MIB = 2**20


def prompt_of(tokens, seed=0):
    """A prompt of random tokens."""
    return np.random.default_rng(seed).integers(0, 61, tokens).astype(np.int32)


def alone(model, prompt, **changes):
    """The first token and the whole KVCache of a prompt that nothing was reused for."""
    return PrefillEngine(model, replace(ROOM, **changes)).prefill(prompt)


@contextlib.contextmanager
def tiers(*media):
    """A store over media, which are closed at the end; nothing may be left behind in it."""
    with TieredStore([TierSettings(medium=medium) for medium in media]) as store:
        yield store
        store.flush()
        store.check()
        assert store.leaked_bytes() == 0
    for medium in media:
        medium.close()


def same(result, expected, given_tokens):
    """Whether a prefill gave the first token and the KVCache that one without a store gives."""
    for found, right in zip(result.prefill.kv.layers, expected.kv.layers, strict=True):
        torch.testing.assert_close(found, right[:, given_tokens:], rtol=1e-4, atol=1e-5)
    return result.prefill.first_token == expected.first_token


@pytest.mark.parametrize("block_tokens", [8, 12, 16])
@pytest.mark.parametrize("chunk_tokens", [None, 13])
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_those_of_a_prefill_without_a_store(model, block_tokens, chunk_tokens, overlap):
    """Stored and loaded, in any block and chunk size, overlapped or not: first token and KVCache stay the same."""
    prompts = [prompt_of(50), np.concatenate([prompt_of(50)[:40], prompt_of(20, seed=1)])]
    engine = PrefillEngine(model, ROOM, chunk_tokens=chunk_tokens)
    with (
        tiers(DramBackend(MIB)) as store,
        LayerwisePrefill(engine, store, block_tokens=block_tokens, overlap=overlap) as layerwise,
    ):
        for turn, prompt in enumerate([*prompts, prompts[0]]):
            result = layerwise.prefill(prompt)
            layerwise.flush()
            held = (0, 40, 50)[turn] // block_tokens * block_tokens
            assert result.loaded_tokens == result.prefill.reused_tokens == min(held, len(prompt) - 1)
            assert same(result, alone(model, prompt), result.loaded_tokens)
            assert result.lost_blocks == 0
            engine.engine.instance.check()
        counts = layerwise.writer.counts
        assert (counts.dropped, counts.failed, counts.incomplete) == (0, 0, 0)
        assert store.match_prefix(layerwise.layout.keys(prompts[1])) == 60 // block_tokens


class Faulty:
    """A source that loses one block from one layer on."""

    def __init__(self, source, layer, block):
        self.source, self.layer, self.block = source, layer, block
        self.blocks = source.blocks

    def read(self, layer, block, into):
        """Fail where it is told to, and leave rubbish."""
        if layer >= self.layer and block == self.block:
            into.fill_(float("nan"))
            return False
        return self.source.read(layer, block, into)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layer=st.integers(0, 1), block=st.integers(0, 3), second=st.integers(0, 3), overlap=st.booleans())
def test_a_lost_block_is_computed_again(model, layer, block, second, overlap):
    """Lost at any layer, even twice, next to others in the batch: the same tokens, what came before it reused."""
    prompt, other = prompt_of(40), prompt_of(11, seed=3)
    engine = PrefillEngine(model, ROOM)
    with tiers(DramBackend(MIB)) as store, LayerwisePrefill(engine, store, block_tokens=8) as layerwise:
        layerwise.prefill(prompt)
        layerwise.flush()
        source = StoredBlocks(store, layerwise.layout.keys(prompt)[:4])
        faulty = Faulty(Faulty(source, layer, block), 1, second)
        arriving = LayerLoader(faulty, layerwise.layout, whole=not overlap)
        asked = [GenerationRequest(prompt=one) for one in (other, prompt)]
        ids = [engine.submit(asked[0]), engine.submit(asked[1], prefix=arriving)]
        results = {}
        while len(results) < 2:
            results |= {result.request_id: result for result in engine.step()}
        left = min(block, second)
        assert results[ids[1]].reused_tokens == arriving.tokens == left * 8
        assert arriving.lost_blocks == 4 - left
        for asked, found in zip((other, prompt), (results[i] for i in ids), strict=True):
            expected = alone(model, asked)
            assert found.first_token == expected.first_token
            for mine, right in zip(found.kv.layers, expected.kv.layers, strict=True):
                torch.testing.assert_close(mine, right[:, found.kv.start :], rtol=1e-4, atol=1e-5)
        engine.engine.instance.check()
        assert engine.engine.allocator.available == ROOM.cache_blocks


def test_a_flipped_byte_on_disk_is_computed_again(model, tmp_path):
    """Its checksum says so: the prefix ends before the block, the tier counts it, the tokens are right."""
    prompt, engine = prompt_of(50), PrefillEngine(model, ROOM)
    ssd = SsdBackend(tmp_path, MIB, fingerprint=b"model")
    with tiers(ssd) as store, LayerwisePrefill(engine, store, block_tokens=16) as layerwise:
        layerwise.prefill(prompt)
        layerwise.flush()
        keys = layerwise.layout.keys(prompt)
        block = next(block for block in ssd.blocks() if block.key == keys[1])
        with (model_folder(tmp_path, b"model") / "slab").open("r+b") as slab:
            slab.seek(block.offset_bytes + 4096 * 2)  # behind header and first layer
            slab.write(b"\xff\x00\xff")
        result = layerwise.prefill(prompt)
        assert (result.loaded_tokens, result.lost_blocks) == (16, 2)
        assert same(result, alone(model, prompt), 16)
        assert store.statistics()[0].damaged == 1


def test_what_was_loaded_layer_by_layer_rises(model, tmp_path):
    """A prefix that came from SSD is in DRAM afterwards, and comes from there the next time."""
    prompt, engine = prompt_of(50), PrefillEngine(model, ROOM)
    ssd = SsdBackend(tmp_path, MIB, fingerprint=b"model")
    with tiers(ssd) as store, LayerwisePrefill(engine, store, block_tokens=16) as layerwise:
        layerwise.prefill(prompt)
        layerwise.flush()
    ssd = SsdBackend(tmp_path, MIB, fingerprint=b"model")
    with tiers(DramBackend(MIB), ssd) as store, LayerwisePrefill(engine, store, block_tokens=16) as layerwise:
        keys = layerwise.layout.keys(prompt)
        assert {store.tier_of(key) for key in keys} == {"ssd"}
        for _ in range(2):
            result = layerwise.prefill(prompt)
            layerwise.flush()
            assert result.loaded_tokens == 48
            assert same(result, alone(model, prompt), 48)
            assert {store.tier_of(key) for key in keys} == {"dram"}
        assert store.statistics()[1].promoted == 3
        assert store.statistics()[0].hits > 0


class Meeting:
    """A source whose layer k comes only after the engine computed the keys and values of layer k - 1."""

    def __init__(self, source):
        self.source, self.blocks = source, source.blocks
        self.computed = [threading.Event() for _ in range(8)]

    def read(self, layer, block, into):
        """Wait for the layer before."""
        return (layer == 0 or self.computed[layer - 1].wait(20)) and self.source.read(layer, block, into)

    def on_kv(self, layer, _start, _span):
        """The engine computed a layer."""
        self.computed[layer].set()


def test_computation_waits_only_for_its_own_layer(model):
    """Layer 1 is loaded after layer 0 computed: an engine that waited for all of the prefix would never begin."""
    prompt, engine = prompt_of(40), PrefillEngine(model, ROOM)
    with tiers(DramBackend(MIB)) as store, LayerwisePrefill(engine, store, block_tokens=8) as layerwise:
        layerwise.prefill(prompt)
        layerwise.flush()
        source = Meeting(StoredBlocks(store, layerwise.layout.keys(prompt)[:4]))
        arriving = LayerLoader(source, layerwise.layout)
        engine.submit(GenerationRequest(prompt=prompt, on_kv=source.on_kv), prefix=arriving)
        (result,) = engine.step()
        assert (result.reused_tokens, arriving.lost_blocks, arriving.is_complete) == (32, 0, True)
        assert result.first_token == alone(model, prompt).first_token


def test_layers_are_stored_while_later_ones_compute(model, monkeypatch):
    """Layer 0 is in the backend before layer 1 computes: storing does not wait for the end."""
    prompt, engine = prompt_of(40), PrefillEngine(model, ROOM)
    arena, writes, write = DramBackend(MIB), [], DramBackend.write
    monkeypatch.setattr(DramBackend, "write", lambda *given, **more: writes.append(given) or write(*given, **more))
    written = threading.Event()
    with tiers(arena) as store:
        layout = KVLayout.of(model, engine.engine.runner.fingerprint, block_tokens=8)
        writer = KVWriter(store, layout)
        leaving = LeavingKV(writer, layout.keys(prompt))

        def on_kv(layer, start, span):
            if layer == 1:
                writer.flush()
                written.set() if writes else None
            leaving.on_layer(layer, start, span)

        engine.submit(GenerationRequest(prompt=prompt, on_kv=on_kv))
        engine.step()
        leaving.end()
        writer.close()
        assert written.is_set()
        assert writer.counts.stored == 5


def test_a_full_queue_drops_blocks_and_nothing_else(model):
    """What does not fit is not stored and counted; the prefill is as ever, and no room leaks."""
    prompt, engine = prompt_of(50), PrefillEngine(model, ROOM)
    with (
        tiers(DramBackend(MIB)) as store,
        LayerwisePrefill(engine, store, block_tokens=16, queue_bytes=100) as layerwise,
    ):
        result = layerwise.prefill(prompt)
        layerwise.flush()
        assert same(result, alone(model, prompt), 0)
        assert layerwise.writer.counts.dropped == 3
        assert store.match_prefix(layerwise.layout.keys(prompt)) == 0


def test_a_block_that_began_elsewhere_is_not_stored(model):
    """Where the engine found half a block in its own cache, that block is left out, and the next are stored."""
    prompt, engine = prompt_of(50), PrefillEngine(model, replace(ROOM, prefix_caching=True))
    engine.prefill(prompt[:9])  # 8 tokens stay in the engine
    with tiers(DramBackend(MIB)) as store, LayerwisePrefill(engine, store, block_tokens=16) as layerwise:
        result = layerwise.prefill(prompt)
        layerwise.flush()
        assert result.prefill.reused_tokens == 8
        assert layerwise.writer.counts.incomplete == 1
        assert [key in store for key in layerwise.layout.keys(prompt)] == [False, True, True]


def test_a_cancelled_request_is_written_into_no_more(model):
    """Cancelled after a loss, while its loader still reads: its blocks are free once the loader has stopped."""
    prompt, engine = prompt_of(40), PrefillEngine(model, ROOM)
    with tiers(DramBackend(MIB)) as store, LayerwisePrefill(engine, store, block_tokens=8) as layerwise:
        layerwise.prefill(prompt)
        layerwise.flush()
        source = StoredBlocks(store, layerwise.layout.keys(prompt)[:4])
        arriving = LayerLoader(Faulty(source, 0, 2), layerwise.layout)
        asked = engine.submit(GenerationRequest(prompt=prompt), prefix=arriving)
        assert engine.step() == []
        engine.engine.cancel(asked)
        assert engine.step() == []
        engine.engine.instance.check()
        assert engine.engine.allocator.available == ROOM.cache_blocks
