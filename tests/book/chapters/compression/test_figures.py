"""Figures of compression: every method has its mark, intervals are drawn, footers name the source."""

import pandas as pd
import pytest

from mooncake_lab.book.chapters.compression import experiment as topic
from mooncake_lab.book.chapters.compression import figures as draw
from mooncake_lab.book.experiments import run, vary


@pytest.fixture(scope="module")
def table():
    few = topic.Exam(model="random:lab-recall", length=128, prompts=1, methods=("full", "snapkv", "kcache"))
    return topic.accuracy(run(vary(few, task=("recall", "needle")), cache=False))


def test_accuracy_has_a_column_a_task_and_a_row_a_family(table):
    """Two tasks by the families of the two methods; each panel has its method and the full cache behind it."""
    figure = draw.accuracy(table, "measured: here")
    assert len(figure.axes) == 4
    full = table[(table["method"] == "full") & (table["task"] == "recall")]["accuracy"].iloc[0]
    assert list(figure.axes[0].lines[0].get_ydata()) == [full, full]
    for axes, method in zip(figure.axes[::2], ("snapkv", "kcache"), strict=True):
        (drawn,) = axes.containers
        assert len(drawn.lines[0].get_xdata()) == len(
            table[(table["method"] == method) & (table["task"] == "recall")]
        )
    assert figure.get_supxlabel().endswith("measured: here")


def test_breaking_draws_the_row_nearest_to_the_share(table):
    """A bar a method, as high as the accuracy at the nearest size."""
    figure = draw.breaking(table, {"plain": ("recall", "asked"), "needle": ("needle", "asked")}, 0.25, "x")
    assert [len(axes.patches) for axes in figure.axes] == [3, 3]


def test_decode_stacks_host_on_device():
    """Device bytes are solid bars, host bytes hatched ones after them."""
    rows = pd.DataFrame(
        [
            {"method": "full", "step_s": 0.02, "device_bytes": 2e6, "host_bytes": 0},
            {"method": "kcache", "step_s": 0.03, "device_bytes": 1e6, "host_bytes": 1e6},
        ]
    )
    figure = draw.decode(rows, "x")
    assert [patch.get_width() for patch in figure.axes[0].patches] == pytest.approx([20, 30])
    assert [patch.get_width() for patch in figure.axes[1].patches] == pytest.approx([2, 1, 0, 1])
