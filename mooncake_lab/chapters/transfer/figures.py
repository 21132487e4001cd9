"""Figures of transfer: layer-wise storing, ways to move bytes, bandwidth demand, latency part by part."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from mooncake_lab.figures.style import (
    COLOURS,
    COMPUTED,
    HATCHES,
    PAPER_NODES,
    BookFigure,
    footer,
    label_lines,
    legend_above,
    new_figure,
    panel_title,
    paper_points,
    plain_number,
    slo_line,
    styled,
)

_BANDWIDTH_TICKS: Final = (24, 40, 80, 160, 400)
"""Bandwidths (Gbps) far enough apart on a logarithmic axis for their labels."""
_WAY_COLOURS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mooncake": COLOURS["mooncake"],
        "Transfer Engine": COLOURS["mooncake"],
        "socket": COLOURS["straw_man"],
        "TCP": COLOURS["straw_man"],
        "gloo": COLOURS["vllm_chunked"],
        "Gloo": COLOURS["vllm_chunked"],
        "shared memory": COLOURS["dram"],
    }
)
_WAY_LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mooncake": "Transfer\nEngine, TCP",
        "socket": "plain socket",
        "gloo": "Gloo",
        "shared memory": "shared\nmemory",
    }
)
_PART_COLOURS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "schedule": COLOURS["straw_man_light"],
        "prefill": COLOURS["prefill"],
        "transfer": COLOURS["transfer"],
        "load cache": COLOURS["dram"],
        "decode": COLOURS["decode"],
    }
)


@styled
def storing(modelled: pd.DataFrame, second: pd.DataFrame, tokens: int, made: str) -> BookFigure:
    """What storing a prompt's KVCache adds to its prefill (arXiv Fig. 7), and what loading a prefix takes here.

    Args:
        modelled: the table of `store_latency`.
        second: that of `second_turns`.
        tokens: of the prefix.
        made: how the second turns were measured.
    """
    figure, (left, right) = new_figure(1, 2, height=3.6)
    for way, colour in (("serialized", COLOURS["straw_man"]), ("layerwise", COLOURS["mooncake"])):
        label = "layer-wise" if way == "layerwise" else way
        left.plot(modelled["tokens"] / 1000, modelled[f"{way}_s"], color=colour, label=label)
        paper_points(left, modelled["tokens"] / 1000, modelled[f"paper_{way}_s"], "arXiv Fig. 7")
    left.set(xlabel="prompt (thousand tokens)", ylabel="added by storing (s)")
    panel_title(left, "eight A800 GPUs, modelled")
    left.set_ylim(bottom=0)
    places = np.arange(len(second))
    right.vlines(places, second["least_ms"], second["most_ms"], color=COLOURS["mooncake"])
    for column, name, label, mark in (
        ("recomputed_ms", "straw_man", "computed again, measured", {"marker": "o"}),
        ("second_turn_ms", "mooncake", "prefix loaded, measured", {"marker": "o"}),
        ("predicted_ms", "mooncake", "prefix loaded, predicted", COMPUTED),
    ):
        shift = 0.22 if column == "predicted_ms" else 0.0
        right.plot(places + shift, second[column], linestyle="", color=COLOURS[name], label=label, **mark)
    right.set_xticks(places, [str(place).replace(" ", "\n") for place in second["prefix_in"]])
    right.set(ylabel="TTFT (ms)")
    right.set_ylim(bottom=0)
    panel_title(right, f"live cluster, prefix of {tokens:,} tokens")
    legend_above(figure, columns=3)
    footer(figure, f"right: measured, medians and ranges; {made}")
    return figure


@styled
def ways(measured: pd.DataFrame, paper: pd.DataFrame, machine: str) -> BookFigure:
    """How long moving a cache takes by its size: the paper between two nodes, and here between two processes.

    Args:
        measured: rows of `transfer_table`.
        paper: the curve of FAST'25 Fig. 12.
        machine: that measured.
    """
    figure, panels = new_figure(1, 3, height=3.6)
    networks = {"4x200Gbps": "paper, 4x200 Gbps", "8x400Gbps": "paper, 8x400 Gbps"}
    for panel, (network, title) in zip(panels, networks.items(), strict=False):
        for engine in ("Gloo", "TCP", "Transfer Engine"):
            points = paper[paper["series"] == f"{network}/{engine}"]
            paper_points(panel, points["x"], points["y"], "FAST'25 Fig. 12")
            panel.plot(
                points["x"], points["y"], color=COLOURS["paper"], linewidth=0.8, label=engine.replace(" ", "\n")
            )
        panel.set(xlabel="cache (GB)", ylim=(0.005, 10))
        panel_title(panel, title)
    panels[0].set_ylabel("latency (s)")
    here = panels[2]
    for way, rows in measured.groupby("way", sort=False):
        colour = _WAY_COLOURS[str(way)]
        label = _WAY_LABELS.get(str(way), str(way))
        here.fill_between(
            rows["megabytes"], rows["least_s"], rows["most_s"], color=colour, alpha=0.15, linewidth=0
        )
        here.plot(rows["megabytes"], rows["seconds"], "-o", color=colour, label=label)
    here.set(xlabel="moved (MB)")
    panel_title(here, "two processes here")
    for panel in panels:
        panel.set(xscale="log", yscale="log")
        panel.xaxis.set_major_formatter(plain_number)
        panel.yaxis.set_major_formatter(plain_number)
        panel.minorticks_off()
        label_lines(panel, [line for line in panel.get_lines() if line.get_marker() != "D"], gap=2.1)
    legend_above(figure, [line for line in panels[0].get_lines() if line.get_marker() == "D"][:1])
    footer(figure, f"right: measured, medians, shaded from the fastest to the slowest round; {machine}")
    return figure


@styled
def demand(rows: pd.DataFrame, paper: pd.DataFrame, limit_s: float) -> BookFigure:
    """Mean TTFT and transfer time over the bandwidth of the network (FAST'25 Fig. 13).

    Args:
        rows: of `BandwidthDemand`: streamed and not, and one without reuse.
        paper: the curve of Fig. 13.
        limit_s: the mean TTFT that the paper asks for.
    """
    figure, (left, right) = new_figure(1, 2, height=3.6)
    reused = rows[rows["reuses"]]
    for streams, name, label in (
        (True, "mooncake", "streamed by layers"),
        (False, "mooncake_variant", "sent after prefill"),
    ):
        chosen = reused[reused["streams_layers"] == streams]
        left.plot(chosen["gbps"], chosen["mean_ttft_s"], color=COLOURS[name], label=label)
        right.plot(chosen["gbps"], chosen["exposed_s"], color=COLOURS[name], label="_")
        if not streams:
            right.plot(
                chosen["gbps"], chosen["alone_s"], "--", color=COLOURS["optimum"], label="alone on the link"
            )
    again = float(rows.loc[~rows["reuses"], "mean_ttft_s"].to_list()[0])
    left.axhline(again, color=COLOURS["straw_man"], label="everything computed again")
    drawn = {str(series): points for series, points in paper.groupby("series", sort=False)}
    paper_points(left, drawn["average TTFT"]["x"], drawn["average TTFT"]["y"], "FAST'25 Fig. 13")
    recomputed = drawn["TTFT of recomputation"].iloc[-1]
    paper_points(left, [recomputed["x"]], [recomputed["y"]], "FAST'25 Fig. 13")
    for series in ("transfer time real", "transfer time theoretical"):
        paper_points(right, drawn[series]["x"], drawn[series]["y"], "FAST'25 Fig. 13")
    slo_line(left, limit_s, f"{limit_s:g} s", left=True, below=True)
    left.set(ylabel="mean TTFT (s)")
    right.set(ylabel="transfer left to wait for (s)")
    for panel in (left, right):
        panel.set(xscale="log", yscale="log", xlabel="bandwidth of a node (Gbps)")
        panel.set_xticks([tick for tick in _BANDWIDTH_TICKS if tick in set(reused["gbps"])])
        panel.minorticks_off()
        panel.xaxis.set_major_formatter(plain_number)
        panel.yaxis.set_major_formatter(plain_number)
    legend_above(figure, columns=3)
    footer(figure, f"simulated: {PAPER_NODES}; {rows['source'].iloc[0]}, {int(rows['requests'].iloc[0])} requests")
    return figure


@styled
def breakdown(slices: pd.DataFrame) -> BookFigure:
    """A request's latency part by part, by prompt length, without and with a reused prefix (FAST'25 Fig. 14).

    Args:
        slices: rows of the experiment's `breakdown`.
    """
    figure, panels = new_figure(1, 2, height=3.6)
    for panel, (percent, rows) in zip(panels, slices.groupby("reused_percent"), strict=True):
        _stack(panel, rows)
        panel.set(xlabel="prompt (tokens)", ylabel="latency (s)")
        panel_title(panel, f"{percent} % of the prompt reused")
    legend_above(figure)
    footer(figure, f"stacked: {PAPER_NODES}; diamonds: tops of the paper's slices")
    return figure


def _stack(panel: Axes, rows: pd.DataFrame) -> None:
    lengths = sorted(set(rows["tokens"]))
    places = np.arange(len(lengths))
    ours, theirs = np.zeros(len(lengths)), np.zeros(len(lengths))
    for part, slice_ in rows.groupby("part", sort=False):
        heights = slice_.sort_values("tokens")
        hatch = HATCHES["decode"] if part == "decode" else ""
        panel.bar(
            places, heights["model_s"], bottom=ours, color=_PART_COLOURS[str(part)], edgecolor="white",
            hatch=hatch, label=str(part),
        )  # fmt: skip
        ours, theirs = ours + heights["model_s"].to_numpy(), theirs + heights["paper_s"].to_numpy()
        if part in ("prefill", "load cache", "decode"):
            paper_points(panel, places, theirs, "FAST'25 Fig. 14")
    panel.set_xticks(places, [f"{tokens // 1024}k" for tokens in lengths])
