"""MiniCache: what two layers share comes back with a known error, and what is retained comes back exactly."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mooncake_lab.compression import MiniCache
from mooncake_lab.compression.minicache import LowBit, angle, slerp


def sides(seed, tokens=20, near=0.3):
    rng = torch.Generator().manual_seed(seed)
    first = torch.randn(2, tokens, 8, generator=rng)
    return first, first + near * torch.randn(2, tokens, 8, generator=rng)


@given(seed=st.integers(0, 1000), towards=st.sampled_from([0.0, 0.25, 0.5, 0.6, 1.0]), near=st.floats(0.01, 3.0))
@settings(max_examples=60, deadline=None)
def test_error_has_a_closed_form(seed, towards, near):
    """A shallower vector moves by 2 |x| sin(t angle / 2), a deeper one by 2 |x| sin((1 - t) angle / 2)."""
    pair = sides(seed, near=near)
    merged = MiniCache(towards=towards, retained=0.0).merge(*pair)
    between = angle(*(side / side.norm(dim=-1, keepdim=True) for side in pair))
    for which, share in ((0, towards), (1, 1 - towards)):
        lengths = pair[which].norm(dim=-1)
        error = (merged.restore(which) - pair[which]).norm(dim=-1)
        torch.testing.assert_close(error, 2 * lengths * (share * between / 2).sin(), atol=2e-5, rtol=1e-4)


@given(seed=st.integers(0, 1000), towards=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_lengths_come_back(seed, towards):
    """Directions have length one, so that restored vectors are as long as they were."""
    pair = sides(seed)
    merged = MiniCache(towards=towards, retained=0.0).merge(*pair)
    torch.testing.assert_close(merged.direction.norm(dim=-1), torch.ones(2, 20), atol=1e-5, rtol=0)
    for which in (0, 1):
        torch.testing.assert_close(merged.restore(which).norm(dim=-1), pair[which].norm(dim=-1))


def test_equal_layers_lose_nothing():
    """Where two layers agree there is nothing between them, whatever the share."""
    first, _ = sides(2)
    merged = MiniCache(retained=0.0).merge(first, 3 * first)
    torch.testing.assert_close(merged.restore(0), first)
    torch.testing.assert_close(merged.restore(1), 3 * first)


def test_retained_tokens_are_exact_and_the_worst():
    """The share with the largest angles keeps its originals, to the bit."""
    pair = sides(3, tokens=40)
    merged = MiniCache(retained=0.25).merge(*pair)
    between = angle(*(side / side.norm(dim=-1, keepdim=True) for side in pair)).mean(dim=0)
    assert len(merged.kept) == 10
    assert between[merged.kept].min() >= between[~torch.isin(torch.arange(40), merged.kept)].max()
    for which in (0, 1):
        assert torch.equal(merged.restore(which)[:, merged.kept], pair[which][:, merged.kept])


def test_opposite_vectors_are_always_retained():
    """There is no direction between opposites; such tokens keep both sides, and nothing becomes NaN."""
    first, second = sides(4)
    second[1, 7] = -first[1, 7]
    merged = MiniCache(retained=0.0).merge(first, second)
    assert merged.kept.tolist() == [7]
    assert torch.equal(merged.restore(1)[:, 7], second[:, 7])
    assert merged.restore(0).isfinite().all()


def test_angles_are_accurate_where_cosines_are_not():
    """An angle of a hundred-thousandth is not rounded to zero."""
    small = torch.tensor(1e-5, dtype=torch.float64)
    first = torch.tensor([1.0, 0.0], dtype=torch.float64)
    second = torch.stack((small.cos(), small.sin()))
    assert angle(first, second).item() == pytest.approx(1e-5, rel=1e-9)
    torch.testing.assert_close(slerp(first, second, 0.5), torch.stack(((small / 2).cos(), (small / 2).sin())))


def test_stored_bytes_follow_the_formula(session, whole):
    """A merged pair costs one layer of directions, two lengths a vector, and the retained rows of both."""
    held = session.hold(whole, MiniCache(retained=0.1))
    tokens, heads, width, kept = 150, 2, 8, 15
    pair = 2 * (4 * heads * tokens * width + 4 * 2 * heads * tokens + 8 * kept + 4 * 2 * heads * kept * width)
    assert [layer.stored_bytes for layer in held.layers[1:3]] == [pair, 0]
    held.release()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.5 / 255), (4, 0.5 / 15), (2, 0.5 / 3)])
def test_rounding_errs_by_half_a_step(bits, most):
    """Restored numbers are within half a level of the originals; they take their bits and two numbers a group."""
    tensor = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(0))
    rounded = LowBit.of(tensor, bits, 8)
    spread = tensor.amax(dim=-1, keepdim=True) - tensor.amin(dim=-1, keepdim=True)
    assert ((rounded.restore() - tensor).abs() <= spread * (most + 0.004)).all()
    assert rounded.bytes == tensor.numel() * bits // 8 + 2 * 2 * 60
