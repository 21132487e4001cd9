"""Means and percentiles without numpy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.metrics import mean, percentile

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=80)


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
