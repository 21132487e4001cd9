"""Figures of overload: what is ours, and what is the paper's."""

import pandas as pd
import pytest
from figure_laws import diamonds

from mooncake_lab.book.chapters.overload import claims as beside
from mooncake_lab.book.chapters.overload import figures as draw
from mooncake_lab.book.chapters.overload.experiment import TABLE_3


@pytest.fixture
def rows():
    """Three policies at two speeds, invented."""
    return pd.DataFrame(
        [
            {
                "policy": policy, "speed": speed, "seed": seed, "requests": 100, "rejected_late": 5 + seed,
                "rejected_share": 0.1 * speed, "wasted_prefill_s": 3.0, "source": "a test",
            }
            for policy in TABLE_3 for speed in (1.0, 2.0) for seed in (1, 2)
        ]
    )  # fmt: skip


def test_table_3_is_drawn_as_diamonds(rows):
    """Each policy has a bar in two parts and the paper's share as a diamond."""
    one = rows[(rows["speed"] == 1.0) & (rows["seed"] == 1)]
    printed = {policy: beside.rejected_percent(policy) for policy in TABLE_3}
    figure = draw.rejections({"here": one}, printed)
    (points,) = diamonds(figure)
    assert sorted(points.get_xdata()) == sorted(printed.values())
    ends = [patch.get_width() + patch.get_x() for patch in figure.axes[0].patches[len(TABLE_3) :]]
    assert ends == pytest.approx([10.0, 10.0, 10.0])


def test_a_sweep_has_a_line_a_policy(rows):
    """Lines are means over seeds."""
    figure = draw.sweep(rows, "speed", "speed", {"rejected": "rejected_share"})
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [pytest.approx([0.1, 0.2])] * 3


def test_a_crowd_is_drawn_in_both_worlds():
    """Each policy has a stack of three parts live and one simulated, as high as there were requests."""
    ends = {
        "finished": 3,
        "refused_on_arrival": 1,
        "refused_after_prefill": 4,
        "wasted_prefill_s": 0.5,
        "machine": "a machine",
    }
    table = pd.DataFrame(
        [{"policy": p, "world": w, **ends} for p in ("after_prefill", "early") for w in ("simulated", "live")]
    )
    stacks, wasted = draw.crowd(table).axes
    assert sum(bar.get_height() for bar in stacks.patches) == 4 * 8
    assert [bar.get_height() for bar in wasted.patches] == [0.5] * 4
