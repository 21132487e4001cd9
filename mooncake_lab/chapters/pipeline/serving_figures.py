"""Figures of Sarathi-Serve's machines: what a prompt does to decodes, capacity, and layouts over nodes."""

from typing import Final, cast

import numpy as np
import pandas as pd
from matplotlib.ticker import NullLocator

from mooncake_lab.figures.style import (
    COLOURS,
    COMPUTED,
    BookFigure,
    footer,
    label_lines,
    legend_above,
    new_figure,
    paper_points,
    plain_number,
    slo_line,
    styled,
)

YI: Final = "modelled: Yi-34B on two A100s, anchored to the Sarathi-Serve artifact"
_CHUNKS: Final = {512: ("size_1", "-"), 1024: ("size_3", "--"), 2048: ("size_4", "-")}
_WAYS: Final = {
    "whole prompt": ("vllm", "-"),
    "chunk 2048": ("vllm_chunked", "--"),
    "chunk 512": ("vllm_chunked", "-"),
}


@styled
def stalls_and_overhead(stalls: pd.DataFrame, overhead: pd.DataFrame, largest: float) -> BookFigure:
    """What a prompt costs decodes, and what cutting costs the prompt (Sarathi-Serve Figs. 9, 14).

    Args:
        stalls: rows of `stalls`.
        overhead: rows of `chunk_overhead`.
        largest: the largest added latency that the paper prints.
    """
    figure, (left, right) = new_figure(1, 2, height=3.6)
    decodes = int(max(stalls["decodes"]))
    for way, (colour, line) in _WAYS.items():
        rows = _where(_where(stalls, "decodes", decodes), "way", way)
        left.plot(rows["prompt_tokens"], rows["over_decode"], line, **COMPUTED, color=COLOURS[colour], label=way)
    left.axhline(largest, color=COLOURS["paper"], linewidth=1, linestyle=":")
    left.annotate(f"largest in the paper, {largest:g}", (0.02, largest), xycoords=("axes fraction", "data"),
                  xytext=(0, 3), textcoords="offset points")  # fmt: skip
    left.set(yscale="log", ylabel=f"iteration over {decodes} decodes alone (ratio)")
    for chunk, (colour, line) in _CHUNKS.items():
        rows = _where(overhead, "chunk_tokens", chunk)
        right.plot(
            rows["prompt_tokens"],
            rows["model"],
            line,
            **COMPUTED,
            color=COLOURS[colour],
            label=f"chunks of {chunk}",
        )
    paper_points(right, overhead["prompt_tokens"].tolist(), overhead["paper"].tolist(), "artifact")
    right.set(ylabel="prefill in chunks / whole (ratio)", ylim=(0.7, 1.35))
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(plain_number)
        panel.set_xlabel("prompt (tokens)")
        panel.minorticks_off()
    legend_above(figure, columns=4)
    left.set_yticks([2, 5, 10, 20, 50])
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(plain_number)
    footer(figure, YI)
    return figure


@styled
def capacities(table: pd.DataFrame, printed: pd.DataFrame) -> BookFigure:
    """Capacity over vLLM's by machine (Sarathi-Serve Figs. 10, 11): rows of `over_vllm`, and of the curve."""
    figure, (left, right) = new_figure(1, 2, height=3.2)
    rows = table[table["limit"] == "strict"].groupby("testbed", sort=False).first().reset_index()
    places = np.arange(len(rows))
    left.bar(places - 0.2, rows["vllm"], 0.4, color=COLOURS["vllm"], label="vLLM")
    left.bar(places + 0.2, rows["sarathi"], 0.4, color=COLOURS["vllm_chunked"], label="Sarathi-Serve")
    right.bar(places, rows["over_vllm"], 0.5, color=COLOURS["vllm_chunked"])
    of_paper = dict(zip(printed["series"], printed["y"], strict=True))
    known = [index for index, name in enumerate(rows["testbed"]) if name in of_paper]
    shown = [float(of_paper[rows["testbed"][index]]) for index in known]
    paper_points(right, [float(index) for index in known], shown, "paper, up to")
    left.set_ylabel("capacity, strict limit (requests/s)")
    right.set_ylabel("Sarathi-Serve over vLLM (ratio)")
    for panel in (left, right):
        panel.set_xticks(places, rows["testbed"].tolist())
        panel.grid(visible=False, axis="x")
        panel.set_ylim(0, None)
    legend_above(figure)
    seeds = min(rows["seeds"].tolist())
    drawn = "one seed" if seeds == 1 else f"means over {seeds} seeds"
    footer(figure, f"simulated: anchored to Yi-34B's artifact, the others carried over by the roofline; {drawn}")
    return figure


@styled
def layouts(table: pd.DataFrame, ratio: float, assumed_ms: float) -> BookFigure:
    """TBT of both layouts over the latency of an all-reduce (Sarathi-Serve Fig. 13).

    Args:
        table: rows of `layouts`.
        ratio: TBT of TP8 over TP4-PP2 in the paper.
        assumed_ms: the latency that capacities here assume.
    """
    figure, (axes,) = new_figure(height=3.6)
    axes.plot(table["sum_ms"], table["tensor_ms"], **COMPUTED, color=COLOURS["straw_man"], label="TP8, two nodes")
    axes.plot(table["sum_ms"], table["pipeline_ms"], color=COLOURS["here"], label="TP4-PP2")
    twice = ratio * float(table["pipeline_ms"].iloc[0])
    axes.axhline(twice, color=COLOURS["paper"], linewidth=1, linestyle=":")
    axes.annotate(
        f"paper: TP8 at {ratio:g} times TP4-PP2", (0.15, twice), xycoords=("axes fraction", "data"), ha="left",
        xytext=(0, 3), textcoords="offset points",
    )  # fmt: skip
    slo_line(axes, assumed_ms, "assumed", vertical=True)
    axes.set(xlabel="latency of an all-reduce between nodes (ms)", ylabel="decode iteration (ms)", ylim=(0, None))
    label_lines(axes)
    footer(figure, "modelled: Falcon-180B, 32 decodes with 4K of context, eight A100s in two nodes")
    return figure


def _where(table: pd.DataFrame, column: str, value: object) -> pd.DataFrame:
    """The rows that have this value in a column."""
    return cast("pd.DataFrame", table[table[column] == value])
