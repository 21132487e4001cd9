"""Hit rates are shares of what was asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.metrics import covered_tokens, token_hit_rate

REQUESTS = st.lists(
    st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=1, max_size=40
)


def test_hit_blocks_cover_at_most_the_prompt():
    """Three hit blocks of 512 tokens cover a prompt of 1100 tokens, not 1536; one covers 512."""
    assert list(covered_tokens([3, 1], [1100, 1100], 512)) == [1100, 512]


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
