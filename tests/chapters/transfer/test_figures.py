"""Figures of transfer: the paper's points are diamonds, all of them, and ours are where the tables say."""

import numpy as np
import pandas as pd
import pytest

from mooncake_lab.chapters.transfer import experiment as transfer_modelled
from mooncake_lab.chapters.transfer import figures as draw
from mooncake_lab.paper import curve
from mooncake_lab.testbeds import nodes as paper_node


@pytest.fixture(scope="module")
def node():
    return paper_node.calibrate_paper_node()


def diamonds(axes):
    """The y of all markers that stand for the paper."""
    lines = [line for line in axes.lines if line.get_marker() == "D"]
    return sorted(float(y) for line in lines for y in line.get_ydata())


def test_storing_draws_every_bar_and_the_longest_prompt(node):
    """Ten diamonds; two circles for each medium and operation of the longest prompt."""
    measured = pd.DataFrame(
        {
            "medium": ["dram", "dram", "dram"], "operation": ["load", "load", "store"], "tokens": [1, 2, 2],
            "serialized_extra_ms": [9.0, 3.0, 4.0], "layerwise_extra_ms": [9.0, 1.0, 2.0],
        }
    )  # fmt: skip
    figure = draw.storing(transfer_modelled.store_latency(node).table, measured, "somewhere")
    assert diamonds(figure.axes[0]) == sorted(curve(transfer_modelled.STORING)["y"])
    circles = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in circles] == [[3, 4], [1, 2]]


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
