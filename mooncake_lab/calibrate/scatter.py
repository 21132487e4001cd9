"""The figure of a calibration: predicted against measured, a point a request."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS
from mooncake_lab.calibrate.prediction import QUANTITIES

_MOST_POINTS: Final = 1500
"""Of all panels: a point that is no picture takes the colours of the page, and some bytes."""
_SHADES: Final = ("size_1", "size_2", "size_3", "size_4")


@style.styled
def scatter(rates: Sequence[dict[str, Any]], source: str) -> style.BookFigure:
    """A panel for each of TTFT, TBT and E2E, a colour for each rate; on the line a prediction is right.

    Args:
        rates: of `study.Calibrated`.
        source: of the numbers, for the footer.
    """
    longest = max(len(rate["points"]) for rate in rates)
    every = -(-len(QUANTITIES) * len(rates) * longest // _MOST_POINTS)
    figure, axes = style.new_figure(1, 3, height=3.4)
    for number, (panel, quantity) in enumerate(zip(axes, QUANTITIES, strict=True)):
        seen = list[float]()
        for k, rate in enumerate(rates):
            points = np.array(rate["points"][::every], dtype=np.float64)  # null becomes NaN
            real, told = 1e3 * points[:, number], 1e3 * points[:, 3 + number]
            shade = _SHADES[min(len(_SHADES) - 1, k * len(_SHADES) // len(rates))]
            label = f"{rate['share']:g} of saturation"
            panel.plot(real, told, "o", color=COLOURS[shade], markersize=3, label=label)
            seen += [float(v) for v in (*real, *told) if v > 0]
        if seen:
            ends = [0.8 * min(seen), 1.25 * max(seen)]
            panel.plot(ends, ends, color=COLOURS["slo"], linewidth=1.2, linestyle=(0, (4, 3)))
            style.log_axes(panel)
            panel.set(xlim=ends, ylim=ends)
        panel.set(xlabel=f"{quantity} measured (ms)", ylabel=f"{quantity} predicted (ms)")
        panel.tick_params(axis="both", which="minor", labelbottom=False, labelleft=False)
    shown = "" if every == 1 else f"every {every}th request; "
    return style.finished(figure, f"horizontal: measured; vertical: simulated; {shown}{source}", columns=3)


def scatter_svg(rates: Sequence[dict[str, Any]], source: str) -> str:
    """The same as SVG."""
    return scatter(rates, source)._repr_svg_()  # pyright: ignore[reportPrivateUsage]  # what a notebook calls
