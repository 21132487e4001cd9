"""Figures of transfer: the paper's points are diamonds, all of them, and ours are where the tables say."""

import numpy as np
import pandas as pd
import pytest

from mooncake_lab.book.chapters.transfer import experiment as transfer_modelled
from mooncake_lab.book.chapters.transfer import figures as draw
from mooncake_lab.book.paper import curve
from mooncake_lab.book.testbeds import fit_nodes as paper_node


@pytest.fixture(scope="module")
def node():
    return paper_node.calibrate_paper_node()


def diamonds(axes):
    """The y of all markers that stand for the paper."""
    lines = [line for line in axes.lines if line.get_marker() == "D"]
    return sorted(float(y) for line in lines for y in line.get_ydata())


def test_storing_draws_every_bar_and_every_place_of_a_prefix(node):
    """Ten diamonds; for each place two filled circles, the range of the second turn, and a hollow circle."""
    second = pd.DataFrame(
        {
            "prefix_in": ["DRAM", "other worker"], "second_turn_ms": [3.0, 4.0], "least_ms": [2.0, 4.0],
            "most_ms": [9.0, 5.0], "recomputed_ms": [20.0, 21.0], "predicted_ms": [3.5, 2.5],
        }
    )  # fmt: skip
    figure = draw.storing(transfer_modelled.store_latency(node).table, second, 64, "somewhere")
    assert diamonds(figure.axes[0]) == sorted(curve(transfer_modelled.STORING)["y"])
    right = figure.axes[1]
    circles = [line for line in right.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in circles] == [[20, 21], [3, 4], [3.5, 2.5]]
    assert [line.get_markerfacecolor() == "white" for line in circles] == [False, False, True]
    assert [sorted(path.vertices[:, 1]) for path in right.collections[0].get_paths()] == [[2, 9], [4, 5]]


def test_ways_draws_both_networks_of_the_paper():
    """Every point of Figure 12 is a diamond in one of two panels."""
    measured = pd.DataFrame(
        {
            "way": ["socket"] * 2,
            "megabytes": [1.0, 4.0],
            "seconds": [1.0, 2.0],
            "least_s": [0.5, 1.0],
            "most_s": [2, 3],
        }
    )
    paper = curve(transfer_modelled.ENGINES)
    figure = draw.ways(measured, paper, "somewhere")
    assert sorted(diamonds(figure.axes[0]) + diamonds(figure.axes[1])) == sorted(paper["y"])
    assert diamonds(figure.axes[2]) == []


def test_demand_draws_ours_and_theirs():
    """Seven points and the line of recomputation on the left, both transfer times on the right."""
    rows = pd.DataFrame(
        {
            "gbps": [24.0, 400.0, 24.0, 400.0, 400.0], "streams_layers": [True, True, False, False, True],
            "reuses": [True, True, True, True, False], "mean_ttft_s": [4.0, 1.0, 5.0, 1.5, 2.5],
            "exposed_s": 0.1, "alone_s": 0.2, "source": "a trace", "requests": 9,
        }
    )  # fmt: skip
    figure = draw.demand(rows, curve(transfer_modelled.DEMAND), 2.0)
    left, right = figure.axes
    assert len(diamonds(left)) == 8
    assert len(diamonds(right)) == 14
    assert "a trace, 9 requests" in figure.get_supxlabel()


def test_breakdown_stacks_to_the_total(node):
    """Each bar is as high as its parts, and the top diamond as the paper's."""
    slices = transfer_modelled.breakdown(node)
    figure = draw.breakdown(slices)
    for axes, (_, rows) in zip(figure.axes, slices.groupby("reused_percent"), strict=True):
        tops = [patch.get_y() + patch.get_height() for patch in axes.patches][-5:]
        assert np.allclose(tops, rows.groupby("tokens")["model_s"].sum())
        assert max(diamonds(axes)) == pytest.approx(rows.groupby("tokens")["paper_s"].sum().max())
