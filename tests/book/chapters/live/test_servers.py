"""The record of calibrated servers: its errors against the bars, and their figure."""

import numpy as np
import pytest

from mooncake_lab.book.chapters.live import figures as draw
from mooncake_lab.book.chapters.live import servers


def report(server, error, repetition=0.02, shares=(0.3, 1.1)):
    """A report of `mooncake-lab calibrate`, all of whose predictions are off by `error`."""
    rows = [
        {"quantity": quantity, "unit": "s", "statistic": statistic, "real": 0.1, "simulated": 0.1 * (1 + error)}
        | {"error": error, "low": error - 0.01, "high": error + 0.01, "repetition": repetition, "requests": 200}
        for quantity in ("TTFT", "TBT", "E2E")
        for statistic in ("mean", "median", "P90")
    ]
    rates = [{"share": share, "errors": rows} for share in shares]
    made = {"machine": {"processor": "a processor"}, "date": "2026-11-28", "load_average": [0.5, 0.4, 0.3]}
    return {
        "server": server,
        "trace_file": "conversation_trace.jsonl",
        "commit": f"{server}1",
        "rates": rates,
    } | made


@pytest.fixture
def measured():
    """One server that is predicted well, one that is not."""
    return {"calibrations": [report("good", 0.05), report("bad", -0.15)]}


def test_an_error_within_the_bar_and_the_repetition_is_near(measured):
    """A mean may be off by 10 % and a P90 by 20 %, each in addition to the server's own repetition."""
    rows = servers.errors(measured)
    bad = rows[rows["server"] == "bad"].groupby("statistic")["is_near"].all()
    assert rows[rows["server"] == "good"]["is_near"].all()
    assert bad.to_dict() == {"P90": True, "mean": False, "median": False}
    assert set(rows["trace"]) == {"conversation"}


def test_the_table_counts_below_saturation(measured):
    """At 1.1 of saturation queues grow for ever, so those rows are not in the table."""
    table = servers.trusted(servers.errors(measured)).set_index(["server", "quantity"])
    assert table.loc[("good", "TTFT"), ["near", "of"]].tolist() == [3, 3]
    assert table.loc[("bad", "TTFT"), ["near", "of"]].tolist() == [1, 3]
    assert table.loc[("bad", "TBT"), "largest (%)"] == pytest.approx(15.0)


def test_the_scatter_has_a_column_for_each_server(measured):
    """Points of a prediction that is 5 % too long lie 5 % above the line; hollow ones are above saturation."""
    figure = draw.servers(servers.errors(measured), {"good": "Good", "bad": "Bad"}, servers.source_of(measured))
    assert [axes.get_title("left") for axes in figure.axes[:2]] == ["Good", "Bad"]
    points = [line for line in figure.axes[0].lines if line.get_marker() not in ("", "None")]
    assert {line.get_markerfacecolor() for line in points} > {"none"}
    for line in points:
        np.testing.assert_allclose(line.get_ydata(), 1.05 * np.asarray(line.get_xdata()))
    assert "commit good1, bad1" in figure.get_supxlabel()  # each report names the commit that measured it
