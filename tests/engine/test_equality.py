"""The engine computes what Hugging Face computes, however the work is cut, packed, paged, reused or moved."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import BATCHING_POLICIES, CHUNKED_POLICIES, named_policy
from mooncake_lab.engine import (
    CoupledEngine,
    DecodeEngine,
    EngineSettings,
    GenerationRequest,
    KVCache,
    PrefillEngine,
)
from mooncake_lab.engine.packing import Piece, pack

CPU = torch.device("cpu")
quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROOM = EngineSettings(cache_blocks=64)
COUPLED = sorted(set(BATCHING_POLICIES) - {"prefill_only", "decode_only"})


@st.composite
def policies(draw):
    """Any policy of a coupled engine, with any chunk where it cuts prompts."""
    name = draw(st.sampled_from(COUPLED))
    chunk = draw(st.sampled_from([None, 8, 17, 64])) if name in CHUNKED_POLICIES else None
    return named_policy(name, chunk_tokens=chunk)


class TestHuggingFace:
    @quick
    @given(data=st.data(), policy=policies(), block=st.sampled_from([1, 3, 16, 64]), seed=st.integers(0, 99))
    def test_greedy_tokens_are_those_of_generate(self, any_llama, prompts, data, policy, block, seed):
        """For any Llama, policy, chunk and block size, every request gets the tokens of `generate`."""
        twins, asked = data.draw(any_llama), prompts(seed, 4)
        engine = CoupledEngine(
            twins.model(), policy, EngineSettings(block_size_tokens=block, max_batch_tokens=256, max_requests=8)
        )
        outputs = engine.generate(asked, max_new_tokens=6)
        engine.engine.instance.check()
        assert [output.tokens for output in outputs] == [twins.greedy(prompt, 6) for prompt in asked]

    @quick
    @given(backend=st.sampled_from(["cpu", "dense"]), data=st.data())
    def test_logits_are_those_of_a_monolithic_prefill(self, any_llama, prompts, backend, data):
        """However a prompt is cut, each chunk's last logits are within 1e-4 of the full forward pass."""
        twins = data.draw(any_llama)
        tokens = prompts(data.draw(st.integers(0, 99)), 1)[0].astype(np.int64)
        cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=5)) | {0, len(tokens)})
        model = twins.model(backend)
        cache = KVCache(model.config, blocks=70, block_size_tokens=4, device=CPU, dtype=torch.float32)
        blocks = np.random.default_rng(0).permutation(70).astype(np.int32)
        expected = twins.logits(tokens)
        for start, stop in pairwise(cuts):
            piece = Piece(tokens[start:stop], start, blocks, emits=True)
            logits = model.forward(pack([piece], 4, CPU), cache)
            assert (logits[0] - expected[stop - 1]).abs().max() < 1e-4


@pytest.fixture(scope="module")
def expected(small, prompts):
    asked = prompts(5, 9, common=20)
    return asked, [small.greedy(prompt, 12) for prompt in asked]


class TestOneEngineInManyWays:
    @quick
    @given(policy=policies(), blocks=st.integers(12, 60), reuse=st.booleans())
    def test_neither_reuse_nor_preemption_changes_tokens(self, model, expected, policy, blocks, reuse):
        """With any room in the KVCache, prefix reuse or none, tokens stay the same and no block is lost."""
        limits = EngineSettings(
            block_size_tokens=8, cache_blocks=blocks, prefix_caching=reuse, max_batch_tokens=128, max_requests=6
        )
        engine = CoupledEngine(model, policy, limits)
        for prompt in expected[0]:
            engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=12))
        done = []
        while engine.engine.busy:
            done += engine.step()
            engine.engine.instance.check()
        assert [output.tokens for output in sorted(done, key=lambda o: o.request_id)] == expected[1]
        assert engine.engine.allocator.available == blocks

    def test_reuse_computes_a_common_prefix_once(self, model, expected):
        """After one request, the whole blocks of a shared prefix are found by all others."""
        engine = CoupledEngine(model, settings=EngineSettings(block_size_tokens=8))
        first = engine.generate(expected[0][:1], max_new_tokens=12)
        rest = engine.generate(expected[0][1:], max_new_tokens=12)
        assert [output.tokens for output in first + rest] == expected[1]
        assert all(output.reused_tokens >= 16 for output in rest)

    @quick
    @given(sizes=st.tuples(*[st.sampled_from([1, 4, 16])] * 2), room=st.integers(12, 40), chunk=st.integers(5, 70))
    def test_prefill_here_decode_there_is_one_engine(self, model, expected, sizes, room, chunk):
        """KVCache moved to an engine of other blocks, swapped out on shortage, decodes to the same tokens."""
        prefill = PrefillEngine(
            model, EngineSettings(block_size_tokens=sizes[0], cache_blocks=999), chunk_tokens=chunk
        )
        decode = DecodeEngine(
            model, EngineSettings(block_size_tokens=sizes[1], cache_blocks=room * 128 // (8 * sizes[1]))
        )
        for prompt in expected[0]:
            result = prefill.prefill(prompt)
            request = GenerationRequest(prompt=prompt, max_new_tokens=12)
            decode.submit(request, first_token=result.first_token, kv=[result.kv])
        outputs = decode.run()
        prefill.engine.instance.check()
        decode.engine.instance.check()
        assert [output.tokens for output in outputs] == expected[1]

    @quick
    @given(cut=st.integers(1, 20))
    def test_prefill_from_a_given_prefix_is_prefill_from_scratch(self, model, expected, cut):
        """KVCache of a prefix from elsewhere, whole blocks or not, spares its computation and changes nothing."""
        prompt, tokens = expected[0][0], expected[1][0]
        prefix = PrefillEngine(model, ROOM).prefill(prompt[:cut]).kv
        pieces = {}
        engine = PrefillEngine(model, ROOM, chunk_tokens=7)
        request = GenerationRequest(prompt=prompt, on_kv=lambda *piece: pieces.setdefault(piece[:2], piece[2]))
        wanted = engine.submit(request, prefix=[prefix])
        results = []
        while not results:
            results = engine.step()
        assert (results[0].request_id, results[0].first_token) == (wanted, tokens[0])
        assert results[0].reused_tokens == min(cut, len(prompt) - 1)
        kv = results[0].kv
        for layer, whole in enumerate(kv.layers):
            parts = [pieces[key] for key in sorted(pieces) if key[0] == layer]
            assert torch.equal(torch.cat(parts, dim=1), whole)
        decode = DecodeEngine(model, ROOM)
        request = GenerationRequest(prompt=prompt, max_new_tokens=12)
        decode.submit(request, first_token=tokens[0], kv=[prefix, kv])
        assert decode.run()[0].tokens == tokens
