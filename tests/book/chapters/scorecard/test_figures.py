"""The figures of the scorecard show every judgement they are given."""

import itertools

import numpy as np
import pandas as pd
from colour_vision import LEAST_APART, apart

from mooncake_lab.book.chapters.scorecard import figures as draw
from mooncake_lab.book.figures.colours import COLOURS, DARK
from mooncake_lab.book.figures.style import MOST_BYTES


def test_bars_are_as_long_as_their_chapter():
    """The segments of a bar add up to the chapter's judgements."""
    counts = pd.DataFrame({"reproduced": [2, 0], "out of scope": [1, 4]}, index=["01_traces", "02_stages"])
    (axes,) = draw.verdicts(counts).axes
    ends = [
        max(p.get_x() + p.get_width() for p in axes.patches if abs(p.get_y() + 0.4 - row) < 0.1) for row in (0, 1)
    ]
    assert ends == [3, 4]


def test_every_mixture_of_verdicts_can_be_shown():
    """However the claims end, also if a short run judges few of them, the figure is small enough for a page."""
    chapters = [f"{number:02d}_chapter" for number in range(15)]
    counts = pd.DataFrame({verdict: [12] * len(chapters) for verdict in draw.VERDICTS}, index=chapters)
    assert draw.verdicts(counts)._repr_svg_()


def test_every_ratio_is_a_dot():
    """Each judged number appears once, at its ratio."""
    table = pd.DataFrame({"ratio": [0.1, 2.0, 1.0], "verdict": ["not reproduced", "reproduced", "reproduced"]})
    (axes,) = draw.ratios(table).axes
    dots = np.concatenate([line.get_xdata() for line in axes.lines if line.get_marker() == "s"])
    assert sorted(dots) == [0.1, 1.0, 2.0]


def test_two_verdicts_are_told_apart_by_colour_or_by_hatch():
    """Two verdicts of one colour differ in their hatch; two colours differ for every kind of colour vision."""
    dark = {light: DARK[name] for name, light in COLOURS.items()}
    for one, other in itertools.combinations(draw.VERDICTS, 2):
        colours, hatches = zip(draw.VERDICTS[one], draw.VERDICTS[other], strict=True)
        if colours[0] == colours[1]:
            assert hatches[0] != hatches[1]
        elif "not executed" not in {one, other}:  # an empty bar with an edge
            assert apart(*colours) >= LEAST_APART
            assert apart(*(dark[each] for each in colours)) >= LEAST_APART


def test_a_chapter_may_have_every_verdict():
    """The figure of a book at any scale fits into a page: no hatch draws hundreds of circles."""
    counts = pd.DataFrame(2, index=[f"{number:02d}" for number in range(15)], columns=[*draw.VERDICTS])
    assert len(draw.verdicts(counts)._repr_svg_()) < MOST_BYTES / 2
