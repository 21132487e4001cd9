"""Figures of chunked prefill: saturation, masks of pieces, what chunking costs modelled and measured."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.patches import Rectangle

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS
from mooncake_lab.book.paper import Fact

SIZES: Final = ("size_1", "size_3", "size_4")
"""Prompt lengths from pale to dark; a dotted line ignores tiles."""
MODELLED: Final = "modelled: LLaMA-13B on an A6000, anchored to SARATHI Table 2 and Fig. 7"


@style.styled
def saturation(speeds: pd.DataFrame, intensity: pd.DataFrame, prefill: Fact, at_tokens: Fact) -> style.BookFigure:
    """Speed of one layer over the tokens of an iteration, and arithmetic intensity by operator (SARATHI Fig. 4).

    Args:
        speeds: rows of `saturation`.
        intensity: rows of `intensities`.
        prefill: the paper's tokens a millisecond where prefill has saturated.
        at_tokens: the tokens at which it has.
    """
    figure, (left, right) = style.new_figure(1, 2, height=3.4)
    alone = "decode without its attention"
    looks = {"prefill": ("prefill", "-"), "decode": ("decode", "-"), alone: ("decode", ":")}
    style.curves(left, speeds, "tokens", "tokens_per_ms", "stage", looks)
    style.paper_points(left, [at_tokens.value], [prefill.value])
    for panel in (left, right):
        style.log_axes(panel)
    left.set(xlabel="tokens of the iteration (tokens)", ylabel="speed (tokens/ms)")
    left.set_ylim(top=3 * prefill.value)
    style.label_lines(left, left.get_lines()[:2])
    aside: dict[str, Any] = {"xytext": (-7, 3), "textcoords": "offset points", "ha": "right"}
    aside["fontsize"] = style.SMALL
    left.annotate("SARATHI Fig. 4a", (at_tokens.value, prefill.value), **aside)
    without = where(speeds, stage=alone, tokens=32).iloc[0]
    at = (float(without["tokens"]), float(without["tokens_per_ms"]))
    left.annotate("decode without\nits attention", at, color=COLOURS["decode"], **aside)
    for operator, line in (("ffn1", "-"), ("attention", "--")):
        for stage in ("prefill", "decode"):
            table = where(intensity, operator=operator, stage=stage)
            look: dict[str, Any] = {"color": COLOURS[stage]}
            label = f"{stage},\n{operator}"
            right.plot(table["batch"], table["intensity_flops_per_byte"], line, label=label, **look)
    right.set(xlabel="batch size (requests)", ylabel="arithmetic intensity (FLOP/B)")
    style.label_lines(right, gap=2.6)
    ridge = float(intensity["ridge_flops_per_byte"].iloc[0])
    style.slo_line(right, ridge, f"ridge of the roof, {ridge:.0f} FLOP/B", left=True, below=True)
    return style.finished(figure, f"left: {MODELLED}, one layer; right: counted", legend=False)


@style.styled
def masks(pieces: Sequence[npt.NDArray[np.int64]]) -> style.BookFigure:
    """What each piece of a prompt attends to (SARATHI Fig. 6): filled where a query sees a key."""
    longest = pieces[-1].shape[1]
    figure, axes = style.new_figure(1, len(pieces), height=2.0, sharex=True)
    for number, (panel, mask) in enumerate(zip(axes, pieces, strict=True)):
        start = mask.shape[1] - mask.shape[0]
        for row, column in np.argwhere(mask):
            colour = COLOURS["size_1" if column < start else "prefill"]
            panel.add_patch(Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, color=colour))
        panel.set(xlim=(0, longest), ylim=(mask.shape[0], 0), aspect="equal")
        panel.set(xlabel="key (position)", ylabel="query (position)")
        style.panel_title(panel, f"chunk {number + 1}")
        panel.set_xticks(np.arange(0, longest, 2) + 0.5, [str(column) for column in range(0, longest, 2)])
        panel.set_yticks(np.arange(mask.shape[0]) + 0.5, [str(start + row) for row in range(mask.shape[0])])
        panel.grid(visible=False)
    return style.finished(
        figure, "counted; grey-blue: keys of earlier chunks, read from the KVCache", legend=False
    )


@style.styled
def overhead(modelled: pd.DataFrame, paper: pd.DataFrame) -> style.BookFigure:
    """Time of chunked over whole prefill, attention alone and all of it (SARATHI Fig. 13 a and b).

    Args:
        modelled: rows of `chunk_overhead`.
        paper: the curve of SARATHI Fig. 13.
    """
    figure, panels = style.new_figure(1, 2, height=3.3, sharex=True)
    looks = _by_size(modelled, "prompt_tokens")
    shown = (("attention", "attention"), ("prefill", "total prefill"))
    for panel, (column, series) in zip(panels, shown, strict=True):
        for (_, tiles), (rows, line, look) in looks.items():
            if tiles or column == "prefill":  # tiles are a matter of the matrices
                panel.plot(rows["chunk_tokens"], rows[column], line, **look)
        points = where(paper, series=series)
        style.paper_points(panel, points["x"], points["y"], "SARATHI Fig. 13")
        panel.axhline(1, color=COLOURS["slo"], linewidth=1)
        panel.set(xlabel="chunk size (tokens)", ylim=(0, None))
        panel.set_ylabel(f"{column}, chunked over whole (ratio)")
        panel.set_xticks(sorted(set(modelled["chunk_tokens"])))
    return style.finished(figure, MODELLED, columns=7)


@style.styled
def gain_by_chunk(gains: pd.DataFrame, best: Mapping[int, Fact]) -> style.BookFigure:
    """Throughput over the baseline by chunk size, each at its own balance (SARATHI Fig. 13 c).

    Args:
        gains: rows of `end_to_end_gain`.
        best: the paper's gain of the shortest sequences, by chunk size.
    """
    figure, (axes,) = style.new_figure(height=3.6)
    for rows, line, look in _by_size(gains, "total_tokens").values():
        axes.plot(rows["fused_tokens"], rows["gain"], line, **look)
    style.paper_points(axes, list(best), [each.value for each in best.values()], "SARATHI Fig. 9a, 1K")
    axes.axhline(1, color=COLOURS["slo"], linewidth=1)
    axes.set(xlabel="chunk and decodes (tokens)", ylabel="throughput over the baseline (ratio)")
    axes.set_xticks(sorted(set(gains["fused_tokens"])))
    return style.finished(figure, MODELLED, columns=4)


def _by_size(table: pd.DataFrame, size: str) -> dict[tuple[int, bool], tuple[pd.DataFrame, str, dict[str, Any]]]:
    """Rows, line style and look by size and tiles: paler is shorter, and dotted ignores tiles."""
    found: dict[tuple[int, bool], tuple[pd.DataFrame, str, dict[str, Any]]] = {}
    for each, shade in zip(sorted(set(table[size])), SIZES, strict=False):
        for tiles in (False, True):
            rows = where(table, **{size: each, "tiles": tiles})
            batch = f", batch {rows['batch'].iloc[0]}" if "batch" in rows else ""
            label = f"{each // 1024}K{batch}{'' if tiles else ', no tiles'}"
            found[each, tiles] = rows, "-" if tiles else ":", {"color": COLOURS[shade], "label": label}
    return found


@style.styled
def measured(medians: pd.DataFrame, machine: str) -> style.BookFigure:
    """What chunking costs on this machine: rows of `chunk_medians`; bars from the least to the most of a round."""
    figure, (left, right) = style.new_figure(1, 2, height=3.2, sharex=True)
    for size, (tokens, table) in zip(("size_4", "size_1"), medians.groupby("tokens"), strict=False):
        colour = COLOURS[size]
        left.plot(table["chunk_tokens"], table["tokens_per_s"], "o", color=colour, label=f"{tokens} tokens")
        spread = np.stack([table["over_whole"] - table["least"], table["most"] - table["over_whole"]])
        right.errorbar(table["chunk_tokens"], table["over_whole"], yerr=spread, capsize=3, fmt="o", color=colour)
    right.axhline(1, color=COLOURS["slo"], linewidth=1)
    left.set(xscale="log", xlabel="chunk size (tokens)", ylabel="prefill speed (tokens/s)", ylim=(0, None))
    right.set(xlabel="chunk size (tokens)", ylabel="time over a whole prefill (ratio)", ylim=(0, None))
    style.log_ticks(left, sorted(set(medians["chunk_tokens"])))
    return style.finished(figure, f"measured: {machine}")
