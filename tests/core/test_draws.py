"""Draws keyed by names."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.core import keyed_uniform

NAMES = st.lists(st.one_of(st.integers(), st.text(max_size=5), st.binary(max_size=5)), max_size=4)


class TestKeyedUniform:
    @given(st.integers(), NAMES)
    def test_is_a_function_into_the_unit_interval(self, seed, names):
        """The same seed and names give the same number, from 0 up to but not 1."""
        draw = keyed_uniform(seed, *names)
        assert draw == keyed_uniform(seed, *names)
        assert 0 <= draw < 1

    def test_is_uniform(self):
        """Over many ids each tenth of the interval gets its tenth (chi-squared, 9 degrees, p = 0.001)."""
        draws = np.array([keyed_uniform(7, i) for i in range(20_000)])
        counts = np.histogram(draws, bins=10, range=(0, 1))[0]
        assert ((counts - 2000) ** 2 / 2000).sum() < 27.9
