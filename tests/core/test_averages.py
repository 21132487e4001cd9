"""Means, percentiles and intervals of shares without numpy."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_lab.core.averages import wilson
from mooncake_lab.metrics import mean, percentile

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=80)


@example([0.7, 4.6], 50)  # half way, the two forms round differently
@given(VALUES, st.sampled_from([0, 10, 50, 90, 99, 100]) | st.floats(0, 100))
def test_percentiles_have_the_bits_of_numpy(values, percent):
    """The interpolation between neighbours rounds as numpy's does."""
    assert percentile(sorted(values), percent) == float(np.percentile(values, percent))


@given(VALUES, st.randoms(use_true_random=False))
def test_a_mean_does_not_depend_on_the_order(values, random):
    """Its bits are the same for any order of the values, and it is numpy's but for rounding."""
    assert mean(values) == mean(random.sample(values, len(values)))
    assert mean(values) == pytest.approx(float(np.mean(values)), rel=1e-9, abs=1e-6)


def test_averages_by_hand():
    """The 90th percentile of 0 to 4 lies 60 % of the way from 3 to 4; ten tenths are 1."""
    assert percentile([0.0, 1.0, 2.0, 3.0, 4.0], 90) == pytest.approx(3.6)
    assert mean([0.1] * 10) == 0.1
    assert mean([math.pi]) == percentile([math.pi], 50) == math.pi


def test_nothing_has_no_average():
    """No value, and a percent outside its range, are refused."""
    with pytest.raises(ValueError, match="mean of 0 values"):
        mean([])
    with pytest.raises(ValueError, match="percentile of 0 values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="the percent is 101"):
        percentile([1.0], 101)


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
