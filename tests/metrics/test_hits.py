"""Hit rates are shares of what was asked for."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.core import CacheChanged, Moved, Prefilled
from mooncake_lab.metrics import covered_tokens, replicas_at, tier_hit_rates, token_hit_rate

REQUESTS = st.lists(
    st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=1, max_size=40
)


def test_hit_blocks_cover_at_most_the_prompt():
    """Three hit blocks of 512 tokens cover a prompt of 1100 tokens, not 1536; one covers 512."""
    assert list(covered_tokens([3, 1], [1100, 1100], 512)) == [1100, 512]
    with pytest.raises(ValueError, match="request 0 hit 4 of 3"):
        covered_tokens([4], [1100], 512)


@given(REQUESTS)
def test_a_hit_rate_is_a_share(requests):
    """It lies between the worst and the best request, and long requests weigh more."""
    hits, asked = np.array(requests).T
    rate = token_hit_rate(hits, asked)
    assert (hits / asked).min() - 1e-12 <= rate <= (hits / asked).max() + 1e-12
    assert rate == pytest.approx(hits.sum() / asked.sum())


@pytest.mark.parametrize(
    ("hits", "asked"), [([2], [1]), ([-1], [1]), ([1, 1], [1]), ([], []), ([0], [0])], ids=str
)
def test_impossible_counts_are_refused(hits, asked):
    """More hits than requests, negative hits, unequal shapes and nothing asked for are errors."""
    with pytest.raises(ValueError, match="ask"):
        token_hit_rate(hits, asked)


def test_the_impossible_request_is_named():
    """The error has the place of the request, its hits and what it asked for."""
    with pytest.raises(ValueError, match="request 1 hit 3 of 2"):
        token_hit_rate([1, 3], [1, 2])


def prefilled(request_id, reused, computed):
    return Prefilled(
        at_s=1.0, request_id=request_id, instance="p", start_s=0.0, computed_tokens=computed, reused_tokens=reused
    )


def moved(request_id, source, tokens):
    return Moved(at_s=1.0, request_id=request_id, source=source, destination="d", start_s=0.0, bytes=8 * tokens)


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=8))
def test_tiers_share_the_hits(requests):
    """Hits from SSD are what was read from there, at most what was reused; those from DRAM are the rest."""
    log, shares = [], Counter(dram=0, ssd=0)
    for request_id, (reused, computed, read) in enumerate(requests):
        log += [
            moved(request_id, "p/ssd", read),
            moved(request_id, "p", 99),
            prefilled(request_id, reused, computed),
        ]
        shares += Counter(ssd=min(read, reused), dram=reused - min(read, reused))
    tokens = sum(reused + computed for reused, computed, _ in requests)
    if not tokens:
        with pytest.raises(ValueError, match="without any prefill"):
            tier_hit_rates(log, 8)
        return
    assert tier_hit_rates(log, 8) == {tier: pytest.approx(shares[tier] / tokens) for tier in ("dram", "ssd")}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=8))
def test_replicas_are_counted_up_to_each_moment(changes):
    """At each moment a block has as many replicas as caches gained it and did not lose it until then."""
    log = [
        CacheChanged(at_s=at_s, instance="p", added=(block,) * gained, removed=(block,) * (not gained))
        for at_s, block, gained in sorted(changes)
    ]
    for at_s, held in replicas_at(log, range(-1, 7)):
        for block in range(3):
            past = [record for record in log if record.at_s <= at_s]
            assert held[block] == sum(r.added.count(block) - r.removed.count(block) for r in past)
