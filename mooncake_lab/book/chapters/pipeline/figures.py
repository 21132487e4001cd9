"""Figures of chapter 06: pipelines and their bubbles, prompts shared by nodes or processes, Sarathi-Serve."""

from collections.abc import Mapping
from itertools import pairwise
from textwrap import fill
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS, FRAME, GROUND
from mooncake_lab.core import sum_in_order

MODELLED: Final = "simulated: GPT-3 on 64 A100s, iteration costs carried over from SARATHI Table 2 and Fig. 7"
YI: Final = "modelled: Yi-34B on two A100s, anchored to the Sarathi-Serve artifact"
NODE: Final = "modelled: LLaMA3-70B on nodes of 8 A800, fitted to FAST'25 Fig. 14; over 128k tokens extrapolated"
_SCHEMES: Final = {
    "Orca-best": ("straw_man", "-"),
    "TP8 replicas": ("straw_man", "--"),
    "SARATHI": ("vllm_chunked", "-"),
}
_WORK: Final = {"prompts": ("prefill", ""), "both": ("vllm_chunked", ""), "decodes": ("decode", "///")}
_IDLE: Final = {
    "fill": FRAME["grid"][0],
    "drain": FRAME["shade"][0],
    "PB1": COLOURS["pb1"],
    "PB2": COLOURS["pb2"],
    "PB3": COLOURS["pb3"],
    "no work": GROUND,
}
_CHUNKS: Final = {512: ("size_1", "-"), 1024: ("size_3", "--"), 2048: ("size_4", "-")}
_PROMPT_WAYS: Final = {
    "whole prompt": ("vllm", "-"),
    "chunk 2048": ("vllm_chunked", "--"),
    "chunk 512": ("vllm_chunked", "-"),
}
_WAYS: Final = {
    "CPP": ("mooncake", "-"),
    "sequence parallel": ("remote", "--"),
    "tensor parallel": ("straw_man", ":"),
}
_POLICIES: Final = {
    "vLLM": ("vllm", "-"),
    "Orca": ("straw_man", "-"),
    "Sarathi-Serve 512": ("vllm_chunked", "-"),
    "Sarathi-Serve 2048": ("vllm_chunked", "--"),
}
_OURS: Final[dict[str, Any]] = {**style.COMPUTED, "color": COLOURS["vllm_chunked"]}


@style.styled
def timelines(runs: Mapping[str, pd.DataFrame]) -> style.BookFigure:
    """Two stages iteration by iteration, gaps by cause (SARATHI Figs. 1 and 5): rows of `timeline` by scheme."""
    figure, panels = style.new_figure(len(runs), 1, height=1.3 * len(runs) + 0.9, sharex=True)
    for panel, (scheme, rows) in zip(panels, runs.items(), strict=True):
        _timeline(panel, rows)
        panel.set_ylabel(f"{scheme}\n(stage)")
    panels[-1].set_xlabel("time (ms)")
    keys = [Patch(facecolor=COLOURS[c], hatch=h, edgecolor="white", label=n) for n, (c, h) in _WORK.items()]
    edge = FRAME["axis"][0]
    keys += [Patch(facecolor=_IDLE[name], edgecolor=edge, label=name) for name in ("PB1", "PB2", "PB3")]
    source = "simulated: six requests through GPT-3 in two stages; letters name the micro-batch"
    return style.finished(figure, source, legend=keys)


def _timeline(panel: Axes, rows: pd.DataFrame) -> None:
    for row in rows.to_dict("records"):
        start, width, what = float(row["start_ms"]), float(row["end_ms"] - row["start_ms"]), str(row["what"])
        place = float(row["stage"])
        if what in _WORK:
            colour, hatch = _WORK[what]
            panel.barh(place, width, left=start, height=0.8, color=COLOURS[colour], hatch=hatch, edgecolor="white")
            if width > 22:
                letter, at = "AB"[int(row["micro_batch"])], start + width / 2
                panel.text(at, place, letter, ha="center", va="center", color=GROUND)
        elif what not in {"fill", "drain"}:
            look: dict[str, Any] = {"color": _IDLE[what], "edgecolor": FRAME["axis"][0], "linewidth": 0.6}
            panel.barh(place, width, left=start, height=0.8, **look)
    style.rows_down(panel, [str(stage + 1) for stage in range(int(max(rows["stage"])) + 1)])


@style.styled
def bubbles_and_completion(bubbles: pd.DataFrame, done: pd.DataFrame, paper: pd.DataFrame) -> style.BookFigure:
    """Bubble time of requests, and requests done over time (SARATHI Fig. 12): quantile rows, the curve."""
    figure, (left, right) = style.new_figure(1, 2, height=3.4)
    last_s = max(where(done, scheme="SARATHI")["value"].tolist())
    waits = bubbles[bubbles["scheme"] != "TP8 replicas"].assign(percent=100 * bubbles["share"])
    style.curves(left, waits, "value", "percent", "scheme", _SCHEMES, drawstyle="steps-pre")
    over = done.assign(percent=100 * done["share"], ratio=done["value"] / last_s)
    style.curves(right, over, "ratio", "percent", "scheme", _SCHEMES)
    style.log_axes(left, "x")
    left.set(xlabel="idle time before a request's iterations (s)", ylabel="requests (%)", ylim=(0, 101))
    ratios = paper[paper["x"] == "time_over_sarathi"]["y"]
    style.paper_points(right, [1.0, *ratios], [100] * (1 + len(ratios)), "SARATHI Fig. 12b")
    right.set(xlabel="time / completion under SARATHI (ratio)", ylabel="requests done (%)", ylim=(0, 104))
    return style.finished(figure, MODELLED)


@style.styled
def causes(shares: pd.DataFrame) -> style.BookFigure:
    """What the stages spent their time on, by scheme: the table of `shares_by_cause`."""
    figure, (axes,) = style.new_figure(height=2.8)
    names = [str(name) for name in shares.columns if name == "busy" or sum_in_order(shares[name]) >= 0.005]
    parts = {name: (shares[name], COLOURS["size_1"] if name == "busy" else _IDLE[name]) for name in names}
    style.stacked(axes, range(len(shares)), parts, across=True, edgecolor=FRAME["axis"][0], linewidth=0.5)
    style.rows_down(axes, [str(scheme) for scheme in shares.index])
    axes.set(xlabel="time of all stages (%)", xlim=(0, 100))
    return style.finished(figure, MODELLED, columns=7)


@style.styled
def sensitivity(table: pd.DataFrame, paper: pd.DataFrame) -> style.BookFigure:
    """The three ratios of completion over the cost of a decode iteration: rows of `sensitivity`, the curve."""
    figure, panels = style.new_figure(1, 3, height=3.2, sharex=True)
    orca = "Orca-best, TP8 x PP8"
    shown = (
        ("orca_over_sarathi", "Orca / SARATHI (ratio)", orca, "time_over_sarathi"),
        ("replicas_over_sarathi", "TP8 replicas / SARATHI (ratio)", "TP8 replicas", "time_over_sarathi"),
        (
            "bubbles_orca_over_sarathi",
            "median bubble, Orca / SARATHI (ratio)",
            orca,
            "median_bubble_over_sarathi",
        ),
    )
    for panel, (column, label, series, x) in zip(panels, shown, strict=True):
        for overhead, rows in table.groupby("overhead_ms_a_layer"):
            ordered, line = rows.sort_values("prompt_over_decode"), "--" if overhead else "-"
            name = f"{overhead:g} ms a layer beside the roofline"
            panel.plot(ordered["prompt_over_decode"], ordered[column], line, label=name, **_OURS)
        printed = float(where(paper, series=series, x=x)["y"].iloc[0])
        style.printed_line(panel, printed, f"paper {printed:g}")
        panel.set(xlabel="prompt of 2K /\ndecode of 27 (ratio)", ylabel=fill(label, 24), ylim=(0, None))
    return style.finished(figure, MODELLED)


@style.styled
def chunk_sizes(runs: pd.DataFrame, orca: pd.DataFrame) -> style.BookFigure:
    """Idle share and completion over the fused chunk: runs of SARATHI by `fused_tokens`, and one of Orca-best."""
    figure, panels = style.new_figure(1, 2, height=3.0)
    ordered = runs.sort_values("fused_tokens")
    labels = {"idle_share": "idle time of all stages (%)", "completion_s": "completion of all requests (s)"}
    for panel, (column, label), unit in zip(panels, labels.items(), (100, 1), strict=True):
        panel.plot(ordered["fused_tokens"], unit * ordered[column], **_OURS)
        value = unit * float(orca[column].iloc[0])
        panel.axhline(value, color=COLOURS["straw_man"])
        panel.annotate("Orca-best", (1.0, value), xycoords=("axes fraction", "data"), ha="right",
                       xytext=(0, 3), textcoords="offset points")  # fmt: skip
        panel.set(xlabel="chunk and decodes together (tokens)", ylabel=label, ylim=(0, None))
        panel.set_xscale("log", base=2)
        panel.set_xticks(ordered["fused_tokens"].tolist(), ordered["fused_tokens"].astype(str).tolist())
    return style.finished(figure, MODELLED, legend=False)


@style.styled
def measured(rows: Mapping[str, pd.DataFrame], machine: str) -> style.BookFigure:
    """Who computed and who waited when, on this machine: rows of `long.live_timeline`, by way."""
    figure, panels = style.new_figure(len(rows), 1, height=1.1 * len(rows) + 1.0, sharex=True)
    for panel, (way, table) in zip(panels, rows.items(), strict=True):
        for what, label, colour, height in (
            ("compute", "computes", "prefill", 0.7),
            ("wait", "waits", "straw_man_light", 0.25),
        ):
            mine = where(table, what=what)
            spans: dict[str, Any] = {"left": mine["start_ms"], "height": height, "color": COLOURS[colour]}
            widths = mine["end_ms"] - mine["start_ms"]
            panel.barh(mine["rank"], widths, label=label, edgecolor="white", linewidth=0.8, **spans)
        style.rows_down(panel, [str(rank) for rank in sorted(set(table["rank"]))])
        panel.set_ylabel(f"{way}\n(process)")
    panels[-1].set_xlabel("time (ms)")
    return style.finished(figure, f"measured: {machine}; each process computes with one thread")


@style.styled
def stalls_and_overhead(stalls: pd.DataFrame, overhead: pd.DataFrame, largest: float) -> style.BookFigure:
    """What a prompt costs decodes, and what cutting costs the prompt (Sarathi-Serve Figs. 9, 14).

    Args:
        stalls: rows of `stalls`.
        overhead: rows of `chunk_overhead`.
        largest: the largest added latency that the paper prints.
    """
    figure, (left, right) = style.new_figure(1, 2, height=3.6)
    decodes = int(max(stalls["decodes"]))
    waits = where(stalls, decodes=decodes)
    style.curves(left, waits, "prompt_tokens", "over_decode", "way", _PROMPT_WAYS, **style.COMPUTED)
    style.printed_line(left, largest, f"largest in the paper, {largest:g}")
    cut = overhead.assign(chunks="chunks of " + overhead["chunk_tokens"].astype(str))
    looks = {f"chunks of {chunk}": look for chunk, look in _CHUNKS.items()}
    style.curves(right, cut, "prompt_tokens", "model", "chunks", looks, **style.COMPUTED)
    style.paper_points(right, overhead["prompt_tokens"], overhead["paper"], "artifact")
    for panel in (left, right):
        style.log_axes(panel, "x", base=2)
        panel.set_xlabel("prompt (tokens)")
        panel.minorticks_off()
    style.log_axes(left, "y")
    left.set_yticks([2, 5, 10, 20, 50])
    left.yaxis.set_minor_locator(NullLocator())
    left.set_ylabel(f"iteration over {decodes} decodes alone (ratio)")
    right.set(ylabel="prefill in chunks / whole (ratio)", ylim=(0.7, 1.35))
    return style.finished(figure, YI, columns=4)


@style.styled
def capacities(table: pd.DataFrame, printed: pd.DataFrame) -> style.BookFigure:
    """Capacity over vLLM's by machine (Sarathi-Serve Figs. 10, 11): rows of `over_vllm`, and of the curve."""
    figure, (left, right) = style.new_figure(1, 2, height=3.2)
    searched = where(table, limit="strict").dropna(subset="sarathi")
    rows = searched.groupby("testbed", sort=False).first().reset_index()
    places = np.arange(len(rows))
    left.bar(places - 0.2, rows["vllm"], 0.4, color=COLOURS["vllm"], label="vLLM")
    left.bar(places + 0.2, rows["sarathi"], 0.4, color=COLOURS["vllm_chunked"], label="Sarathi-Serve")
    right.bar(places, rows["over_vllm"], 0.5, color=COLOURS["vllm_chunked"])
    known = printed[printed["series"].isin(rows["testbed"])]
    style.paper_points(right, [rows["testbed"].tolist().index(name) for name in known["series"]], known["y"],
                       "paper, up to")  # fmt: skip
    left.set_ylabel("capacity, strict limit (requests/s)")
    right.set_ylabel("Sarathi-Serve over vLLM (ratio)")
    for panel in (left, right):
        panel.set_xticks(places, rows["testbed"].tolist())
        panel.grid(visible=False, axis="x")
        panel.set_ylim(0, None)
    seeds = min(rows["seeds"].tolist())
    drawn = "one seed" if seeds == 1 else f"means over {seeds} seeds"
    source = "simulated: anchored to Yi-34B's artifact, the others carried over by the roofline"
    return style.finished(figure, f"{source}; {drawn}")


@style.styled
def layouts(table: pd.DataFrame, ratio: float, assumed_ms: float) -> style.BookFigure:
    """TBT of both layouts over the latency of an all-reduce (Sarathi-Serve Fig. 13).

    Args:
        table: rows of `layouts`.
        ratio: TBT of TP8 over TP4-PP2 in the paper.
        assumed_ms: the latency that capacities here assume.
    """
    figure, (axes,) = style.new_figure(height=3.6)
    tensor: dict[str, Any] = {**style.COMPUTED, "color": COLOURS["straw_man"], "label": "TP8, two nodes"}
    axes.plot(table["sum_ms"], table["tensor_ms"], **tensor)
    axes.plot(table["sum_ms"], table["pipeline_ms"], color=COLOURS["here"], label="TP4-PP2")
    twice = ratio * float(table["pipeline_ms"].iloc[0])
    style.printed_line(axes, twice, f"paper: TP8 at {ratio:g} times TP4-PP2", at=0.15)
    style.slo_line(axes, assumed_ms, "assumed", vertical=True)
    axes.set(xlabel="latency of an all-reduce between nodes (ms)", ylabel="decode iteration (ms)", ylim=(0, None))
    style.label_lines(axes)
    source = "modelled: Falcon-180B, 32 decodes with 4K of context, eight A100s in two nodes"
    return style.finished(figure, source, legend=False)


@style.styled
def long_prompts(table: pd.DataFrame) -> style.BookFigure:
    """Speed-up, model FLOPs utilisation and bytes by prompt length on the most nodes: rows of `three_ways`."""
    figure, panels = style.new_figure(1, 3, height=3.2)
    nodes = int(max(table["nodes"]))
    rows = where(table, nodes=nodes).assign(thousands=table["tokens"] / 1024, percent=100 * table["mfu"])
    for panel, column in zip(panels, ("speed_up", "percent", "network_gb"), strict=True):
        style.curves(panel, rows, "thousands", column, "way", _WAYS, **style.COMPUTED)
        style.log_axes(panel, "x", base=2)
        panel.set_xticks(rows["thousands"].unique().tolist())
        panel.set_xlabel("prompt (1024 tokens)")
    panels[0].set(ylabel=f"speed-up by {nodes} nodes (ratio)", ylim=(0, nodes * 1.03))
    panels[1].set(ylabel="model FLOPs utilisation (%)", ylim=(0, 100))
    style.log_axes(panels[2], "y")
    panels[2].set_ylabel("moved between nodes (GB/prompt)")
    return style.finished(figure, NODE)


@style.styled
def busy_network(table: pd.DataFrame) -> style.BookFigure:
    """Time to first token over what is left of the network: rows of `three_ways` over bandwidth shares."""
    figure, (axes,) = style.new_figure(height=3.3)
    rows = table.assign(percent=100 * table["bandwidth_share"])
    style.curves(axes, rows, "percent", "ttft_s", "way", _WAYS, **style.COMPUTED)
    style.log_axes(axes)
    axes.set_xticks(sorted(set(rows["percent"])))
    axes.minorticks_off()
    axes.set_yticks([5, 10, 20, 50, 100])
    axes.set(xlabel="network left for the prefill (%)", ylabel="TTFT of 128k tokens (s)")
    style.label_lines(axes)
    return style.finished(figure, NODE, legend=False)


@style.styled
def chunks(table: pd.DataFrame) -> style.BookFigure:
    """Speed-up by four nodes over the length of a chunk: rows of `chunk_sweep`."""
    figure, (axes,) = style.new_figure(height=3.3)
    for (_, rows), size in zip(table.groupby("tokens"), ("size_1", "size_3", "size_4"), strict=False):
        for constant_ms, each in rows.groupby("chunk_constant_ms"):
            tokens = int(each["tokens"].iloc[0])
            more = f", {constant_ms:g} ms a chunk" if constant_ms else ""
            look: dict[str, Any] = {
                **style.COMPUTED,
                "color": COLOURS[size],
                "label": f"{tokens // 1024}k tokens{more}",
            }
            axes.plot(each["chunk_tokens"], each["speed_up"], "--" if constant_ms else "-", **look)
    style.log_axes(axes, "x", base=2)
    axes.set(xlabel="chunk (tokens)", ylabel="speed-up by 4 nodes (ratio)", ylim=(0, 4.1))
    return style.finished(figure, NODE, columns=3)


@style.styled
def runahead(table: pd.DataFrame) -> style.BookFigure:
    """Gain of KV-Runahead over gathering by prompt length, a panel a network: rows of `runahead_sweep`."""
    networks = sorted(set(table["gb_per_s"]), reverse=True)
    figure, panels = style.new_figure(1, len(networks), height=3.3, sharey=True)
    for panel, network in zip(panels, networks, strict=True):
        for processes, size in ((2, "size_1"), (4, "size_3"), (8, "size_4")):
            each = where(table, gb_per_s=network, processes=processes)
            thousands, colour = each["tokens"] / 1024, COLOURS[size]
            best: dict[str, Any] = {**style.COMPUTED, "color": colour, "label": f"{processes} GPUs, best slices"}
            panel.plot(thousands, each["gain"], **best)
            even = each["gathered_ms"] / each["even_ms"]
            panel.plot(thousands, even, ":", color=colour, label=f"{processes} GPUs, even slices")
        panel.axhline(1.0, color=COLOURS["straw_man"], linewidth=1)
        panel.set_xlabel("prompt (thousand tokens)")
        style.panel_title(panel, f"{network:g} GB/s")
    panels[0].set(ylabel="TTFT gathering / KV-Runahead (ratio)", ylim=(0, None))
    source = "modelled: LLaMA-7B on A100s at half their peak, matrices and attention alike"
    return style.finished(figure, source, columns=3)


@style.styled
def slices(table: pd.DataFrame) -> style.BookFigure:
    """Which tokens each process takes, by setting: rows of `runahead_sweep` with few settings."""
    figure, (axes,) = style.new_figure(height=0.55 * len(table) + 1.4)
    for place, row in enumerate(table.to_dict("records")):
        ends = [0, *map(int, str(row["bounds"]).split())]
        for rank, (start, stop) in enumerate(pairwise(ends)):
            shade = COLOURS[f"size_{1 + 4 * rank // int(row['processes'])}"]
            axes.barh(place, stop - start, left=start, color=shade, edgecolor="white")
    style.rows_down(axes, [f"{rate:g}" for rate in table["gb_per_s"]])
    axes.set(xlabel="prompt (tokens)", ylabel="network (GB/s)")
    source = "modelled: LLaMA-7B on A100s; darker is further down the chain"
    return style.finished(figure, source, legend=False)


@style.styled
def capacity(served: pd.DataFrame, table: pd.DataFrame, strict_s: float, relaxed_s: float) -> style.BookFigure:
    """P99 TBT over load, and capacity over the limit on it (Sarathi-Serve Figs. 10, 12): rows of both tables."""
    figure, (left, right) = style.new_figure(1, 2, height=3.3)
    tail = served.assign(ms=1000 * served["p99_tbt_s"])
    style.curves(left, tail, "rate", "ms", "policy", _POLICIES, **style.COMPUTED)
    limits = table.assign(ms=1000 * table["slo_s"])
    style.curves(right, limits, "ms", "requests_per_s", "policy", _POLICIES, **style.COMPUTED)
    style.slo_line(left, 1000 * strict_s, f"strict, {1000 * strict_s:g} ms", below=True)
    style.slo_line(left, 1000 * relaxed_s, f"relaxed, {1000 * relaxed_s:g} ms", left=True)
    left.set(xlabel="arrivals (requests/s)", ylabel="P99 TBT (ms)", ylim=(0, None))
    right.set(xlabel="limit on P99 TBT (ms)", ylabel="capacity (requests/s)", ylim=(0, None))
    return style.finished(figure, f"{YI}; one seed of arrivals".replace("modelled", "simulated"))
