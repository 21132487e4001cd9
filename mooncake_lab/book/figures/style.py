"""One style for every figure: identity is colour, provenance is marker.

How to draw by it:

1. Decorate with `@styled`, start with `new_figure`, end with `finished`: source of the numbers, seed, machine.
2. A figure is 7.5 inches wide or less: 720 px, the column of the page. Wide content goes below, not beside.
3. Give no font size. Text is 12 px, or 11 px (`SMALL`); a figure with smaller text is refused.
4. Name a meaning, `COLOURS["vllm"]`; add a meaning to `colours.py` rather than borrow another's colour.
5. Ours simulated, computed or counted: a line, a bar or a hollow circle (`**COMPUTED`). Ours measured: a filled
   circle. The paper: `paper_points`, always. A filled circle whose footer does not say measured is refused.
6. Prefill is solid, decode hatched (`HATCHES`). A limit is an `slo_line`, and the line that is judged is visible.
7. Name lines with `label_lines`; a legend goes outside with `legend_above`, never onto data.
8. Axes say `quantity (unit)`; bars start at zero; intervals are drawn, or the footer says why there are none.
9. No title: the caption says it. `panel_title` names panels.
10. At most `MOST_BYTES` of SVG: `rasterized=True` for clouds, one hatch for one bar.
"""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from html import escape
from textwrap import wrap
from types import MappingProxyType
from typing import Any, Final, ParamSpec, TypeVar, cast

from mooncake_lab.book.figures.colours import COLOURS, FRAME, GROUND, letters
from mooncake_lab.book.figures.drawn import DATA_TYPE, as_csv, has_filled_circles, in_words
from mooncake_lab.core import sum_in_order
from mooncake_lab.core.extras import naming_extra

with naming_extra("figures"):
    import matplotlib as mpl
    import numpy as np
    import pandas as pd
    import seaborn as sns
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

HATCHES: Final[Mapping[str, str]] = MappingProxyType({"prefill": "", "decode": "///"})
"""Prefill is solid, decode hatched."""

COMPUTED: Final[Mapping[str, Any]] = MappingProxyType(
    {"marker": "o", "markerfacecolor": "white", "markersize": 4.5, "markeredgewidth": 1.3}
)
"""The mark of a point that was simulated, computed or counted, for `axes.plot(..., **COMPUTED)`."""

PAPER_NODES: Final = "nodes of eight A800 GPUs, fitted to FAST'25 Fig. 14 and arXiv Fig. 2"
"""What the simulated clusters of several chapters are made of, for `footer`."""

WIDTH: Final = 7.5
"""Inches: 720 px of CSS, which the column of a page holds."""
SMALL: Final = 8.25
"""Points: 11 px, the least size of text."""
MOST_BYTES: Final = 200_000
"""Largest size of a figure's SVG."""

_RC: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **sns.axes_style("whitegrid"),
        **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), 9.0),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8.5),
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), COLOURS["ink"]),
        "axes.edgecolor": FRAME["axis"][0],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "font.sans-serif": ["DejaVu Sans"],
        "grid.color": FRAME["grid"][0],
        "grid.linewidth": 0.8,
        "hatch.linewidth": 0.9,
        "axes.facecolor": "none",
        "legend.frameon": False,
        "legend.handlelength": 2.6,
        "legend.columnspacing": 1.4,
        "lines.linewidth": 1.7,
        "lines.markersize": 5.0,
        "figure.facecolor": GROUND,
        "savefig.facecolor": GROUND,
        "svg.fonttype": "none",
        "svg.hashsalt": "mooncake_lab",
    }
)
_ROOT: Final = (
    'font-family="system-ui, -apple-system, Segoe UI, Helvetica Neue, Arial, sans-serif" stroke-linejoin="round"'
    ' style="fill: #000000"'  # matplotlib leaves black out, and a page has its own
)
"""Fonts of the reader's own system; each is narrower than DejaVu Sans, for which matplotlib leaves room."""
_NEEDLESS: Final = (
    r"<defs>\s*<style type=.*?</style>\s*</defs>",  # speaks to a whole page, not to this drawing alone
    r"font-family: [^;\"]*(?:; )?",
    r' transform="rotate\(-?0 [^"]*"',
    r"(?<=>)\s+(?=<)",
)

P = ParamSpec("P")
R = TypeVar("R")


class BookFigure(Figure):
    """A matplotlib figure that a notebook shows as SVG, without pyplot and its global state."""

    def _repr_svg_(self) -> str:
        _check_circles(self, self.get_supxlabel())
        with mpl.rc_context(cast("Any", dict(_RC))):
            buffer = io.StringIO()
            self.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        _check_text(self)
        svg = _small(buffer.getvalue(), in_words(self))
        if len(svg) > MOST_BYTES:
            raise ValueError(
                f"the SVG of a figure has {len(svg)} bytes, more than {MOST_BYTES}; rasterize its clouds"
            )
        return svg

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
    rows: int = 1, columns: int = 1, *, width: float = WIDTH, height: float = 3.6, **subplots: Any
) -> tuple[BookFigure, list[Axes]]:
    """An empty figure (inches) and its axes, row by row; call it inside a `styled` function.

    Raises:
        ValueError: when it is wider than a page's column.
    """
    if width > WIDTH:
        raise ValueError(f"a figure of {width} inches is wider than the page; it may have {WIDTH}")
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


def slo_line(
    axes: Axes, value: float, text: str, *, vertical: bool = False, left: bool = False, below: bool = False
) -> None:
    """Draw a service level objective or another limit: dashed grey, with its value on the right or the left."""
    colour = COLOURS["slo"]
    draw = axes.axvline if vertical else axes.axhline
    draw(value, color=colour, linestyle=(0, (4, 3)), linewidth=1.2)
    where: dict[str, Any] = (
        {"xy": (value, 1.0), "xycoords": ("data", "axes fraction"), "xytext": (4, -2), "ha": "left", "va": "top"}
        if vertical
        else {
            "xy": (0.0 if left else 1.0, value),
            "xycoords": ("axes fraction", "data"),
            "xytext": (3 if left else 0, -2 if below else 2),
            "va": "top" if below else "bottom",
            "ha": "left" if left else "right",
        }
    )
    axes.annotate(text, textcoords="offset points", color=colour, fontsize=SMALL, in_layout=False, **where)


def legend_above(figure: BookFigure, handles: Any = None, *, columns: int = 6) -> None:
    """One legend over all panels, with one entry a label; of what the panels drew, unless handles are given."""
    if handles is None:
        pairs = [axes.get_legend_handles_labels() for axes in figure.axes]
        unique = {label: handle for every in pairs for handle, label in zip(*every, strict=True)}
    else:
        unique = {handle.get_label(): handle for handle in handles}
    figure.legend(
        list(unique.values()), list(unique), loc="outside upper left", ncols=min(columns, len(unique)), borderpad=0
    )


def panel_title(axes: Axes, text: str) -> None:
    """Name a panel, above its left end."""
    axes.set_title(text, fontsize=9, fontweight="bold")


def label_lines(axes: Axes, lines: Any = None, *, gap: float = 1.25) -> None:
    """Write the label of each line beside its last point, in its colour if that is legible, instead of a legend.

    Args:
        axes: whose limits are final, with room on the right (this makes some).
        lines: which; all of the axes that have a label unless given.
        gap: least distance of two labels, in heights of a line of text.
    """
    chosen = [line for line in (lines or axes.get_lines()) if not str(line.get_label()).startswith("_")]
    axes.autoscale_view()
    to_pixels, back = axes.transData.transform, axes.transAxes.inverted().transform
    points = [np.asarray(line.get_xydata(), dtype=float) for line in chosen]
    ends = [to_pixels(each[np.isfinite(each).all(axis=1)][-1]) for each in points]
    figure = axes.get_figure(root=True)
    height_inches = axes.get_position().height * figure.get_figheight() if figure else 1.0
    places = _spread([float(back(end)[1]) for end in ends], gap * SMALL / 72 / height_inches)
    for line, end, place in zip(chosen, ends, places, strict=True):
        colour = letters(str(line.get_markeredgecolor() if line.get_linestyle() == "None" else line.get_color()))
        axes.annotate(
            str(line.get_label()), (float(back(end)[0]), place), xycoords="axes fraction", xytext=(6, 0),
            textcoords="offset points", va="center", color=colour, fontsize=SMALL, annotation_clip=False,
        )  # fmt: skip


def _spread(wanted: list[float], gap: float) -> list[float]:
    """Places at least a gap apart, in the order wanted, as near to where they are wanted as that allows."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    groups: list[list[int]] = []

    def low(group: list[int]) -> float:
        return sum_in_order(wanted[index] for index in group) / len(group) - gap * (len(group) - 1) / 2

    for index in order:
        groups.append([index])
        while len(groups) > 1 and low(groups[-1]) - low(groups[-2]) < gap * len(groups[-2]):
            groups[-2:] = [groups[-2] + groups[-1]]
    places = {index: low(group) + gap * k for group in groups for k, index in enumerate(group)}
    return [places[index] for index in range(len(wanted))]


def footer(figure: Figure, text: str) -> None:
    """Say under the figure where its numbers came from: simulated or measured, trace, seed, machine.

    Raises:
        ValueError: when the figure draws filled circles and the text does not say that something was measured.
    """
    _check_circles(figure, text)
    room = int(14.5 * figure.get_figwidth())  # letters of this size in an inch
    figure.supxlabel("\n".join(wrap(text, room)), fontsize=SMALL, color=COLOURS["slo"], x=0.01, ha="left")


def finished(
    figure: BookFigure, source: str, *, legend: bool | Sequence[Any] = True, columns: int = 6
) -> BookFigure:
    """The figure with its legend (of what the panels drew, unless these are handles) and its footer."""
    if legend:
        legend_above(figure, None if legend is True else legend, columns=columns)
    footer(figure, source)
    return figure


def simulated(*details: str) -> str:
    """The footer of figures of the paper's nodes in virtual time: what they are, then what else is to be said."""
    return "; ".join((f"simulated: {PAPER_NODES}", *details))


def sources(*tables: pd.DataFrame) -> str:
    """The sources of the rows of tables, each once."""
    return "; ".join(dict.fromkeys(str(source) for table in tables for source in table["source"]))


def origins(rows: pd.DataFrame) -> str:
    """Each workload of the rows with what it is: a released trace or its twin."""
    pairs = dict(zip(map(str, rows["workload"]), rows["origin"], strict=True))
    return ", ".join(f"{workload}: {origin}" for workload, origin in pairs.items())


def log_ticks(axes: Axes, values: Iterable[float]) -> None:
    """On a logarithmic horizontal axis: ticks at these values only, as plain numbers."""
    axes.set_xticks(list(values))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(plain_number)


def log_axes(axes: Axes, which: str = "xy", *, base: int = 10) -> None:
    """Logarithmic axes, `x`, `y` or both, whose ticks are plain numbers."""
    if "x" in which:
        axes.set_xscale("log", base=base)
        axes.xaxis.set_major_formatter(plain_number)
    if "y" in which:
        axes.set_yscale("log", base=base)
        axes.yaxis.set_major_formatter(plain_number)


def rows_down(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a figure of horizontal bars; the first is on top."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def printed_line(axes: Axes, value: float, text: str, *, at: float = 0.02) -> None:
    """Draw a number of a paper that has no place on the horizontal axis: a dotted line with a text above it."""
    axes.axhline(value, color=COLOURS["paper"], linewidth=1, linestyle=":")
    axes.annotate(text, (at, value), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points")


def curves(
    axes: Axes, rows: pd.DataFrame, x: str, y: str, by: str, looks: Mapping[Any, tuple[str, str]], **look: Any
) -> None:
    """One line for each value of a column that the rows have, in the order of the looks.

    Args:
        axes: where to.
        rows: with the columns `x`, `y` and `by`.
        x: column over which to draw.
        y: column to draw.
        by: column that tells lines apart; a line's label is its value.
        looks: colour (a name in `COLOURS`) and line style by value.
        look: of all lines.
    """
    for key, (colour, line) in looks.items():
        mine = cast("pd.DataFrame", rows[rows[by] == key]).sort_values(by=x)
        own: dict[str, Any] = {"color": COLOURS[colour], "label": str(key), **look}
        if len(mine):
            axes.plot(mine[x], mine[y], line, **own)


def stacked(
    axes: Axes,
    places: Any,
    parts: Mapping[str, tuple[Any, str]],
    *,
    across: bool = False,
    hatches: Mapping[str, str] | None = None,
    **look: Any,
) -> None:
    """Bars on top of each other, or end to end: by label, the sizes at all places and the colour itself."""
    ends = np.zeros(len(places))
    for label, (sizes, colour) in parts.items():
        mine: dict[str, Any] = {
            "color": colour,
            "label": label,
            "hatch": (hatches or {}).get(label),
            "edgecolor": "white",
            **look,
        }
        sizes = np.asarray(sizes, dtype=float)  # noqa: PLW2901  # the same numbers
        if across:
            axes.barh(places, sizes, left=ends, **mine)
        else:
            axes.bar(places, sizes, bottom=ends, **mine)
        ends = ends + sizes


def bar_places(groups: int, bars: int, bar: int, width: float) -> list[float]:
    """Where bar number `bar` of each group stands; the bars of group k lie side by side around k."""
    return [group + width * (bar - (bars - 1) / 2) for group in range(groups)]


def _check_circles(figure: Figure, text: str) -> None:
    if has_filled_circles(figure) and "measured" not in text:
        raise ValueError(
            f"a figure draws filled circles, which stand for measurements, above the footer {text!r};"
            " it should say what was measured, or the figure draw hollow ones (COMPUTED)"
        )


def _check_text(figure: Figure) -> None:
    """Refuse text that a reader cannot read at the size at which the page shows it."""
    texts = (text for text in figure.findobj(Text) if text.get_text().strip())
    tiny = [text.get_text() for text in texts if float(text.get_fontsize()) < SMALL]
    if tiny:
        raise ValueError(f"text below {SMALL} points (11 px) in a figure: {tiny[:3]}; leave its size to the style")


def _small(svg: str, words: str) -> str:
    """The same drawing, described, without what no viewer needs: blanks, unused ids, thousandths of a pixel."""
    wanted = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in wanted else "", svg)
    for needless in _NEEDLESS:
        svg = re.sub(needless, "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    start = svg.index(">", svg.index("<svg ")) + 1
    return f"{svg[:start].replace('<svg ', f'<svg {_ROOT} ', 1)}<desc>{escape(words)}</desc>{svg[start:]}"


def plain_number(value: float, _: object = None) -> str:
    """A tick as it is spoken, 0.5 or 16, where a logarithmic axis would write powers."""
    return f"{value:g}"
