"""A whole step in one compiled call computes what the operators do one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_lab.bench.peers import our_engine
from mooncake_lab.engine import GenerationRequest, KVCache
from mooncake_lab.engine.packing import Piece, pack

CPU = torch.device("cpu")
quick = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def decodes(rows, size, seed):
    """One token each of so many requests with contexts of any length, on blocks anywhere."""
    rng = np.random.default_rng(seed)
    tables = rng.permutation(rows * (60 // size + 1)).astype(np.int32).reshape(rows, -1)
    lengths = rng.integers(0, 60, rows)
    return [Piece(rng.integers(0, 61, 1), int(n), t, emits=True) for n, t in zip(lengths, tables, strict=True)]


def taking(tokens, model):
    """The same model on a processor where steps of so many tokens are better compiled as a whole."""
    return replace(model, step=replace(model.step, most_tokens=tokens))


@quick
@given(
    data=st.data(),
    rows=st.sampled_from([1, 2, 3, 4, 5, 8]),
    size=st.sampled_from([1, 7, 16]),
    seed=st.integers(0, 99),
)
def test_logits_and_kvcache_are_those_of_the_operators(any_llama, data, rows, size, seed):
    """For any Llama, number of tokens and block size: the same logits, and the same new keys and values."""
    model = taking(8, data.draw(any_llama).model())
    pieces = decodes(rows, size, seed)
    found = []
    for each in (model, replace(model, step=None)):
        cache = KVCache(
            model.config, blocks=rows * (60 // size + 1), block_size_tokens=size, device=CPU, dtype=torch.float32
        )
        cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(seed)))
        batch = pack(pieces, size, CPU)
        assert each.step is None or each.step.fits(batch)
        found.append((each.forward(batch, cache), cache.data))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4
    assert (found[0][1] - found[1][1]).abs().max() < 1e-4


@pytest.mark.parametrize(("rows", "lone"), [(5, True), (6, True), (2, False)])
def test_it_takes_few_decodes_and_nothing_else(model, rows, lone):
    """Up to its most tokens, all of them decodes; neither more nor a batch with a chunk in it."""
    model = taking(5, model)
    pieces = decodes(rows, 16, 0)
    chunk = Piece(np.arange(5), 0, np.array([0], dtype=np.int32), emits=False)
    batch = pack(pieces if lone else [*pieces, chunk], 16, CPU)
    assert model.step.fits(batch) == (lone and rows <= 5)


def test_bfloat16_stays_close(small):
    """In bfloat16 the step, which rounds less, is within the rounding of the operators."""
    model = taking(3, small.model(dtype=torch.bfloat16))
    logits = []
    for each in (model, replace(model, step=None)):
        cache = KVCache(model.config, blocks=3 * 4, block_size_tokens=16, device=CPU, dtype=torch.bfloat16)
        cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
        logits.append(each.forward(pack(decodes(3, 16, 5), 16, CPU), cache).float())
    assert (logits[0] - logits[1]).norm() < 0.03 * logits[1].norm()


def test_a_listener_gets_every_layer(model):
    """A request that wants its new keys and values layer by layer gets them in decode steps too."""
    seen = []
    engine = our_engine(model, cache_tokens=256).engine
    engine.generate(
        [
            GenerationRequest(
                prompt=[1, 2, 3], max_new_tokens=3, on_kv=lambda layer, start, _: seen.append((layer, start))
            )
        ]
    )
    assert seen == [(layer, start) for start in (0, 3, 4) for layer in range(model.config.layers)]
