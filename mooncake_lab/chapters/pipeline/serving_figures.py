"""Figures of chapter 06: Sarathi-Serve's machines, and prompts shared by several nodes or processes."""

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.ticker import NullLocator

from mooncake_lab.experiments import where
from mooncake_lab.figures.style import (
    COLOURS,
    COMPUTED,
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

YI: Final = "modelled: Yi-34B on two A100s, anchored to the Sarathi-Serve artifact"
_CHUNKS: Final = {512: ("size_1", "-"), 1024: ("size_3", "--"), 2048: ("size_4", "-")}
_PROMPT_WAYS: Final = {
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
    for way, (colour, line) in _PROMPT_WAYS.items():
        rows = where(stalls, decodes=decodes, way=way)
        left.plot(rows["prompt_tokens"], rows["over_decode"], line, **COMPUTED, color=COLOURS[colour], label=way)
    left.axhline(largest, color=COLOURS["paper"], linewidth=1, linestyle=":")
    left.annotate(f"largest in the paper, {largest:g}", (0.02, largest), xycoords=("axes fraction", "data"),
                  xytext=(0, 3), textcoords="offset points")  # fmt: skip
    left.set(yscale="log", ylabel=f"iteration over {decodes} decodes alone (ratio)")
    for chunk, (colour, line) in _CHUNKS.items():
        rows = where(overhead, chunk_tokens=chunk)
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


NODE: Final = "modelled: LLaMA3-70B on nodes of 8 A800, fitted to FAST'25 Fig. 14; over 128k tokens extrapolated"
_WAYS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "CPP": ("mooncake", "-"),
        "sequence parallel": ("remote", "--"),
        "tensor parallel": ("straw_man", ":"),
    }
)
_POLICIES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "vLLM": ("vllm", "-"),
        "Orca": ("straw_man", "-"),
        "Sarathi-Serve 512": ("vllm_chunked", "-"),
        "Sarathi-Serve 2048": ("vllm_chunked", "--"),
    }
)


@styled
def long_prompts(table: pd.DataFrame) -> BookFigure:
    """Speed-up, model FLOPs utilisation and bytes by prompt length on the most nodes: rows of `three_ways`."""
    figure, panels = new_figure(1, 3, height=3.2)
    nodes = int(max(table["nodes"]))
    rows = where(table, nodes=nodes)
    for way, (colour, line) in _WAYS.items():
        each = where(rows, way=way).sort_values("tokens")
        thousands = each["tokens"] / 1024
        panels[0].plot(thousands, each["speed_up"], line, **COMPUTED, color=COLOURS[colour], label=way)
        panels[1].plot(thousands, 100 * each["mfu"], line, **COMPUTED, color=COLOURS[colour], label=way)
        panels[2].plot(thousands, each["network_gb"], line, **COMPUTED, color=COLOURS[colour], label=way)
    panels[0].set(ylabel=f"speed-up by {nodes} nodes (ratio)", ylim=(0, nodes * 1.03))
    panels[1].set(ylabel="model FLOPs utilisation (%)", ylim=(0, 100))
    panels[2].set(ylabel="moved between nodes (GB/prompt)", yscale="log")
    panels[2].yaxis.set_major_formatter(plain_number)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks((rows["tokens"] / 1024).unique().tolist())
        panel.xaxis.set_major_formatter(plain_number)
        panel.set_xlabel("prompt (1024 tokens)")
    legend_above(figure)
    footer(figure, NODE)
    return figure


@styled
def busy_network(table: pd.DataFrame) -> BookFigure:
    """Time to first token over what is left of the network: rows of `three_ways` over bandwidth shares."""
    figure, (axes,) = new_figure(height=3.3)
    for way, (colour, line) in _WAYS.items():
        each = where(table, way=way).sort_values("bandwidth_share")
        axes.plot(
            100 * each["bandwidth_share"], each["ttft_s"], line, **COMPUTED, color=COLOURS[colour], label=way
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(plain_number)
    axes.yaxis.set_major_formatter(plain_number)
    axes.set_xticks([100 * share for share in sorted(set(table["bandwidth_share"].tolist()))])
    axes.minorticks_off()
    axes.set_yticks([5, 10, 20, 50, 100])
    axes.set(xlabel="network left for the prefill (%)", ylabel="TTFT of 128k tokens (s)")
    label_lines(axes)
    footer(figure, NODE)
    return figure


@styled
def chunks(table: pd.DataFrame) -> BookFigure:
    """Speed-up by four nodes over the length of a chunk: rows of `chunk_sweep`."""
    figure, (axes,) = new_figure(height=3.3)
    colours = ("size_1", "size_3", "size_4")
    shades = dict(zip(sorted(set(table["tokens"].tolist())), colours, strict=False))
    for tokens, constant_ms in sorted({*zip(table["tokens"], table["chunk_constant_ms"], strict=True)}):
        each = where(table, tokens=tokens, chunk_constant_ms=constant_ms)
        axes.plot(
            each["chunk_tokens"], each["speed_up"], "-" if not constant_ms else "--", **COMPUTED,
            color=COLOURS[shades[tokens]],
            label=f"{int(tokens) // 1024}k tokens" + (f", {constant_ms:g} ms a chunk" if constant_ms else ""),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(plain_number)
    axes.set(xlabel="chunk (tokens)", ylabel="speed-up by 4 nodes (ratio)", ylim=(0, 4.1))
    legend_above(figure, columns=3)
    footer(figure, NODE)
    return figure


@styled
def runahead(table: pd.DataFrame) -> BookFigure:
    """Gain of KV-Runahead over gathering by prompt length, a panel a network: rows of `runahead_sweep`."""
    networks = sorted(set(table["gb_per_s"].tolist()), reverse=True)
    figure, panels = new_figure(1, len(networks), height=3.3, sharey=True)
    shades = {2: "size_1", 4: "size_3", 8: "size_4"}
    for panel, network in zip(panels, networks, strict=True):
        for processes, each in where(table, gb_per_s=network).groupby("processes"):
            colour, thousands = COLOURS[shades[int(str(processes))]], each["tokens"] / 1024
            panel.plot(thousands, each["gain"], **COMPUTED, color=colour, label=f"{processes} GPUs, best slices")
            even = each["gathered_ms"] / each["even_ms"]
            panel.plot(thousands, even, ":", color=colour, label=f"{processes} GPUs, even slices")
        panel.axhline(1.0, color=COLOURS["straw_man"], linewidth=1)
        panel.set_xlabel("prompt (thousand tokens)")
        panel_title(panel, f"{network:g} GB/s")
    panels[0].set(ylabel="TTFT gathering / KV-Runahead (ratio)", ylim=(0, None))
    legend_above(figure, columns=3)
    footer(figure, "modelled: LLaMA-7B on A100s at half their peak, matrices and attention alike")
    return figure


@styled
def slices(table: pd.DataFrame) -> BookFigure:
    """Which tokens each process takes, by setting: rows of `runahead_sweep` with few settings."""
    figure, (axes,) = new_figure(height=0.55 * len(table) + 1.4)
    names: list[str] = []
    for place, row in enumerate(table.to_dict("records")):
        ends = [0, *(int(bound) for bound in str(row["bounds"]).split())]
        for rank, (start, stop) in enumerate(pairwise(ends)):
            shade = COLOURS[f"size_{1 + 4 * rank // int(row['processes'])}"]
            axes.barh(place, stop - start, left=start, color=shade, edgecolor="white")
        names.append(f"{row['gb_per_s']:g}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="prompt (tokens)", ylabel="network (GB/s)")
    footer(figure, "modelled: LLaMA-7B on A100s; darker is further down the chain")
    return figure


@styled
def capacity(served: pd.DataFrame, table: pd.DataFrame, strict_s: float, relaxed_s: float) -> BookFigure:
    """P99 TBT over load, and capacity over the limit on it (Sarathi-Serve Figs. 10, 12): rows of both tables."""
    figure, (left, right) = new_figure(1, 2, height=3.3)
    for policy, (colour, line) in _POLICIES.items():
        each = where(served, policy=policy).sort_values("rate")
        if len(each):
            left.plot(
                each["rate"], 1000 * each["p99_tbt_s"], line, **COMPUTED, color=COLOURS[colour], label=policy
            )
        each = where(table, policy=policy).sort_values("slo_s")
        if len(each):
            right.plot(
                1000 * each["slo_s"], each["requests_per_s"], line, **COMPUTED, color=COLOURS[colour], label=policy
            )
    slo_line(left, 1000 * strict_s, f"strict, {1000 * strict_s:g} ms", below=True)
    slo_line(left, 1000 * relaxed_s, f"relaxed, {1000 * relaxed_s:g} ms", left=True)
    left.set(xlabel="arrivals (requests/s)", ylabel="P99 TBT (ms)", ylim=(0, None))
    right.set(xlabel="limit on P99 TBT (ms)", ylabel="capacity (requests/s)", ylim=(0, None))
    legend_above(figure)
    footer(figure, "simulated: Yi-34B on two A100s, anchored to the Sarathi-Serve artifact; one seed of arrivals")
    return figure
