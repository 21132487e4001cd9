"""The figures of the chapter on the store draw what they are given, and the paper beside it."""

import numpy as np
import pandas as pd
import pytest

from mooncake_lab.chapters.store import claims as beside
from mooncake_lab.chapters.store import experiment as store
from mooncake_lab.chapters.store import figures as draw
from mooncake_lab.experiments import run, vary
from mooncake_lab.figures.style import COLOURS
from mooncake_lab.paper import curve
from mooncake_lab.store import EVICTION_POLICIES

FIRST = 300


def diamonds(axes) -> int:
    """How many points of a paper are drawn."""
    return sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "D")


@pytest.fixture(scope="module")
def policies() -> pd.DataFrame:
    """Two workloads, the three policies of Table 1."""
    return run(
        vary(
            store.PolicyHitRates(first=FIRST),
            workload=("toolagent", "conversation"),
            policy=tuple(beside.ARXIV_TABLE_1.values()),
            capacity_blocks=beside.capacities_of_table_1(),
        ),
        cache=False,
    )


def test_key_chains_colours_what_is_shared():
    """Shared blocks have another colour than the rest; every block is a box with its key."""
    table = store.key_table({"a": np.arange(8, dtype=np.int32), "b": np.arange(6, dtype=np.int32)}, 4)
    figure = draw.key_chains(table)
    (axes,) = figure.axes
    colours = [patch.get_facecolor() for patch in axes.patches]
    assert len(colours) == 4
    assert len(set(colours)) == 2
    assert colours[0] == colours[2] != colours[1]
    assert table["key"][0] in "".join(text.get_text() for text in axes.texts)


def test_table_1_draws_every_printed_number(policies):
    """Three lines a panel, and all of arXiv Table 1 as diamonds in the first."""
    paper = curve("arxiv_table1_cache_policies")
    figure = draw.table_1(policies, paper, beside.ARXIV_TABLE_1)
    left, right = figure.axes
    assert (diamonds(left), diamonds(right)) == (len(paper), 0)
    assert len(right.lines) == len(beside.ARXIV_TABLE_1)
    assert [label.get_text() for label in left.get_xticklabels()][-1] == "unlimited"


def test_capacity_draws_every_point_of_the_paper():
    """One line a workload, all points of FAST'25 Fig. 9, and the dashed line of one node."""
    workloads = tuple(beside.FAST_FIG_9.values())
    capacities = beside.capacities_of_fig_9()
    table = run(
        vary(store.CapacityHitRates(first=FIRST), workload=workloads, capacity_tokens=capacities), cache=False
    )
    figure = draw.capacity(beside.beside_fig_9(table), beside.NODE_TOKENS)
    (axes,) = figure.axes
    assert diamonds(axes) == len(curve("fast_fig09_hit_rate_vs_capacity"))
    assert {COLOURS[name] for name in workloads} <= {line.get_color() for line in axes.lines}
    assert "3M tokens" in "".join(text.get_text() for text in axes.texts)
    assert "merged" not in figure._supxlabel.get_text()


def test_optimum_draws_a_bar_a_policy():
    """One panel a workload and capacity, seven bars, and no bar beyond the line by more than prefix hits allow."""
    rates = run(
        vary(
            store.PolicyHitRates(first=FIRST),
            workload=("conversation", "synthetic"),
            policy=tuple(EVICTION_POLICIES),
            capacity_blocks=(100, 1000),
        ),
        cache=False,
    )
    figure = draw.optimum(rates)
    assert len(figure.axes) == 4
    for axes in figure.axes:
        assert len(axes.patches) == len(EVICTION_POLICIES) - 1
        (line,) = axes.lines
        assert line.get_xdata()[0] <= axes.get_xlim()[1]


def test_live_draws_both_workloads():
    """Seen and live on the left, LRU and the optimum's capacity on the right, for each workload."""
    both = ("conversation", "synthetic")
    blocks = run(vary(store.LiveBlocks(first=FIRST), workload=both), cache=False)
    needs = run(vary(store.LRUNeeds(first=FIRST), workload=both), cache=False)
    left, right = draw.live(blocks, needs).axes
    assert len(left.lines) == len(right.lines) == 4
    assert "replayed: " in draw.live(blocks, needs)._supxlabel.get_text()
