"""SnapKV and the controls: who stays, and what dropping the others can cost at most."""

from dataclasses import replace

import pytest
import torch

from mooncake_lab.compression import FullCache, Oracle, RandomTokens, RecentTokens, SnapKV
from mooncake_lab.compression.eviction import window_attention

N = 150
EVICTIONS = (
    SnapKV(capacity=40, window=8),
    RandomTokens(capacity=40, recent=8),
    RecentTokens(capacity=40),
    RecentTokens(capacity=40, sinks=4),
    Oracle(capacity=40, evidence=(60, 61, 62)),
)


@pytest.mark.parametrize("method", EVICTIONS, ids=str)
def test_kept_tokens_are_a_set_of_the_prompts(whole, method):
    """Each head keeps exactly its capacity, in order, each place once and within the prompt."""
    for layer in range(4):
        kept = method.keep(whole, layer)
        assert kept.shape == (2, 40)
        assert (kept.diff(dim=-1) > 0).all()
        assert kept.min() >= 0
        assert kept.max() < N


@pytest.mark.parametrize("method", EVICTIONS, ids=str)
def test_short_prompts_stay_as_they_are(step, method):
    """A capacity above the prompt changes nothing at all, to the bit."""
    assert torch.equal(step(replace(method, capacity=N + 1)), step(FullCache()))


def test_capacity_of_exactly_the_prompt_keeps_all(step):
    """At capacity n SnapKV goes through its vote and keeps everybody; at n - 1 somebody is missing."""
    full = step(FullCache())
    torch.testing.assert_close(step(SnapKV(capacity=N, window=8)), full, atol=1e-4, rtol=1e-4)
    assert (step(SnapKV(capacity=N - 1, window=8)) - full).abs().max() > 1e-4


def test_votes_add_up(whole):
    """Votes for the context are what each voter did not spend on the window."""
    method = SnapKV(capacity=40, window=8)
    weights = window_attention(whole.queries[1][-8:], whole.keys[1])
    spent = weights[..., -8:].sum(dim=(1, 2))
    torch.testing.assert_close(method.votes(whole, 1).sum(dim=-1), 8 - spent, atol=1e-5, rtol=1e-5)


def test_voters_see_the_past_only(whole):
    """Attention of the window is causal, and sums to one."""
    weights = window_attention(whole.queries[0][-8:], whole.keys[0])
    assert (weights[:, 0, -7:] == 0).all()
    assert (weights[:, -1] > 0).all()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(4, 8))


def test_an_attended_needle_is_kept(whole):
    """A key that all voters point at stays, and with pooling its neighbours do."""
    needle, keys = 77, whole.keys[2].clone()
    keys[:, needle] *= 4 / keys[:, needle].norm(dim=-1, keepdim=True) * keys.norm(dim=-1).max()
    queries = keys[:, needle].repeat_interleave(2, dim=0)
    pointed = replace(whole, keys=(keys,) * 4, queries=tuple(queries.expand(32, -1, -1) for _ in range(4)))
    alone = SnapKV(capacity=24, window=16, kernel=1).keep(pointed, 2)
    assert (alone == needle).any(dim=-1).all()
    with_neighbours = SnapKV(capacity=24, window=16, kernel=5).keep(pointed, 2)
    for place in range(needle - 2, needle + 3):
        assert (with_neighbours == place).any(dim=-1).all()


def test_sinks_and_oracle_keep_what_they_name(whole):
    """The first tokens stay with sinks; an oracle keeps its evidence before anything else."""
    assert RecentTokens(capacity=40, sinks=4).keep(whole, 0)[0, :4].tolist() == [0, 1, 2, 3]
    assert Oracle(capacity=3, evidence=(60, 61, 62)).keep(whole, 0)[0].tolist() == [60, 61, 62]


def test_random_tokens_depend_on_the_seed_alone(whole):
    """The same seed keeps the same tokens, another layer and another seed keep others."""
    keep = RandomTokens(capacity=40, recent=8).keep
    assert torch.equal(keep(whole, 0), keep(whole, 0))
    assert not torch.equal(keep(whole, 0), keep(whole, 1))
    assert not torch.equal(keep(whole, 0), RandomTokens(capacity=40, recent=8, seed=1).keep(whole, 0))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"window": 0}, "SnapKV.window is 0; at least 1 and less than capacity, 40, is needed"),
        ({"window": 40}, "SnapKV.window is 40; at least 1 and less than capacity, 40, is needed"),
        ({"kernel": 4}, "SnapKV.kernel is 4; a positive odd number is needed"),
    ],
)
def test_settings_that_select_nothing_are_refused_by_name(changes, says):
    """The window is a part of what is kept, and a kernel has a middle."""
    SnapKV(capacity=40, window=8)
    with pytest.raises(ValueError, match=says):
        SnapKV(capacity=40, **{"window": 8, **changes})
