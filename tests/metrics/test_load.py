"""Load, waste and how two series move together, on logs and series whose answer is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.core import SLO, Arrived, DecodeStretch, Placed, Prefilled, Rejected
from mooncake_lab.metrics import (
    decode_load_series,
    lagged_correlation,
    period_s,
    prefill_load_series,
    swing,
    wasted_prefill_gpu_s,
)

LIMITS = SLO(ttft_s=10.0, tbt_s=0.1)
LOG = [
    Arrived(at_s=0.0, request_id=1, input_tokens=10),
    Placed(at_s=0.0, request_id=1, prefill_instance="p0", decode_instance="d0", reused_tokens=0),
    Arrived(at_s=1.0, request_id=2, input_tokens=10),
    Placed(at_s=1.0, request_id=2, prefill_instance="p0", decode_instance="d0", reused_tokens=0),
    Prefilled(at_s=2.0, request_id=1, instance="p0", start_s=0.0, computed_tokens=10, reused_tokens=0),
    Prefilled(at_s=5.0, request_id=2, instance="p0", start_s=2.0, computed_tokens=10, reused_tokens=0),
    Rejected(at_s=5.0, request_id=2, stage="decode", reason="full"),
    DecodeStretch(
        at_s=4.0, instance="d0", start_s=2.0, steps=40, first_step_s=0.05, step_growth_s=0.0, request_ids=(1,)
    ),
]


def test_prefill_load_is_the_largest_ttft_waiting():
    """Request 1 sees its token after 2 s and request 2 after 4 s; of two instances one is idle."""
    load = prefill_load_series(LOG, np.array([0.5, 1.5, 4.0, 6.0]), 2, LIMITS)
    np.testing.assert_allclose(load, [0.1, 0.2, 0.2, 0.0])


def test_decode_load_is_the_step_over_its_limit():
    """Half of the limit while it decodes, nothing before and after, averaged over the pool."""
    load = decode_load_series(LOG, np.array([1.0, 3.0, 4.5]), 2, LIMITS)
    np.testing.assert_allclose(load, [0.0, 0.25, 0.0])


STRETCHES = st.builds(
    lambda start_s, steps, first_s, growth_s: DecodeStretch(
        at_s=start_s + steps * first_s + steps * (steps - 1) / 2 * growth_s, instance="d", start_s=start_s,
        steps=steps, first_step_s=first_s, step_growth_s=growth_s, request_ids=(1,),
    ),
    st.floats(0, 50), st.integers(1, 30), st.floats(0.01, 1), st.floats(0, 0.1),
)  # fmt: skip


@given(STRETCHES, st.floats(0, 0.99))
def test_a_step_under_way_lasts_as_long_as_its_share_of_the_stretch_says(stretch, share):
    """From the first step at the beginning to a growth beyond the last at the end, wherever the stretch lies."""
    at_s = np.array([stretch.start_s + share * (stretch.at_s - stretch.start_s) + 1e-9])
    (load,) = decode_load_series([stretch], at_s, 2, LIMITS)
    step_s = stretch.first_step_s + share * stretch.steps * stretch.step_growth_s
    assert load == pytest.approx(step_s / 0.1 / 2, rel=1e-5)


def test_waste_is_prefill_of_the_refused():
    """Three seconds were spent on request 2, which was refused after them."""
    assert wasted_prefill_gpu_s(LOG) == 3.0
    assert wasted_prefill_gpu_s(LOG[:6]) == 0.0


@given(st.integers(0, 12))
def test_the_lag_of_the_peak_is_the_lag(lag):
    """A series and its delayed copy correlate best at the delay, perfectly."""
    noise = np.random.default_rng(0).normal(size=300)
    together = lagged_correlation(noise[lag:], noise[: len(noise) - lag], 15)
    assert together.argmax() == lag
    assert together[lag] == pytest.approx(1.0)


def test_what_has_no_correlation_is_refused():
    """Too short, unequal, or constant series are errors, not numbers."""
    with pytest.raises(ValueError, match="equal lengths from 13"):
        lagged_correlation(np.arange(5.0), np.arange(5.0), 10)
    with pytest.raises(ValueError, match="one of the series is constant"):
        lagged_correlation(np.ones(20), np.arange(20.0), 2)


@given(st.sampled_from([20.0, 25.0, 40.0, 50.0]), st.floats(0.05, 0.4), st.floats(-1, 1))
def test_period_and_swing_of_a_sine(period, amplitude, trend):
    """The period comes back, beside a trend as well, and the swing is nearly twice the amplitude."""
    at_s = np.arange(0.0, 400.0, 2.0)
    load = 0.5 + amplitude * np.sin(2 * np.pi * at_s / period)
    assert period_s(load + trend * at_s, 2.0) == pytest.approx(period, rel=0.05)
    assert 1.7 * amplitude < swing(load) <= 2 * amplitude + 1e-9


def test_a_period_needs_samples():
    """Eight at least."""
    with pytest.raises(ValueError, match="at least 8"):
        period_s(np.arange(5.0), 1.0)
