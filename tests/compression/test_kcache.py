"""KCache: nothing is lost, only not read; what is not read costs no more than its weight."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mooncake_lab.compression import Combined, FullCache, KCache, MiniCache, SnapKV


@pytest.mark.parametrize("shared", [True, False])
def test_fetching_everything_is_full_attention(step, shared):
    """With as many values as there are, nothing is left out."""
    torch.testing.assert_close(step(KCache(top=200, shared=shared)), step(FullCache()), atol=1e-4, rtol=1e-4)


@given(
    seed=st.integers(0, 10_000), top=st.integers(1, 40), sharp=st.floats(0.1, 6.0),
    renormalise=st.booleans(), shared=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_error_is_bounded_by_the_weight_not_read(seed, top, sharp, renormalise, shared):
    """Plain truncation errs by at most the unread weight times the longest value, renormalised by twice that."""
    rng = torch.Generator().manual_seed(seed)
    weights = (torch.randn(4, 3, 40, generator=rng) * sharp).softmax(dim=-1)
    values = torch.randn(2, 40, 8, generator=rng)
    method = KCache(top=top, shared=shared, renormalise=renormalise)
    mixed, _ = method.mix(weights, values, 2)
    exact = torch.einsum("hgtn,hnd->hgtd", weights.view(2, 2, 3, 40), values).reshape(4, 3, 8)
    read, _ = KCache(top=top, shared=shared, renormalise=False).mix(weights, torch.ones(2, 40, 8), 2)
    unread = 1 - read[..., 0]
    most = (2 if renormalise else 1) * unread * values.norm(dim=-1).max()
    assert ((mixed - exact).norm(dim=-1) <= most + 1e-5).all()


@pytest.mark.parametrize(("shared", "sets"), [(True, 1), (False, 2)])
def test_bytes_fetched_are_counted(session, whole, shared, sets):
    """A step fetches `top` values a KV head, and as many for each further query head that fetches its own."""
    held = session.hold(whole, KCache(top=16, shared=shared))
    session.extend([held], np.array([[3]]))
    assert [layer.fetched_bytes for layer in held.layers] == [sets * 2 * 16 * 8 * 4] * 4
    held.release()


def test_values_are_not_where_keys_are(session, whole):
    """After prefill the device holds keys alone and the host all values, and both grow with every token."""
    held = session.hold(whole, KCache(top=16))
    assert session.pool.used_bytes == 0
    assert held.device_bytes == held.host_bytes
    assert all(torch.equal(layer.keys.rows, keys) for layer, keys in zip(held.layers, whole.keys, strict=True))
    session.extend([held], np.array([[3], [4]]).T)
    assert [layer.values.used for layer in held.layers] == [152] * 4
    held.release()
    assert held.device_bytes == held.host_bytes == 0


def test_after_snapkv_both_save(session, whole, step):
    """Evict first, then offload what stays: reading all of it is SnapKV, and the device holds half of that."""
    snap = SnapKV(capacity=40, window=8)
    both = Combined(snap, KCache(top=200))
    torch.testing.assert_close(step(both), step(snap), atol=1e-4, rtol=1e-4)
    held = session.hold(whole, both)
    assert all(layer.tokens == 40 for layer in held.layers)
    held.release()


def test_minicache_after_eviction_is_refused():
    """Layers that kept different tokens have no vectors to merge."""
    with pytest.raises(ValueError, match="same tokens"):
        Combined(SnapKV(capacity=40), MiniCache())
