"""One style for every figure: identity is colour, provenance is marker.

Ours simulated, computed or counted is a line, a bar or a hollow circle; ours measured a filled circle; the paper
an open black diamond, always: a figure with filled circles whose footer does not say what was measured is refused.
Prefill is solid, decode hatched. Figures carry no title: the caption does.
"""

import io
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, Final, ParamSpec, TypeVar, cast

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mooncake_lab.figures.drawn import DATA_TYPE, as_csv, has_filled_circles

COLOURS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mooncake": "#0072B2",
        "mooncake_variant": "#56B4E9",
        "vllm": "#D55E00",
        "vllm_prefix": "#E69F00",
        "vllm_chunked": "#CC79A7",
        "straw_man": "#6E6E6E",
        "straw_man_light": "#BFBFBF",
        "paper": "#000000",
        "slo": "#4A4A4A",
        "optimum": "#444444",
        "gpu": "#00441B",
        "dram": "#0B6623",
        "ssd": "#74C476",
        "conversation": "#0072B2",
        "toolagent": "#009E73",
        "synthetic": "#CC79A7",
        "all": "#444444",
    }
)
"""Every colour of the book by what it stands for (most of Okabe and Ito's set, and greys)."""

HATCHES: Final[Mapping[str, str]] = MappingProxyType({"prefill": "", "decode": "///"})
"""Prefill is solid, decode hatched."""

COMPUTED: Final[Mapping[str, Any]] = MappingProxyType(
    {"marker": "o", "markerfacecolor": "white", "markersize": 4.5, "markeredgewidth": 1.3}
)
"""The mark of a point that was simulated, computed or counted, for `axes.plot(..., **COMPUTED)`."""

_RC: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **sns.axes_style("whitegrid"),
        **sns.plotting_context("notebook", font_scale=0.9),
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "axes.edgecolor": "#B0B0B0",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": "medium",
        "axes.titlelocation": "left",
        "grid.color": "#E8E8E8",
        "legend.frameon": False,
        "lines.linewidth": 2.0,
        "lines.markersize": 6.0,
        "figure.facecolor": "#FFFFFF",
        "savefig.facecolor": "#FFFFFF",
        "svg.hashsalt": "mooncake_lab",
    }
)

P = ParamSpec("P")
R = TypeVar("R")


class BookFigure(Figure):
    """A matplotlib figure that a notebook shows as SVG, without pyplot and its global state."""

    def _repr_svg_(self) -> str:
        _check_circles(self, self.get_supxlabel())
        with mpl.rc_context(cast("Any", dict(_RC))):
            buffer = io.StringIO()
            self.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        data = as_csv(self)
        return {"image/svg+xml": self._repr_svg_(), **({DATA_TYPE: data} if data else {})}


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Let a figure function draw in the book's style."""

    @wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with mpl.rc_context(cast("Any", dict(_RC))):
            return draw(*args, **kwargs)

    return wrapped


def new_figure(
    rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 4.2, **subplots: Any
) -> tuple[BookFigure, list[Axes]]:
    """An empty figure (inches) and its axes, row by row; call it inside a `styled` function."""
    figure = BookFigure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    return figure, list(axes.flat)


def paper_points(axes: Axes, x: Any, y: Any, label: str = "paper") -> Line2D:
    """Draw what a paper reports: open black diamonds."""
    (line,) = axes.plot(
        x, y, linestyle="none", marker="D", markersize=5.5, markerfacecolor="none",
        markeredgecolor=COLOURS["paper"], markeredgewidth=1.1, label=label, zorder=5,
    )  # fmt: skip
    return line


def slo_line(axes: Axes, value: float, text: str, *, vertical: bool = False) -> None:
    """Draw a service level objective: dashed grey, with its value."""
    colour = COLOURS["slo"]
    draw = axes.axvline if vertical else axes.axhline
    draw(value, color=colour, linestyle=(0, (4, 3)), linewidth=1.2)
    where: dict[str, Any] = (
        {"xy": (value, 1.0), "xycoords": ("data", "axes fraction"), "xytext": (4, -2), "ha": "left", "va": "top"}
        if vertical
        else {"xy": (1.0, value), "xycoords": ("axes fraction", "data"), "xytext": (0, 2), "ha": "right"}
    )
    axes.annotate(text, textcoords="offset points", color=colour, fontsize="small", **where)


def legend_once(axes: Axes, **where: Any) -> None:
    """A legend with one entry a label, however many lines carry it."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), **where)


def footer(figure: Figure, text: str) -> None:
    """Say under the figure where its numbers came from: simulated or measured, trace, seed, machine.

    Raises:
        ValueError: when the figure draws filled circles and the text does not say that something was measured.
    """
    _check_circles(figure, text)
    figure.supxlabel(text, fontsize=8, color=COLOURS["slo"], x=0.99, ha="right")


def _check_circles(figure: Figure, text: str) -> None:
    if has_filled_circles(figure) and "measured" not in text:
        raise ValueError(
            f"a figure draws filled circles, which stand for measurements, above the footer {text!r};"
            " it should say what was measured, or the figure draw hollow ones (COMPUTED)"
        )


def plain_number(value: float, _: object = None) -> str:
    """A tick as it is spoken, 0.5 or 16, where a logarithmic axis would write powers."""
    return f"{value:g}"
