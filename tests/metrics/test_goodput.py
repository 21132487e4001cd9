"""The goodput search against oracles whose answer is known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.metrics import highest_passing

LOADS = st.floats(1e-3, 1e3)


@given(limit=LOADS, low=LOADS, factor=st.floats(1.01, 1e4), tolerance=st.floats(1e-3, 0.5))
def test_a_monotone_oracle_is_found_to_the_tolerance(limit, low, factor, tolerance):
    """Where everything up to a limit passes, the answer passes and the limit is within the tolerance above it."""
    high = low * factor
    found = highest_passing(lambda load: load <= limit, low, high, relative_tolerance=tolerance)
    if limit < low:
        assert found is None
    elif limit >= high:
        assert found == high
    else:
        assert found is not None
        assert low <= found <= limit < found * (1 + tolerance)


@given(limit=LOADS, low=LOADS, factor=st.floats(1.01, 1e4))
def test_the_search_is_logarithmic(limit, low, factor):
    """Each look halves the logarithm of what is left: two looks at the ends, the rest by that law."""
    looks: list[float] = []
    highest_passing(lambda load: looks.append(load) or load <= limit, low, low * factor, relative_tolerance=0.05)
    assert len(looks) <= 2 + max(0, math.ceil(math.log2(math.log(factor) / math.log(1.05))) + 1)
    assert len(set(looks)) == len(looks)


@given(answers=st.lists(st.booleans(), min_size=40, max_size=40))
def test_an_oracle_that_changes_its_mind_still_gets_a_load_that_passed(answers):
    """However unruly the simulation, the answer passed, and one not farther above than the tolerance did not."""
    said: dict[float, bool] = {}

    def passes(load: float) -> bool:
        return said.setdefault(load, answers[len(said)])

    found = highest_passing(passes, 1.0, 100.0, relative_tolerance=0.1)
    if found is None:
        assert said == {1.0: False}
        return
    assert said[found]
    assert found == 100.0 or any(found < load <= found * 1.1 * (1 + 1e-9) and not said[load] for load in said)


@pytest.mark.parametrize(
    ("low", "high", "tolerance", "named"),
    [(0.0, 1.0, 0.1, "0.0"), (2.0, 1.0, 0.1, "2.0"), (1.0, math.inf, 0.1, "inf"), (1.0, 2.0, 0.0, "tolerance")],
)
def test_bounds_that_are_none_are_refused(low, high, tolerance, named):
    """Bounds must be positive and rising, the tolerance positive; the error names what is wrong."""
    with pytest.raises(ValueError, match=named):
        highest_passing(lambda _: True, low, high, relative_tolerance=tolerance)
