"""Compressed or not, the engine's model computes over the pool's blocks, and the pool gets all of them back."""

import numpy as np
import pytest
import torch

from mooncake_lab.compression import FullCache, KCache, MiniCache, PyramidInfer, RecentTokens, SnapKV
from mooncake_lab.compression.session import Session
from mooncake_lab.engine import CoupledEngine, EngineSettings
from tests.compression.conftest import small_model

METHODS = (
    FullCache(),
    SnapKV(capacity=40, window=8),
    RecentTokens(capacity=40, sinks=4),
    PyramidInfer(decay=0.5, min_context=8),
    MiniCache(),
    MiniCache(bits=4),
    KCache(top=16),
)
each_method = pytest.mark.parametrize("method", METHODS, ids=str)


def test_full_cache_generates_what_the_engine_does(session, prompt):
    """With nothing dropped, a session and the engine generate the same tokens."""
    engine = CoupledEngine(session.plain, settings=EngineSettings(cache_blocks=64))
    (output,) = engine.generate([prompt], max_new_tokens=12)
    held, logits = session.start(prompt, FullCache())
    assert session.generate(held, int(logits.argmax()), 12) == list(output.tokens)
    held.release()


@each_method
def test_a_chunk_is_its_tokens_one_by_one(session, prompt, method):
    """Tokens run through a compressed cache together or singly give the same logits."""
    held, _ = session.start(prompt, method)
    together = session.extend([held], np.array([[3, 4, 5]]), every=True)
    held.release()
    held, _ = session.start(prompt, method)
    singly = torch.cat([session.extend([held], np.array([[token]])) for token in (3, 4, 5)])
    held.release()
    torch.testing.assert_close(together, singly, atol=1e-4, rtol=1e-4)


@each_method
def test_requests_in_a_batch_do_not_see_each_other(session, prompt, method):
    """Two requests of different lengths decode together as they do alone."""
    prompts = (prompt, prompt[:90])
    helds = [session.start(each, method)[0] for each in prompts]
    together = session.extend(helds, np.array([[1], [2]]))
    for held in helds:
        held.release()
    for row, each in enumerate(prompts):
        held, _ = session.start(each, method)
        alone = session.extend([held], np.array([[row + 1]]))
        held.release()
        torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", [m for m in METHODS if m != MiniCache(bits=4)], ids=str)
def test_fast_backend_agrees(prompt, method):
    """The compiled CPU backend computes over compressed caches what the reference does, rounding apart."""
    logits = []
    for backend in ("dense", "cpu"):
        session = Session(small_model(backend=backend), room_tokens=1000, block_size_tokens=16)
        held, _ = session.start(prompt, method)
        logits.append(torch.cat([session.extend([held], np.array([[t]])) for t in (3, 4)]))
        held.release()
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


@each_method
def test_released_memory_is_free(session, prompt, method):
    """What a compressed request took of the pool is given back, once."""
    held, _ = session.start(prompt, method)
    held.release()
    assert session.pool.used_bytes == 0
    with pytest.raises(ValueError, match="released before"):
        held.release()


@pytest.mark.parametrize("capacity", [24, 40, 80])
def test_eviction_frees_blocks(session, whole, capacity):
    """Bytes that the pool lends fall in proportion to the capacity, to the whole block."""
    held = session.hold(whole, SnapKV(capacity=capacity, window=8))
    block = session.pool.cache.block_bytes
    assert session.pool.used_bytes == held.device_bytes == 4 * capacity // 8 * block
    held.release()


def test_positions_count_what_was_read_not_what_is_kept(session, whole, step):
    """The next token's position is the true length: a session that forgot it would answer otherwise."""
    method = RecentTokens(capacity=40)
    right = step(method)
    held = session.hold(whole, method)
    assert held.position == whole.tokens
    held.position = 40
    wrong = session.extend([held], np.array([[7, 11]]), every=True)
    held.release()
    assert (right - wrong).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (SnapKV, {"capacity": 40, "window": 40}),
        (SnapKV, {"capacity": 40, "window": 0}),
        (SnapKV, {"capacity": 40, "kernel": 4}),
        (SnapKV, {"capacity": 40, "kernel": 0}),
        (KCache, {"top": 0}),
        (MiniCache, {"towards": 1.5}),
        (PyramidInfer, {"decay": 0.0}),
        (PyramidInfer, {"decay": 1.1}),
        (PyramidInfer, {"recent_ratio": 0.0}),
        (PyramidInfer, {"exceed": 0}),
    ],
)
def test_bad_knobs_are_refused(make, change):
    """A method that cannot be carried out is an error where it is made."""
    with pytest.raises(ValueError, match=r"needed|must|fetched"):
        make(**change)
