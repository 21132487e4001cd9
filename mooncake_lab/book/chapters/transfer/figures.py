"""Figures of transfer: layer-wise storing, ways to move bytes, bandwidth demand, latency part by part."""

from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS

_BANDWIDTH_TICKS: Final = (24, 40, 80, 160, 400)
"""Bandwidths (Gbps) far enough apart on a logarithmic axis for their labels."""
_WAYS: Final = {
    "mooncake": ("mooncake", "Transfer\nEngine, TCP"),
    "socket": ("straw_man", "plain socket"),
    "gloo": ("vllm_chunked", "Gloo"),
    "shared memory": ("dram", "shared\nmemory"),
}
_PARTS: Final = {
    "schedule": "straw_man_light",
    "prefill": "prefill",
    "transfer": "transfer",
    "load cache": "dram",
    "decode": "decode",
}


@style.styled
def storing(modelled: pd.DataFrame, second: pd.DataFrame, tokens: int, made: str) -> style.BookFigure:
    """What storing a prompt's KVCache adds to its prefill (arXiv Fig. 7), and what loading a prefix takes here.

    Args:
        modelled: the table of `store_latency`.
        second: that of `second_turns`.
        tokens: of the prefix.
        made: how the second turns were measured.
    """
    figure, (left, right) = style.new_figure(1, 2, height=3.6)
    thousands = modelled["tokens"] / 1000
    for way, label, colour in (("serialized", "serialized", "straw_man"), ("layerwise", "layer-wise", "mooncake")):
        left.plot(thousands, modelled[f"{way}_s"], color=COLOURS[colour], label=label)
        style.paper_points(left, thousands, modelled[f"paper_{way}_s"], "arXiv Fig. 7")
    left.set(xlabel="prompt (thousand tokens)", ylabel="added by storing (s)")
    style.panel_title(left, "eight A800 GPUs, modelled")
    places = np.arange(len(second))
    right.vlines(places, second["least_ms"], second["most_ms"], color=COLOURS["mooncake"])
    for column, name, label, shift in (
        ("recomputed_ms", "straw_man", "computed again, measured", 0.0),
        ("second_turn_ms", "mooncake", "prefix loaded, measured", 0.0),
        ("predicted_ms", "mooncake", "prefix loaded, predicted", 0.22),
    ):
        mark = style.COMPUTED if shift else {"marker": "o"}
        right.plot(places + shift, second[column], linestyle="", color=COLOURS[name], label=label, **mark)
    right.set_xticks(places, second["prefix_in"].str.replace(" network", "").str.replace(" ", "\n"))
    right.set_ylabel("TTFT (ms)")
    style.panel_title(right, f"live cluster, prefix of {tokens:,} tokens")
    for panel in (left, right):
        panel.set_ylim(bottom=0)
    return style.finished(figure, f"right: measured, medians and ranges; {made}", columns=3)


@style.styled
def ways(measured: pd.DataFrame, paper: pd.DataFrame, machine: str) -> style.BookFigure:
    """How long moving a cache takes by its size: the paper between two nodes, and here between two processes.

    Args:
        measured: rows of `transfer_table`.
        paper: the curve of FAST'25 Fig. 12.
        machine: that measured.
    """
    figure, panels = style.new_figure(1, 3, height=3.6)
    networks = {"4x200Gbps": "paper, 4x200 Gbps", "8x400Gbps": "paper, 8x400 Gbps"}
    for panel, (network, title) in zip(panels, networks.items(), strict=False):
        for engine in ("Gloo", "TCP", "Transfer Engine"):
            points = where(paper, series=f"{network}/{engine}")
            look: dict[str, Any] = {
                "color": COLOURS["paper"],
                "linewidth": 0.8,
                "label": engine.replace(" ", "\n"),
            }
            panel.plot(points["x"], points["y"], **look)
            style.paper_points(panel, points["x"], points["y"], "FAST'25 Fig. 12")
        panel.set(xlabel="cache (GB)", ylim=(0.005, 10))
        style.panel_title(panel, title)
    panels[0].set_ylabel("latency (s)")
    here = panels[2]
    for way, rows in measured.groupby("way", sort=False):
        colour, label = _WAYS[str(way)]
        size = rows["megabytes"]
        look = {"color": COLOURS[colour]}
        here.fill_between(size, rows["least_s"], rows["most_s"], alpha=0.15, linewidth=0, **look)
        here.plot(size, rows["seconds"], "-o", label=label, **look)
    here.set(xlabel="moved (MB)")
    style.panel_title(here, "two processes here")
    for panel in panels:
        style.log_axes(panel)
        panel.minorticks_off()
        style.label_lines(panel, [line for line in panel.get_lines() if line.get_marker() != "D"], gap=2.1)
    source = f"right: measured, medians, shaded from the fastest to the slowest round; {machine}"
    return style.finished(
        figure, source, legend=[line for line in panels[0].get_lines() if line.get_marker() == "D"][:1]
    )


@style.styled
def demand(rows: pd.DataFrame, paper: pd.DataFrame, limit_s: float) -> style.BookFigure:
    """Mean TTFT and transfer time over the bandwidth of the network (FAST'25 Fig. 13).

    Args:
        rows: of `BandwidthDemand`: streamed and not, and one without reuse.
        paper: the curve of Fig. 13.
        limit_s: the mean TTFT that the paper asks for.
    """
    figure, (left, right) = style.new_figure(1, 2, height=3.6)
    reused = where(rows, reuses=True)
    for streams, name, label in (
        (True, "mooncake", "streamed by layers"),
        (False, "mooncake_variant", "sent after prefill"),
    ):
        chosen = where(reused, streams_layers=streams)
        left.plot(chosen["gbps"], chosen["mean_ttft_s"], color=COLOURS[name], label=label)
        right.plot(chosen["gbps"], chosen["exposed_s"], color=COLOURS[name])
    after = where(reused, streams_layers=False)
    right.plot(after["gbps"], after["alone_s"], "--", color=COLOURS["optimum"], label="alone on the link")
    again = float(where(rows, reuses=False)["mean_ttft_s"].iloc[0])
    left.axhline(again, color=COLOURS["straw_man"], label="everything computed again")
    for panel, series, points in (
        (left, "average TTFT", slice(None)),
        (left, "TTFT of recomputation", slice(-1, None)),
        (right, "transfer time real", slice(None)),
        (right, "transfer time theoretical", slice(None)),
    ):
        printed = where(paper, series=series).iloc[points]
        style.paper_points(panel, printed["x"], printed["y"], "FAST'25 Fig. 13")
    style.slo_line(left, limit_s, f"{limit_s:g} s", left=True, below=True)
    left.set(ylabel="mean TTFT (s)")
    right.set(ylabel="transfer left to wait for (s)")
    for panel in (left, right):
        style.log_axes(panel)
        panel.set_xlabel("bandwidth of a node (Gbps)")
        panel.set_xticks([tick for tick in _BANDWIDTH_TICKS if tick in set(reused["gbps"])])
        panel.minorticks_off()
    first = rows.iloc[0]
    return style.finished(figure, f"{style.simulated(first['source'])}, {first['requests']} requests", columns=3)


@style.styled
def breakdown(slices: pd.DataFrame) -> style.BookFigure:
    """A request's latency part by part, by prompt length, without and with a reused prefix (FAST'25 Fig. 14).

    Args:
        slices: rows of the experiment's `breakdown`.
    """
    figure, panels = style.new_figure(1, 2, height=3.6)
    for panel, (percent, rows) in zip(panels, slices.groupby("reused_percent"), strict=True):
        ours, theirs = (rows.pivot_table(side, "tokens", "part") for side in ("model_s", "paper_s"))
        parts = {part: (ours[part], COLOURS[colour]) for part, colour in _PARTS.items()}
        style.stacked(panel, range(len(ours)), parts, hatches={"decode": style.HATCHES["decode"]})
        tops = theirs[list(_PARTS)].cumsum(axis=1)
        for part in ("prefill", "load cache", "decode"):
            style.paper_points(panel, range(len(ours)), tops[part], "FAST'25 Fig. 14")
        panel.set_xticks(range(len(ours)), [f"{tokens // 1024}k" for tokens in ours.index])
        panel.set(xlabel="prompt (tokens)", ylabel="latency (s)")
        style.panel_title(panel, f"{percent} % of the prompt reused")
    return style.finished(figure, f"stacked: {style.PAPER_NODES}; diamonds: tops of the paper's slices")
