"""Figures of chunked prefill: saturation, masks of pieces, what chunking costs modelled and measured."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from mooncake_lab.figures.style import (
    COLOURS,
    SMALL,
    BookFigure,
    footer,
    label_lines,
    legend_above,
    log_ticks,
    new_figure,
    panel_title,
    paper_points,
    plain_number,
    slo_line,
    styled,
)
from mooncake_lab.paper import Fact

SIZES: Final = ("size_1", "size_3", "size_4")
"""Prompt lengths from pale to dark; a dotted line ignores tiles."""
MODELLED: Final = "modelled: LLaMA-13B on an A6000, anchored to SARATHI Table 2 and Fig. 7"


@styled
def saturation(speeds: pd.DataFrame, intensity: pd.DataFrame, prefill: Fact, at_tokens: Fact) -> BookFigure:
    """Speed of one layer over the tokens of an iteration, and arithmetic intensity by operator (SARATHI Fig. 4).

    Args:
        speeds: rows of `saturation`.
        intensity: rows of `intensities`.
        prefill: the paper's tokens a millisecond where prefill has saturated.
        at_tokens: the tokens at which it has.
    """
    figure, (left, right) = new_figure(1, 2, height=3.4)
    looks = {
        "prefill": ("-", "prefill"),
        "decode": ("-", "decode"),
        "decode without its attention": (":", "decode"),
    }
    for stage, table in speeds.groupby("stage", sort=False):
        line, colour = looks[str(stage)]
        left.plot(table["tokens"], table["tokens_per_ms"], line, color=COLOURS[colour], label=str(stage))
    paper_points(left, [at_tokens.value], [prefill.value])
    left.set(xscale="log", yscale="log", xlabel="tokens of the iteration (tokens)", ylabel="speed (tokens/ms)")
    left.set_ylim(top=3 * prefill.value)
    label_lines(left, left.get_lines()[:2])
    aside: dict[str, Any] = {"xytext": (-7, 3), "textcoords": "offset points", "ha": "right", "fontsize": SMALL}
    left.annotate("SARATHI Fig. 4a", (at_tokens.value, prefill.value), **aside)
    without = speeds.query("stage == 'decode without its attention' and tokens == 32").iloc[0]
    x, y = float(without["tokens"]), float(without["tokens_per_ms"])
    left.annotate("decode without\nits attention", (x, y), color=COLOURS["decode"], **aside)
    for operator in ("ffn1", "attention"):
        for stage, table in intensity[intensity["operator"] == operator].groupby("stage", sort=False):
            colour = COLOURS[str(stage)]
            line = "-" if operator == "ffn1" else "--"
            label = f"{stage},\n{operator}"
            right.plot(table["batch"], table["intensity_flops_per_byte"], line, color=colour, label=label)
    right.set(xscale="log", yscale="log", xlabel="batch size (requests)", ylabel="arithmetic intensity (FLOP/B)")
    label_lines(right, gap=2.6)
    ridge = float(intensity["ridge_flops_per_byte"].iloc[0])
    slo_line(right, ridge, f"ridge of the roof, {ridge:.0f} FLOP/B", left=True, below=True)
    for panel in (left, right):
        _plain_ticks(panel)
    footer(figure, f"left: {MODELLED}, one layer; right: counted")
    return figure


@styled
def masks(pieces: Sequence[npt.NDArray[np.int64]]) -> BookFigure:
    """What each piece of a prompt attends to (SARATHI Fig. 6): filled where a query sees a key."""
    longest = pieces[-1].shape[1]
    figure, axes = new_figure(1, len(pieces), height=2.0, sharex=True)
    for number, (panel, mask) in enumerate(zip(axes, pieces, strict=True)):
        start = mask.shape[1] - mask.shape[0]
        for row, column in np.argwhere(mask):
            colour = COLOURS["size_1" if column < start else "prefill"]
            panel.add_patch(Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, color=colour))
        panel.set(xlim=(0, longest), ylim=(mask.shape[0], 0), aspect="equal")
        panel.set(xlabel="key (position)", ylabel="query (position)")
        panel_title(panel, f"chunk {number + 1}")
        panel.set_xticks(np.arange(0, longest, 2) + 0.5, [str(column) for column in range(0, longest, 2)])
        panel.set_yticks(np.arange(mask.shape[0]) + 0.5, [str(start + row) for row in range(mask.shape[0])])
        panel.grid(visible=False)
    footer(figure, "counted; grey-blue: keys of earlier chunks, read from the KVCache")
    return figure


@styled
def overhead(modelled: pd.DataFrame, paper: pd.DataFrame) -> BookFigure:
    """Time of chunked over whole prefill, attention alone and all of it (SARATHI Fig. 13 a and b).

    Args:
        modelled: rows of `chunk_overhead`.
        paper: the curve of SARATHI Fig. 13.
    """
    figure, panels = new_figure(1, 2, height=3.3, sharex=True)
    for panel, column, series in zip(
        panels, ("attention", "prefill"), ("attention", "total prefill"), strict=True
    ):
        for size, (prompt, table) in zip(SIZES, modelled.groupby("prompt_tokens"), strict=False):
            for tiles, rows in table.groupby("tiles"):
                if column == "attention" and not tiles:
                    continue  # tiles are a matter of the matrices
                label = f"{int(str(prompt)) // 1024}K{'' if tiles else ', no tiles'}"
                line = "-" if tiles else ":"
                panel.plot(rows["chunk_tokens"], rows[column], line, color=COLOURS[size], label=label)
        points = paper[paper["series"] == series]
        paper_points(panel, points["x"], points["y"], "SARATHI Fig. 13")
        panel.axhline(1, color=COLOURS["slo"], linewidth=1)
        panel.set(xlabel="chunk size (tokens)", ylim=(0, None))
        panel.set_xticks(sorted(set(modelled["chunk_tokens"])))
    legend_above(figure, columns=7)
    panels[0].set_ylabel("attention, chunked over whole (ratio)")
    panels[1].set_ylabel("prefill, chunked over whole (ratio)")
    footer(figure, MODELLED)
    return figure


@styled
def gain_by_chunk(gains: pd.DataFrame, best: Mapping[int, Fact]) -> BookFigure:
    """Throughput over the baseline by chunk size, each at its own balance (SARATHI Fig. 13 c).

    Args:
        gains: rows of `end_to_end_gain`.
        best: the paper's gain of the shortest sequences, by chunk size.
    """
    figure, (axes,) = new_figure(height=3.6)
    for size, (total, table) in zip(SIZES, gains.groupby("total_tokens"), strict=False):
        for tiles, rows in table.groupby("tiles"):
            line = "-" if tiles else ":"
            label = f"{int(str(total)) // 1024}K, batch {rows['batch'].iloc[0]}{'' if tiles else ', no tiles'}"
            axes.plot(rows["fused_tokens"], rows["gain"], line, color=COLOURS[size], label=label)
    paper_points(axes, list(best), [each.value for each in best.values()], "SARATHI Fig. 9a, 1K")
    axes.axhline(1, color=COLOURS["slo"], linewidth=1)
    axes.set(xlabel="chunk and decodes (tokens)", ylabel="throughput over the baseline (ratio)")
    axes.set_xticks(sorted(set(gains["fused_tokens"])))
    legend_above(figure, columns=4)
    footer(figure, MODELLED)
    return figure


@styled
def measured(medians: pd.DataFrame, machine: str) -> BookFigure:
    """What chunking costs on this machine: rows of `chunk_medians`; bars from the least to the most of a round."""
    figure, (left, right) = new_figure(1, 2, height=3.2, sharex=True)
    for colour, (tokens, table) in zip(("size_4", "size_1"), medians.groupby("tokens"), strict=False):
        hue, label = COLOURS[colour], f"{tokens} tokens"
        left.plot(table["chunk_tokens"], table["tokens_per_s"], "o", color=hue, label=label)
        spread = np.stack([table["over_whole"] - table["least"], table["most"] - table["over_whole"]])
        right.errorbar(table["chunk_tokens"], table["over_whole"], yerr=spread, capsize=3, fmt="o", color=hue)
    right.axhline(1, color=COLOURS["slo"], linewidth=1)
    left.set(xscale="log", xlabel="chunk size (tokens)", ylabel="prefill speed (tokens/s)", ylim=(0, None))
    right.set(xlabel="chunk size (tokens)", ylabel="time over a whole prefill (ratio)", ylim=(0, None))
    log_ticks(left, sorted(set(medians["chunk_tokens"])))
    legend_above(figure)
    footer(figure, f"measured: {machine}")
    return figure


def _plain_ticks(panel: Axes) -> None:
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FuncFormatter(plain_number))
