"""Figures of the scorecard: verdicts by chapter, and how far every number is from the paper's."""

from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS, GROUND

VERDICTS: Final = {
    "reproduced": (COLOURS["mooncake"], ""),
    "conditional": (COLOURS["mooncake"], "///"),
    "direction only": (COLOURS["mooncake_variant"], ""),
    "not reproduced": (COLOURS["vllm"], ""),
    "the paper contradicts itself": (COLOURS["vllm_prefix"], ""),
    "at least": (COLOURS["mooncake_variant"], "///"),
    "conditionally at least": (COLOURS["mooncake_variant"], "\\\\\\"),
    "by construction": (COLOURS["fitted"], "---"),
    "calibrated": (COLOURS["fitted"], ""),
    "arithmetic": (COLOURS["fitted"], "|||"),
    "too short to judge": (COLOURS["straw_man_light"], "---"),
    "needs hardware": (COLOURS["straw_man_light"], "\\\\\\"),
    "needs the model": (COLOURS["straw_man_light"], "xxx"),
    "trace not here": (COLOURS["straw_man_light"], "///"),
    "out of scope": (COLOURS["straw_man_light"], ""),
    "not executed": (GROUND, ""),
}
"""Colour and hatch of a verdict, best first."""


@style.styled
def verdicts(counts: pd.DataFrame) -> Figure:
    """Stacked bars: claims of each verdict, one bar a chapter, from `experiment.by_chapter`."""
    figure, (axes,) = style.new_figure(height=0.6 + 0.36 * len(counts))
    parts = {verdict: (counts[verdict], colour) for verdict, (colour, _) in VERDICTS.items() if verdict in counts}
    hatches = {verdict: hatch for verdict, (_, hatch) in VERDICTS.items()}
    edges = {name: COLOURS["straw_man"] for name, hatch in hatches.items() if hatch or name == "not executed"}
    style.stacked(axes, range(len(counts)), parts, across=True, hatches=hatches)
    for bars in axes.containers:
        for bar in bars:
            bar.set_edgecolor(edges.get(str(bars.get_label()), "white"))
    style.rows_down(axes, [str(chapter).replace("_", " ") for chapter in counts.index])
    axes.set_xlabel("claims (count)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


@style.styled
def ratios(distances: pd.DataFrame) -> Figure:
    """Every number of ours over the paper's on a logarithmic axis, sorted, from `experiment.off_by`."""
    figure, (axes,) = style.new_figure(height=4.4)
    ordered = distances.sort_values("ratio").reset_index(drop=True)
    axes.axvspan(1 / 1.5, 1.5, color=COLOURS["mooncake_variant"], alpha=0.15, linewidth=0)
    axes.axvline(1.0, color=COLOURS["paper"], linewidth=1.0)
    for verdict, (colour, _) in VERDICTS.items():
        chosen = where(ordered, verdict=verdict)
        if len(chosen):
            axes.plot(chosen["ratio"], chosen.index, "s", markersize=4, color=colour, label=verdict)
    style.log_axes(axes, "x")
    axes.set(xlabel="ours / the paper's (ratio)", ylabel="numbers, sorted (count)")
    if axes.lines[1:]:  # a run at scale smoke may have no number to compare
        axes.legend(loc="lower right")
    return figure
