"""Figures of the two stages: normalised curves, the bandwidth of Eq. 2, rooflines, the calibration."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from mooncake_lab.book.experiments import records, where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS, letters
from mooncake_lab.book.paper import Fact
from mooncake_lab.core import GB, TERA
from mooncake_lab.perf import Hardware

_BELOW: Final = {"first": ((4, -15), "right"), "last": ((14, -27), "right")}
_UNITS: Final = {"GFLOP/s": GB, "TFLOP/s": TERA}
_AXES: Final = {"prefill": "prompt length (tokens)", "decode": "batch size (requests)"}


@style.styled
def normalised(node: pd.DataFrame, machine: pd.DataFrame, machine_name: str) -> style.BookFigure:
    """Latency and throughput over their largest: the paper's node above, this machine below (arXiv Fig. 2).

    Args:
        node: rows of `normalised_node`.
        machine: rows of `normalised_machine`.
        machine_name: who measured, for the footer.
    """
    figure, axes = style.new_figure(2, 2, height=5.0, sharey=True)
    owners = ((node, "eight A800 GPUs, 70B"), (machine, "this machine"))
    panels = [(table, owner, stage) for table, owner in owners for stage in ("prefill", "decode")]
    for panel, (table, owner, stage) in zip(axes, panels, strict=True):
        for _, points in where(table, stage=stage).groupby(["quantity", "source"], sort=False):
            quantity, source = points[["quantity", "source"]].iloc[0].tolist()
            if source == "paper":
                style.paper_points(panel, points["x"], points["value"])
            else:
                mark = "o" if source == "measured" else "-"
                panel.plot(points["x"], points["value"], mark, color=COLOURS[str(quantity)])
        panel.set(xlabel=_AXES[stage], ylim=(0, 1.12))
        style.panel_title(panel, f"{stage}, {owner}")
        if stage == "prefill":
            panel.set_ylabel("share of the largest (1)")
            panel.xaxis.set_major_formatter(_thousands)
    grey = COLOURS["optimum"]
    handles = [Line2D([], [], color=COLOURS[name], label=name) for name in ("latency", "throughput")]
    handles.append(Line2D([], [], color=grey, label="model"))
    handles.append(Line2D([], [], color=grey, linestyle="none", marker="o", label="measured"))
    handles.append(style.paper_points(axes[0], [], [], "arXiv Fig. 2"))
    source = f"top: fitted to FAST'25 Fig. 14 and arXiv Fig. 2; bottom: measured, {machine_name}"
    return style.finished(figure, source, legend=handles)


@style.styled
def reuse_bandwidth(
    curves: pd.DataFrame, printed: Mapping[str, Fact], available: Mapping[str, float], prefix_tokens: int
) -> style.BookFigure:
    """The least bandwidth at which reuse pays, against the bandwidths there are (FAST'25 Eq. 2).

    Args:
        curves: rows of `equation_2`.
        printed: the paper's number for each node of `curves`.
        available: GB/s of the links of the testbed, by name.
        prefix_tokens: the prefix length that the paper's numbers are for.
    """
    figure, (axes,) = style.new_figure(height=3.8)
    for node, size in (("a800-node", "size_4"), ("h800-node", "size_1")):
        table, colour = where(curves, node=node), COLOURS[size]
        x = table["prefix_tokens"]
        axes.plot(x, table["printed_gb_per_s"], color=colour, label=f"{node}, Eq. 2 as printed")
        axes.plot(x, table["exact_gb_per_s"], ":", color=colour, label=f"{node}, exact count")
    theirs = [each.value for each in printed.values()]
    style.paper_points(axes, [prefix_tokens] * len(printed), theirs, "FAST'25 §2.2")
    for name, rate in available.items():
        below = rate == min(available.values())
        axes.axhline(rate, color=COLOURS["dram"], linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{name}: {rate:g} GB/s", (1, rate), xycoords=("axes fraction", "data"), textcoords="offset points",
            xytext=(0, -2 if below else 2), ha="right", va="top" if below else "bottom", color=COLOURS["dram"],
        )  # fmt: skip
    style.log_axes(axes, "y")
    axes.set(xlabel="reused prefix (tokens)", ylabel="least useful bandwidth (GB/s)", ylim=(0.6, 300))
    axes.xaxis.set_major_formatter(_thousands)
    source = "computed from FAST'25 Eqs. 1 and 2 with Table 1; H800: 989 TFLOP/s a device, assumed"
    return style.finished(figure, source, columns=3)


@style.styled
def roofline(node: Hardware, of_paper: pd.DataFrame, measured: pd.DataFrame) -> style.BookFigure:
    """Prefill and decode under the roofs of the paper's node and of this machine.

    Args:
        node: the paper's node.
        of_paper: rows of `roofline_of_paper`.
        measured: rows of `MeasuredStages`, which carry the peaks of this machine.
    """
    figure, (left, right) = style.new_figure(1, 2, height=3.6)
    _roof(left, node.flops_per_s(), node.memory_bytes_per_s, of_paper, "TFLOP/s")
    style.paper_points(left, of_paper["intensity_flops_per_byte"], of_paper["tflops_per_s"])
    for _, points in of_paper.groupby("stage", sort=False):
        for end, point in zip(("first", "last"), points.iloc[[0, -1]].to_dict("records"), strict=False):
            shift, side = ((9, -4), "left") if point["stage"] == "decode" else _BELOW[end]
            at = (point["intensity_flops_per_byte"], point["tflops_per_s"])
            text = f"{point['stage']} {point['label']}"
            left.annotate(text, at, xytext=shift, textcoords="offset points", ha=side)
    style.panel_title(left, "eight A800 GPUs, 70B, bfloat16")
    first = measured.iloc[0]
    unit = "TFLOP/s" if first["peak_flops_per_s"] > TERA else "GFLOP/s"
    _roof(right, float(first["peak_flops_per_s"]), float(first["peak_bytes_per_s"]), measured, unit)
    for stage, points in measured.groupby("stage", sort=False):
        speeds = points["flops_per_s"] / _UNITS[unit]
        look: dict[str, Any] = {"color": COLOURS[str(stage)]}
        right.plot(points["intensity_flops_per_byte"], speeds, "o", label=f"{stage}, measured", **look)
    style.panel_title(right, f"this machine, {first['dtype']}")
    return style.finished(figure, f"left: FAST'25 Fig. 14 and arXiv Fig. 2; right: measured, {first['machine']}")


@style.styled
def kernels(device: Hardware, floors: pd.DataFrame) -> style.BookFigure:
    """Each kernel of a layer under the roof of a device, and the least time that the roof leaves it.

    Args:
        device: whose roof.
        floors: rows of `kernel_floors`.
    """
    figure, (left, right) = style.new_figure(1, 2, height=3.6)
    _roof(left, device.flops_per_s(), device.memory_bytes_per_s, floors, "TFLOP/s")
    names = list(dict.fromkeys(floors["kernel"]))
    for stage, rows in floors.groupby("stage", sort=False):
        look: dict[str, Any] = {**style.COMPUTED, "linestyle": "none", "color": COLOURS[str(stage)]}
        left.plot(rows["intensity_flops_per_byte"], rows["tflops_per_s"], label=f"{stage}, computed", **look)
        right.plot(rows["least_us"], [names.index(name) for name in rows["kernel"]], **look)
        (at,) = records(rows, kernel="attention")
        left.annotate(
            f"attention,\n{stage}", (at["intensity_flops_per_byte"], at["tflops_per_s"]), xytext=(7, -7),
            textcoords="offset points", va="top", color=letters(look["color"]),
        )  # fmt: skip
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.set(xscale="log", xlabel="least time in one layer (µs)")
    source = f"computed from bytes and FLOPs; no device was measured; roof: {device.source}"
    return style.finished(figure, source)


def _roof(axes: Axes, flops_per_s: float, bytes_per_s: float, points: pd.DataFrame, unit: str) -> None:
    intensities, ridge = points["intensity_flops_per_byte"], flops_per_s / bytes_per_s
    span = np.geomspace(min(*intensities, ridge) / 3, max(*intensities, ridge) * 3, 300)
    roof = np.minimum(flops_per_s, span * bytes_per_s) / _UNITS[unit]
    axes.plot(span, roof, color=COLOURS["optimum"], label="roof")
    peak = f"{flops_per_s / _UNITS[unit]:,.0f} {unit}, {bytes_per_s / GB:,.0f} GB/s"
    axes.annotate(peak, (0.03, 0.97), xycoords="axes fraction", va="top")
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/B)", ylabel=f"speed ({unit})")
    axes.set_ylim(float(roof[0]) / 10, float(roof[-1]) * 8)


@style.styled
def calibration(misses: pd.DataFrame, *, decode_steps: int) -> style.BookFigure:
    """The bars of FAST'25 Fig. 14 that the node was fitted to, and the model's time for each.

    Args:
        misses: rows of `calibration_misses`.
        decode_steps: output tokens of a decode bar.
    """
    figure, panels = style.new_figure(1, 3, height=3.0)
    prefill, decode = where(misses, stage="prefill"), where(misses, stage="decode step, batch 1")
    shown = (
        ("prefill, nothing reused", prefill[prefill["reused_tokens"] == 0], 1, "prefill"),
        ("prefill, 95 % reused", prefill[prefill["reused_tokens"] > 0], 1, "prefill"),
        (f"decode, {decode_steps} tokens", decode, decode_steps, "decode"),
    )
    for panel, (title, table, times, stage) in zip(panels, shown, strict=True):
        places = range(len(table))
        look: dict[str, Any] = {"color": COLOURS[stage], "hatch": style.HATCHES[stage]}
        panel.bar(places, times * table["model_s"], label=f"{stage}, model", edgecolor="white", **look)
        style.paper_points(panel, places, times * table["paper_s"], "FAST'25 Fig. 14")
        panel.set_xticks(places, [_thousands(float(tokens)) for tokens in table["tokens"]])
        panel.set_xlabel("prompt length (tokens)")
        style.panel_title(panel, title)
    panels[0].set_ylabel("latency (s)")
    return style.finished(figure, "bars: fitted model; diamonds: FAST'25 Fig. 14, read from the drawing")


def _thousands(tokens: float, _: object = None) -> str:
    """8192 as 8k: prompt lengths are powers of two."""
    if tokens >= 1024 and tokens % 1024 == 0:
        return f"{tokens / 1024:g}k"
    return f"{tokens / 1000:g}k" if tokens >= 1000 else f"{tokens:g}"
