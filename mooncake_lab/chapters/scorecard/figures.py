"""Figures of the scorecard: verdicts by chapter, and how far every number is from the paper's."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from mooncake_lab.figures.style import COLOURS, new_figure, plain_number, styled

VERDICT_COLOURS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "reproduced": COLOURS["mooncake"],
        "direction only": COLOURS["mooncake_variant"],
        "not reproduced": COLOURS["vllm"],
        "the paper contradicts itself": COLOURS["vllm_prefix"],
        "at least": COLOURS["mooncake_variant"],
        "calibrated": COLOURS["fitted"],
        "arithmetic": COLOURS["fitted"],
        "too short to judge": COLOURS["straw_man_light"],
        "needs hardware": COLOURS["straw_man_light"],
        "needs the model": COLOURS["straw_man_light"],
        "trace not here": COLOURS["straw_man_light"],
        "out of scope": COLOURS["straw_man_light"],
        "not executed": "#FFFFFF",
    }
)
"""The colour of a verdict, best first."""

VERDICT_HATCHES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "at least": "///",
        "arithmetic": "...",
        "too short to judge": "...",
        "needs hardware": "\\\\\\",
        "needs the model": "xxx",
        "trace not here": "///",
    }
)
"""What tells verdicts of one colour apart."""


@styled
def verdicts(counts: pd.DataFrame) -> Figure:
    """Stacked bars: claims of each verdict, one bar a chapter, from `experiment.by_chapter`."""
    figure, (axes,) = new_figure(height=0.6 + 0.36 * len(counts))
    rows = np.arange(len(counts))
    left = np.zeros(len(counts))
    for verdict, colour in VERDICT_COLOURS.items():
        if verdict not in counts:
            continue
        widths = counts[verdict].to_numpy(dtype=float)
        hatch = VERDICT_HATCHES.get(verdict)
        edge = COLOURS["straw_man"] if hatch or verdict == "not executed" else "white"
        axes.barh(rows, widths, left=left, color=colour, edgecolor=edge, hatch=hatch, label=verdict)
        left += widths
    axes.set_yticks(rows, [str(chapter).replace("_", " ") for chapter in counts.index])
    axes.invert_yaxis()
    axes.set_xlabel("claims (count)")
    axes.grid(visible=False, axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


@styled
def ratios(distances: pd.DataFrame) -> Figure:
    """Every number of ours over the paper's on a logarithmic axis, sorted, from `experiment.off_by`."""
    figure, (axes,) = new_figure(height=4.4)
    ordered = distances.sort_values("ratio").reset_index(drop=True)
    axes.axvspan(1 / 1.5, 1.5, color=COLOURS["mooncake_variant"], alpha=0.15, linewidth=0)
    axes.axvline(1.0, color=COLOURS["paper"], linewidth=1.0)
    for verdict, colour in VERDICT_COLOURS.items():
        chosen = ordered[ordered["verdict"] == verdict]
        if len(chosen):
            axes.plot(chosen["ratio"], chosen.index, "s", markersize=4, color=colour, label=verdict)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(plain_number)
    axes.set_xlabel("ours / the paper's (ratio)")
    axes.set_ylabel("numbers, sorted (count)")
    if axes.lines[1:]:  # a run at scale smoke may have no number to compare
        axes.legend(loc="lower right")
    return figure
