"""Figures of the live chapter, from two simulated logs that stand for a real one and a prediction."""

import pandas as pd
import pytest

from mooncake_lab.book.chapters.live import experiment as live
from mooncake_lab.book.chapters.live import figures as draw
from mooncake_lab.book.chapters.live.requests import causes, errors, side_by_side
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import Cluster


@pytest.fixture(scope="module")
def requests():
    """Eight requests at two loads, predicted by themselves."""
    prefill, decode = (
        PrefillLatency(constant_s=2e-3, per_token_s=1e-4, per_token_squared_s=1e-8),
        DecodeLatency(2e-3, 1e-5, 1e-7),
    )
    model = LatencyModel(
        name="for tests", shape=model_shape("lab-tiny"), prefill=prefill, decode=decode,
        hybrid=HybridLatency.of(prefill, decode), transfer=LinkLatency(1e9, 1e-4), dram=LinkLatency(1e9),
    )  # fmt: skip
    plan, tables = live.Study(requests=8), []
    for load, rate in (("light", 5.0), ("overloaded", 200.0)):
        log = Cluster(plan.spec(), model).run(plan.slice(1, rate))
        about = {"run": f"1P+1D, {load}", "cluster": "1P+1D", "placement": "default", "load": load}
        tables.append(side_by_side(log, log).assign(**about))
    return pd.concat(tables)


def test_measured_points_and_simulated_lines(requests):
    """Each panel has points and a line for each load; the footer says which is which."""
    figure = draw.distributions(requests, "a machine")
    assert len(figure.axes) == 2
    for axes in figure.axes:
        assert [line.get_marker() for line in axes.lines] == ["", "o"] * 2
    assert "points measured" in figure.get_supxlabel()
    assert "a machine" in figure.get_supxlabel()


def test_errors_have_a_row_for_each_run_and_intervals(requests):
    """A perfect prediction lies on the line at 0, in both panels."""
    table = errors(requests)
    figure = draw.errors(table, "a machine")
    for axes in figure.axes:
        drawn = [x for line in axes.lines if line.get_marker() in "so^" for x in line.get_xdata()]
        assert drawn == [0.0] * (3 * 2)
        assert len(axes.collections) == 3


def test_causes_are_stacked_to_ttft(requests):
    """The bars of a run end at its mean TTFT."""
    figure = draw.causes(causes(requests), "a machine")
    (axes,) = figure.axes
    ends = max(patch.get_x() + patch.get_width() for patch in axes.patches)
    assert ends == pytest.approx(requests.groupby("run")["real_ttft_s"].mean().max())
    assert len(axes.patches) == 2 * 3 * 2
