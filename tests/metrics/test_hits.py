"""Hit rates by three weightings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.metrics import block_hit_rate, covered_tokens, request_hit_rate, token_hit_rate

REQUESTS = st.lists(
    st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=1, max_size=40
)


def test_three_weightings_of_the_same_run():
    """One block of one, and none of three: a quarter of blocks, half of the mean request."""
    assert block_hit_rate([1, 0], [1, 3]) == 0.25
    assert request_hit_rate([1, 0], [1, 3]) == 0.5
    assert token_hit_rate([100, 0], [100, 1500]) == pytest.approx(1 / 16)


def test_hit_blocks_cover_at_most_the_prompt():
    """Three hit blocks of 512 tokens cover a prompt of 1100 tokens, not 1536; one covers 512."""
    assert list(covered_tokens([3, 1], [1100, 1100], 512)) == [1100, 512]


@given(REQUESTS)
def test_hit_rates_are_shares(requests):
    """Every weighting lies between zero and one, and between the worst and the best request."""
    hits, asked = np.array(requests).T
    for rate in (block_hit_rate(hits, asked), request_hit_rate(hits, asked)):
        assert (hits / asked).min() - 1e-12 <= rate <= (hits / asked).max() + 1e-12


@given(REQUESTS)
def test_equal_requests_make_the_weightings_agree(requests):
    """When every request asks for the same, weighting by block and by request coincide."""
    hits = np.minimum([hit for hit, _ in requests], 50)
    asked = np.full(len(requests), 50)
    assert block_hit_rate(hits, asked) == pytest.approx(request_hit_rate(hits, asked))


@pytest.mark.parametrize(
    ("hits", "asked"), [([2], [1]), ([-1], [1]), ([1, 1], [1]), ([], []), ([0], [0])], ids=str
)
def test_impossible_counts_are_refused(hits, asked):
    """More hits than requests, negative hits, unequal shapes and nothing asked for are errors."""
    with pytest.raises(ValueError, match="ask"):
        block_hit_rate(hits, asked)


def test_an_empty_request_has_no_share():
    """The mean over requests is undefined when one asked for nothing."""
    with pytest.raises(ValueError, match="1 requests asked for nothing"):
        request_hit_rate([0, 1], [0, 2])
