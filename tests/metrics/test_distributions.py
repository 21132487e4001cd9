"""Empirical CDFs, percentiles and histograms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.metrics import ecdf, equal_bins, histogram, percentile_table

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=80)


def test_an_ecdf_by_hand():
    """Of 3, 1, 3 and 7 a quarter is at most 1, three quarters at most 3, all at most 7."""
    table = ecdf([3, 1, 3, 7])
    assert list(table["x"]) == [1, 3, 7]
    assert list(table["share"]) == [0.25, 0.75, 1.0]


@given(VALUES)
def test_an_ecdf_climbs_to_one(values):
    """An ECDF has ascending x, ascending shares above zero, and ends at exactly one."""
    table = ecdf(values)
    assert (np.diff(table["x"]) > 0).all()
    assert (np.diff(table["share"]) > 0).all()
    assert table["share"].iloc[0] > 0
    assert table["share"].iloc[-1] == 1


@given(VALUES, st.randoms(use_true_random=False))
def test_order_does_not_matter(values, random):
    """ECDF and percentiles are those of any permutation of the values."""
    shuffled = random.sample(values, len(values))
    assert ecdf(values).equals(ecdf(shuffled))
    first, second = percentile_table({"a": values}), percentile_table({"a": shuffled})
    assert np.allclose(first.to_numpy(), second.to_numpy())


@given(VALUES)
def test_percentiles_lie_between_the_extremes(values):
    """Minimum <= p50 <= p90 <= p99 <= maximum, and p0 and p100 are the extremes."""
    row = percentile_table({"a": values}, (0, 50, 90, 99, 100)).loc["a"]
    assert row["p0"] == min(values)
    assert row["p100"] == row["max"] == max(values)
    assert row["p0"] <= row["p50"] <= row["p90"] <= row["p99"] <= row["p100"]


@pytest.mark.parametrize("values", [[], [1.0, float("nan")]])
def test_a_distribution_needs_numbers(values):
    """No value, or one that is not a number, is refused instead of shrinking the sample."""
    with pytest.raises(ValueError, match="not numbers"):
        ecdf(values)


@given(VALUES, st.floats(-1e6, 1e6), st.floats(0.1, 1e5), st.integers(2, 40))
def test_a_histogram_loses_no_value(values, start, width, bins):
    """Counts inside, below and above add up to the number of values."""
    found = histogram(values, equal_bins(start + width * np.arange(bins)))
    assert found.counts.sum() + found.below + found.above == len(values)


def test_bins_of_a_figure_are_made_from_left_edges():
    """Three left edges give three equal bins, also where the edges were rounded when read."""
    assert equal_bins([0.0, 10.1, 20.0]) == pytest.approx([0, 10, 20, 30])


@pytest.mark.parametrize("edges", [[1.0], [0.0, 1.0, 5.0], [3.0, 2.0, 1.0]])
def test_uneven_edges_are_refused(edges):
    """A single edge, uneven edges and descending edges give no equal bins."""
    with pytest.raises(ValueError, match="edges"):
        equal_bins(edges)
