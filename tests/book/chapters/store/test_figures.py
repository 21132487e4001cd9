"""The figures of the chapter on the store draw what they are given, and the paper beside it."""

import pandas as pd
import pytest

from mooncake_lab.book.chapters.store import claims as beside
from mooncake_lab.book.chapters.store import experiment as store
from mooncake_lab.book.chapters.store import figures as draw
from mooncake_lab.book.chapters.store.gap import EvictionGap
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.figures.style import COLOURS
from mooncake_lab.book.paper import curve

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


def test_the_gap_has_a_bar_a_policy_and_the_optimum():
    """Bars go by their rates, with a mark of the other rule and the share of the gap; a line is the optimum."""
    base = EvictionGap(first=FIRST, capacity_blocks=200)
    rates = run(vary(base, workload=("conversation", "synthetic")), cache=False)
    figure = draw.gap(rates)
    for panel, workload in zip(figure.axes, ("conversation", "synthetic"), strict=True):
        ours = rates[rates["workload"] == workload].set_index("policy")
        widths = [bar.get_width() for bar in panel.patches]
        assert widths == sorted(widths)
        assert len(widths) == len(ours) - 2  # the two optima are no bars
        assert len(panel.lines[0].get_xdata()) == len(widths)
        assert set(panel.lines[1].get_xdata()) == {ours["hit_rate"]["optimum on prefixes"]}
        assert [text.get_text() for text in panel.texts if text.get_text().endswith(" %")].count("0 %") >= 1


def test_the_gap_of_traces_without_reuse_is_drawn():
    """Where nothing is found, there is no gap to close, and no share is written."""
    rates = run((EvictionGap(first=1),), cache=False)
    assert rates["gap_closed"].isna().all()
    (panel,) = draw.gap(rates).axes
    assert [text.get_text() for text in panel.texts if "%" in text.get_text()] == []
