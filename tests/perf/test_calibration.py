"""Calibration: a fit finds the model that made the data, never breaks physics, and reports its misses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.book.paper import constant, curve, fact
from mooncake_lab.perf import (
    DecodeLatency,
    LinkLatency,
    PrefillLatency,
    fit_decode,
    fit_link,
    fit_prefill,
    nonnegative_fit,
    per_request_cost_s,
)

LENGTHS = np.array([8192.0, 16384, 32768, 65536, 131072])


def bars(series):
    """The bars of Fig. 14 of one series, shortest prompt first."""
    table = curve("fast_fig14_latency_breakdown")
    return table[table.series == series].sort_values("x").y.to_numpy(float)


@settings(max_examples=30)
@given(st.floats(1e-3, 1), st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8), st.floats(1e-8, 1e-4))
def test_a_prefill_fit_recovers_the_coefficients_that_made_the_times(constant_s, linear, squared, load):
    """On exact data the known coefficients come back."""
    truth = PrefillLatency(
        constant_s=constant_s, per_token_s=linear, per_token_squared_s=squared, load_s_per_token=load
    )
    tokens = np.tile(LENGTHS, 2)
    reused = np.concatenate([np.zeros(5), np.floor(0.9 * LENGTHS)])
    found = fit_prefill(tokens, reused, truth.seconds(tokens, reused))
    assert found.max_relative_error < 1e-8
    assert found.model.per_token_s == pytest.approx(linear, rel=1e-4)
    assert found.model.per_token_squared_s == pytest.approx(squared, rel=1e-4)
    assert found.model.load_s_per_token == pytest.approx(load, rel=1e-3, abs=1e-10)


@settings(max_examples=30)
@given(st.floats(1e-3, 1), st.floats(1e-5, 1e-2), st.floats(1e-9, 1e-6))
def test_a_decode_fit_recovers_the_coefficients_that_made_the_times(constant_s, per_request, per_token):
    """On exact data the known coefficients come back."""
    truth = DecodeLatency(constant_s, per_request, per_token)
    batch = np.array([1.0, 1, 2, 4, 8, 8, 16])
    context = batch * np.array([128.0, 1024, 512, 256, 128, 1024, 512])
    found = fit_decode(batch, context, truth.step_s(batch, context))
    assert found.max_relative_error < 1e-8
    assert found.model.per_request_s == pytest.approx(per_request, rel=1e-6)


def test_a_link_fit_recovers_latency_and_bandwidth():
    """On exact data both come back; times that do not grow have no bandwidth."""
    size = np.array([1e6, 1e7, 1e8, 1e9])
    found = fit_link(size, LinkLatency(5e9, 1e-3).seconds(size)).model
    assert (found.bytes_per_s, found.latency_s) == pytest.approx((5e9, 1e-3), rel=1e-6)
    with pytest.raises(ValueError, match="do not grow"):
        fit_link(size, np.array([4.0, 3.0, 2.0, 1.0]))


@settings(max_examples=60)
@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=6))
def test_coefficients_are_never_negative_and_no_nonnegative_neighbour_is_better(times):
    """Whatever the data, the fit is feasible, and stepping any coefficient up or down does not improve it."""
    columns = np.stack([np.ones(6), np.arange(6.0), np.arange(6.0) ** 2], axis=1)
    measured = np.array(times)

    def miss(coefficients):
        return float(((columns @ coefficients / measured - 1) ** 2).sum())

    found = nonnegative_fit(columns, measured)
    assert (found >= 0).all()
    for index in range(3):
        for step in (-1e-3, 1e-3):
            moved = found.copy()
            moved[index] = max(0.0, moved[index] + step)
            assert miss(found) <= miss(moved) + 1e-9


def test_errors_are_reported_point_by_point():
    """Relative errors are (predicted - measured) / measured, in input order."""
    measured = np.array([1.0, 2.0, 2.0])
    found = fit_decode(np.ones(3), np.array([10.0, 20.0, 20.5]), measured)
    expected = (found.model.step_s(np.ones(3), np.array([10.0, 20.0, 20.5])) - measured) / measured
    assert found.relative_errors.tolist() == expected.tolist()
    assert found.max_relative_error == max(abs(expected))
    assert 0 < found.mean_relative_error <= found.max_relative_error


@pytest.mark.parametrize("times", [[1.0, 2.0], [1.0, 0.0, 2.0], [1.0, float("nan"), 2.0]])
def test_data_that_cannot_be_fitted_is_refused(times):
    """Too few points, a time of zero and a missing one are errors."""
    n = np.arange(1.0, len(times) + 1)
    with pytest.raises(ValueError, match=r"cannot fit|must be positive"):
        fit_prefill(n, np.zeros(len(times)), np.array(times))


def test_fig14_prefill_gives_the_recorded_constants():
    """Refitting the five bars without reuse gives the constants on record, within their error."""
    found = fit_prefill(LENGTHS, np.zeros(5), bars("prefix 0%/prefill"))
    assert found.model.per_token_s == pytest.approx(constant("prefill_fit_c1").value, rel=1e-3)
    assert found.model.per_token_squared_s == pytest.approx(constant("prefill_fit_c2").value, rel=1e-3)
    assert found.model.constant_s == pytest.approx(constant("prefill_fit_c0").value, rel=1e-2)
    assert found.max_relative_error == pytest.approx(constant("prefill_fit_max_rel_error").value, abs=5e-4)


def test_fig14_with_reuse_finds_the_host_link_of_table_1():
    """Nobody tells the fit of all ten bars about Table 1, yet its load term is the printed host link."""
    tokens, reused = np.tile(LENGTHS, 2), np.concatenate([np.zeros(5), np.floor(0.95 * LENGTHS)])
    found = fit_prefill(tokens, reused, np.concatenate([bars("prefix 0%/prefill"), bars("prefix 95%/prefill")]))
    assert found.max_relative_error == pytest.approx(constant("prefill_joint_max_rel_error").value, abs=1e-3)
    link_gb_per_s = constant("kv_bytes_per_token").value / found.model.load_s_per_token / 1e9
    assert link_gb_per_s == pytest.approx(fact("fast_table1_constants", x="B_h2d_GBps").value, rel=0.01)


def test_fig14_and_fig2_give_the_recorded_decode_constants():
    """Batch 1 from Fig. 14, the cost per request from arXiv Fig. 2: the combined model on record."""
    alone = fit_decode(np.ones(5), LENGTHS + 64, bars("prefix 0%/decode") / 128)
    assert alone.model.constant_s == pytest.approx(constant("decode_step_base").value, rel=1e-3)
    assert alone.model.per_context_token_s == pytest.approx(constant("decode_step_slope").value, rel=0.01)
    assert alone.max_relative_error == pytest.approx(constant("decode_step_max_rel_error").value, abs=5e-4)
    figure = curve("arxiv_fig02_prefill_decode")
    points = figure[figure.series == "decode latency"]
    found = per_request_cost_s(points.x.to_numpy(float), points.y.to_numpy(float), LENGTHS[0], alone.model).model
    assert found.constant_s == pytest.approx(constant("decode_combined_base").value, rel=0.01)
    assert found.per_request_s == pytest.approx(constant("decode_combined_per_request").value, rel=0.02)
    assert found.per_context_token_s == alone.model.per_context_token_s


def test_a_unit_cannot_be_found_without_batch_one():
    """Relative latencies need batch 1 to become seconds."""
    with pytest.raises(ValueError, match="one of them must be 1"):
        per_request_cost_s(np.array([2.0, 4.0]), np.ones(2), 100, DecodeLatency(1.0, 0.0, 0.0))
