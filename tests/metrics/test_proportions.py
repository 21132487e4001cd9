"""Wilson's interval of a share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.metrics.averages import wilson


@given(trials=st.integers(1, 5000), share=st.floats(0, 1))
def test_interval_holds_the_share_within_zero_and_one(trials, share):
    """The interval contains what was seen and stays a share."""
    successes = round(share * trials)
    low, high = wilson(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1


def test_published_values():
    """Newcombe (1998), Table I: 81 of 263, and none of 20."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_more_trials_are_surer():
    """The interval narrows as trials grow."""
    widths = [high - low for low, high in (wilson(n // 2, n) for n in (10, 100, 1000))]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 5)])
def test_no_share(successes, trials):
    """Counts that are no share are refused."""
    with pytest.raises(ValueError, match="is no share"):
        wilson(successes, trials)
