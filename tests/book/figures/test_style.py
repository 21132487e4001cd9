"""The style of the figures."""

import itertools

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.figures.drawn import has_filled_circles
from mooncake_lab.book.figures.style import (
    COLOURS,
    COMPUTED,
    SMALL,
    BookFigure,
    _spread,
    footer,
    label_lines,
    new_figure,
    paper_points,
    slo_line,
    styled,
)


@styled
def small() -> BookFigure:
    figure, (axes,) = new_figure()
    paper_points(axes, [1, 2], [3, 4])
    slo_line(axes, 2.0, "TTFT limit 2 s")
    slo_line(axes, 1.5, "TBT limit 1.5 ms", vertical=True)
    footer(figure, "simulated, seed 0")
    return figure


class TestFigure:
    def test_same_figure_same_bytes(self):
        """Drawing twice gives the same SVG, so that a rebuild changes nothing."""
        assert small()._repr_svg_() == small()._repr_svg_()

    def test_the_style_does_not_leak(self):
        """Drawing leaves matplotlib's own settings as they were."""
        before = dict(mpl.rcParams)
        small()._repr_svg_()
        assert dict(mpl.rcParams) == before

    def test_the_paper_is_an_open_black_diamond(self):
        """Provenance is the marker: the paper's points can be told from ours without colour."""
        _, (axes,) = new_figure()
        line = paper_points(axes, [1], [1])
        assert (line.get_marker(), line.get_markerfacecolor(), line.get_markeredgecolor()) == (
            "D",
            "none",
            "#000000",
        )


class TestCircles:
    """A filled circle stands for a measurement, in every figure."""

    @styled
    def drawn(self, said, **look):
        """A figure of one line with points, and its footer."""
        figure, (axes,) = new_figure()
        axes.plot([1, 2], [3, 4], **look)
        if said is not None:
            footer(figure, said)
        return figure

    @pytest.mark.parametrize("look", [{"marker": "o"}, {"marker": "."}, {"marker": "o", "linestyle": "none"}])
    @pytest.mark.parametrize("said", ["simulated, seed 0", None])
    def test_filled_ones_that_nobody_measured_are_refused(self, look, said):
        """Under a footer that does not say measured, and without a footer, no picture is made."""
        with pytest.raises(ValueError, match="filled circles"):
            self.drawn(said, **look)._repr_svg_()

    def test_measured_ones_are_filled_and_computed_ones_hollow(self):
        """Both can be drawn, each under its own footer; lines and squares say nothing about it."""
        assert has_filled_circles(self.drawn("measured: this machine", marker="o"))
        for look in (COMPUTED, {"marker": "s"}, {}):
            figure = self.drawn("simulated, seed 0", **look)
            assert not has_filled_circles(figure)
            assert figure._repr_svg_()


class TestSize:
    """What a page can show and a reader can read."""

    @styled
    def drawn(self, size=None, points=2):
        """A figure with text of a size and a line of so many points."""
        figure, (axes,) = new_figure()
        axes.plot(np.arange(points), np.sin(np.arange(points)))
        axes.text(0.5, 0.5, "words", fontsize=size)
        return figure

    def test_small_text_is_refused(self):
        """Text below 11 px makes no picture; the smallest size that the style has makes one."""
        with pytest.raises(ValueError, match="words"):
            self.drawn(8.0)._repr_svg_()
        assert "words</text>" in self.drawn(SMALL)._repr_svg_()

    @styled
    def test_a_figure_wider_than_the_column_is_refused(self):
        """It would have to shrink, and its text with it."""
        with pytest.raises(ValueError, match="wider"):
            new_figure(width=8.0)

    def test_a_heavy_drawing_is_refused(self):
        """No figure adds more than 200 KB to a page."""
        with pytest.raises(ValueError, match="bytes"):
            self.drawn(points=40_000)._repr_svg_()

    @styled
    def test_making_it_small_loses_no_word(self):
        """Every text of a drawing is in the SVG, however it is aligned, broken or turned."""
        figure, (axes,) = new_figure()
        words = ["left", "right", "turned", "above", "below", "bold"]
        axes.text(0.1, 0.1, "left")
        axes.text(0.1, 0.2, "right", ha="right", fontweight="bold")
        axes.text(0.1, 0.3, "turned", rotation=30)
        axes.text(0.1, 0.4, "above\nbelow", va="center")
        axes.text(0.1, 0.5, "bold", fontweight="bold")
        svg = figure._repr_svg_()
        assert [word for word in words if f">{word}</t" not in svg] == []
        assert svg.count("font-weight: 700") == 2


class TestLabels:
    """Names of lines stand beside them."""

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.01, 0.2))
    def test_labels_keep_apart_and_in_order(self, wanted, gap):
        """No two places are nearer than the gap, and who is above stays above."""
        places = _spread(wanted, gap)
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        assert all(places[b] - places[a] >= gap - 1e-9 for a, b in itertools.pairwise(order))

    @given(st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True))
    def test_labels_that_have_room_stay(self, wanted):
        """Where lines end far enough apart, each label is at the end of its line."""
        assert _spread([float(each) for each in wanted], 0.9) == pytest.approx(wanted)

    @styled
    def test_each_line_is_named_in_its_colour(self):
        """Beside its last point that is a number, in ink if its colour is too faint; no label, no name."""
        figure, (axes,) = new_figure()
        axes.plot([0, 1, 2], [1, 2, np.nan], color=COLOURS["mooncake"], label="Mooncake")
        axes.plot([0, 1, 2], [3, 4, np.nan], color=COLOURS["vllm"], label="vLLM")
        axes.plot([0, 1], [0, 0], label="_")
        label_lines(axes)
        found = {text.get_text(): text.get_color() for text in axes.texts}
        assert found == {"Mooncake": COLOURS["mooncake"], "vLLM": COLOURS["ink"]}
        assert figure._repr_svg_()
