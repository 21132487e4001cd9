"""The style of the figures."""

import re

import matplotlib as mpl
import numpy as np
import pytest

from mooncake_lab.figures import COLOURS, BookFigure, footer, new_figure, paper_points, slo_line, styled
from mooncake_lab.figures.drawn import has_filled_circles
from mooncake_lab.figures.style import COMPUTED


@styled
def small() -> BookFigure:
    figure, (axes,) = new_figure()
    paper_points(axes, [1, 2], [3, 4])
    slo_line(axes, 2.0, "TTFT limit 2 s")
    slo_line(axes, 1.5, "TBT limit 1.5 ms", vertical=True)
    footer(figure, "simulated, seed 0")
    return figure


def luminance(colour: str) -> float:
    channels = np.array(mpl.colors.to_rgb(colour))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


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


class TestColours:
    @pytest.mark.parametrize("name", sorted(COLOURS))
    def test_are_hex_and_visible_on_paper(self, name):
        """Every colour contrasts with the white ground (lines need 1.5:1 at the very least)."""
        assert re.fullmatch(r"#[0-9A-F]{6}", COLOURS[name])
        assert 1.05 / (luminance(COLOURS[name]) + 0.05) > 1.5
