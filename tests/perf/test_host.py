"""The host's share of a decode step."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.perf import DecodeLatency, HybridLatency

SMALL = st.floats(0, 0.01)
BATCH = st.integers(1, 64)
CONTEXT = st.integers(0, 10**6)


@given(batch=BATCH, context=CONTEXT, host_s=SMALL, free=st.floats(0, 10), steps=st.integers(1, 200))
def test_a_stretch_is_the_sum_of_its_steps(batch, context, host_s, free, steps):
    """The closed form of a stretch holds with a host, whose share does not change while the batch does not."""
    latency = DecodeLatency(0.02, 2e-4, 3e-8, host_s, free)
    summed = sum(latency.step_s(batch, context + k * batch) for k in range(steps))
    assert latency.stretch_s(batch, context, steps) == pytest.approx(summed)


@given(batch=BATCH, context=CONTEXT, host_s=SMALL, free=st.floats(0, 10))
def test_the_host_costs_nothing_up_to_its_free_requests_and_its_rate_beyond(batch, context, host_s, free):
    """The share is zero up to `host_free`, then linear; decode and hybrid steps agree on it."""
    alone, served = DecodeLatency(0.02, 2e-4, 3e-8), DecodeLatency(0.02, 2e-4, 3e-8, host_s, free)
    share = served.step_s(batch, context) - alone.step_s(batch, context)
    assert share == pytest.approx(host_s * max(0.0, batch - free), abs=1e-12)
    mixed = HybridLatency(
        floor_s=0.02,
        per_token_s=1e-4,
        per_token_squared_s=1e-9,
        per_context_token_s=3e-8,
        host_s=host_s,
        host_free=free,
    )
    without = dataclasses.replace(mixed, host_s=0.0)
    assert mixed.step_s(512, 0, batch, context) - without.step_s(512, 0, batch, context) == pytest.approx(
        share, abs=1e-9
    )


def test_batches_may_be_arrays():
    """Counts broadcast, as everywhere in the latency models."""
    latency = DecodeLatency(0.02, 0.0, 0.0, 0.004, 1.5)
    np.testing.assert_allclose(latency.step_s(np.array([1.0, 2.0, 4.0]), 0), [0.02, 0.022, 0.03])


@pytest.mark.parametrize(("host_s", "free"), [(-1e-3, 0.0), (math.nan, 0.0), (1e-3, -1.0)])
def test_a_host_that_gives_time_back_is_refused(host_s, free):
    """Neither the cost nor the number of free requests may be negative."""
    with pytest.raises(ValueError, match="host"):
        DecodeLatency(0.02, 0.0, 0.0, host_s, free)
