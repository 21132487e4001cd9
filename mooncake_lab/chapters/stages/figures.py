"""Figures of the two stages: normalised curves, the bandwidth of Eq. 2, rooflines, the calibration."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from mooncake_lab.core import GB, TERA
from mooncake_lab.experiments import records, where
from mooncake_lab.figures.colours import letters
from mooncake_lab.figures.style import (
    COLOURS,
    COMPUTED,
    HATCHES,
    BookFigure,
    footer,
    legend_above,
    new_figure,
    panel_title,
    paper_points,
    plain_number,
    styled,
)
from mooncake_lab.paper import Fact
from mooncake_lab.perf import Hardware

_QUANTITIES: Final[Mapping[str, str]] = MappingProxyType(
    {"latency": COLOURS["latency"], "throughput": COLOURS["throughput"]}
)
_BELOW: Final = {"first": ((4, -15), "right"), "last": ((14, -27), "right")}
_UNITS: Final[Mapping[str, float]] = MappingProxyType({"GFLOP/s": GB, "TFLOP/s": TERA})
_AXES: Final[Mapping[str, str]] = MappingProxyType(
    {"prefill": "prompt length (tokens)", "decode": "batch size (requests)"}
)


@styled
def normalised(node: pd.DataFrame, machine: pd.DataFrame, machine_name: str) -> BookFigure:
    """Latency and throughput over their largest: the paper's node above, this machine below (arXiv Fig. 2).

    Args:
        node: rows of `normalised_node`.
        machine: rows of `normalised_machine`.
        machine_name: who measured, for the footer.
    """
    figure, axes = new_figure(2, 2, height=5.0, sharey=True)
    for row, (table, owner) in enumerate(((node, "eight A800 GPUs, 70B"), (machine, "this machine"))):
        for panel, stage in zip(axes[2 * row : 2 * row + 2], ("prefill", "decode"), strict=True):
            _normalised_panel(panel, where(table, stage=stage))
            panel.set(xlabel=_AXES[stage], ylim=(0, 1.12))
            panel_title(panel, f"{stage}, {owner}")
            if stage == "prefill":
                panel.xaxis.set_major_formatter(FuncFormatter(_thousands))
    for panel in axes[::2]:
        panel.set_ylabel("share of the largest (1)")
    _identity_legend(figure, axes[0])
    footer(figure, f"top: fitted to FAST'25 Fig. 14 and arXiv Fig. 2; bottom: measured, {machine_name}")
    return figure


def _normalised_panel(panel: Axes, table: pd.DataFrame) -> None:
    for quantity, colour in _QUANTITIES.items():
        for source, points in table[table["quantity"] == quantity].groupby("source", sort=False):
            if source == "paper":
                paper_points(panel, points["x"], points["value"])
            elif source == "measured":
                panel.plot(points["x"], points["value"], "o", color=colour)
            else:
                panel.plot(points["x"], points["value"], "-", color=colour)


def _identity_legend(figure: BookFigure, panel: Axes) -> None:
    handles = [Line2D([], [], color=colour, label=quantity) for quantity, colour in _QUANTITIES.items()]
    grey = COLOURS["optimum"]
    handles.append(Line2D([], [], color=grey, label="model"))
    handles.append(Line2D([], [], color=grey, linestyle="none", marker="o", label="measured"))
    handles.append(paper_points(panel, [], [], "arXiv Fig. 2"))
    legend_above(figure, handles)


@styled
def reuse_bandwidth(
    curves: pd.DataFrame, printed: Mapping[str, Fact], available: Mapping[str, float], prefix_tokens: int
) -> BookFigure:
    """The least bandwidth at which reuse pays, against the bandwidths there are (FAST'25 Eq. 2).

    Args:
        curves: rows of `equation_2`.
        printed: the paper's number for each node of `curves`.
        available: GB/s of the links of the testbed, by name.
        prefix_tokens: the prefix length that the paper's numbers are for.
    """
    figure, (axes,) = new_figure(height=3.8)
    styles = {"a800-node": COLOURS["size_4"], "h800-node": COLOURS["size_1"]}
    for node, table in curves.groupby("node", sort=False):
        colour = styles.get(str(node), COLOURS["optimum"])
        axes.plot(
            table["prefix_tokens"], table["printed_gb_per_s"], color=colour, label=f"{node}, Eq. 2 as printed"
        )
        axes.plot(
            table["prefix_tokens"],
            table["exact_gb_per_s"],
            color=colour,
            linestyle=":",
            label=f"{node}, exact count",
        )
    paper_points(axes, [prefix_tokens] * len(printed), [each.value for each in printed.values()], "FAST'25 §2.2")
    slowest = min(available.values())
    for name, rate in available.items():
        axes.axhline(rate, color=COLOURS["dram"], linestyle="--", linewidth=1.2)
        text = axes.annotate(
            f"{name}: {rate:g} GB/s", (1, rate), xycoords=("axes fraction", "data"), xytext=(0, 2),
            textcoords="offset points", ha="right", va="bottom", color=COLOURS["dram"],
        )  # fmt: skip
        if rate == slowest:
            text.set(verticalalignment="top", position=(0, -2))
    axes.set(yscale="log", ylim=(0.6, 300))
    axes.set(xlabel="reused prefix (tokens)", ylabel="least useful bandwidth (GB/s)")
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.yaxis.set_major_formatter(FuncFormatter(plain_number))
    legend_above(figure, columns=3)
    footer(figure, "computed from FAST'25 Eqs. 1 and 2 with Table 1; H800: 989 TFLOP/s a device, assumed")
    return figure


@styled
def roofline(node: Hardware, of_paper: pd.DataFrame, measured: pd.DataFrame) -> BookFigure:
    """Prefill and decode under the roofs of the paper's node and of this machine.

    Args:
        node: the paper's node.
        of_paper: rows of `roofline_of_paper`.
        measured: rows of `MeasuredStages`, which carry the peaks of this machine.
    """
    figure, (left, right) = new_figure(1, 2, height=3.6)
    _roof(
        left,
        node.flops_per_s(),
        node.memory_bytes_per_s,
        of_paper["intensity_flops_per_byte"].to_list(),
        "TFLOP/s",
    )
    paper_points(left, of_paper["intensity_flops_per_byte"], of_paper["tflops_per_s"])
    for _, points in of_paper.groupby("stage", sort=False):
        for end, (_, point) in zip(("first", "last"), points.iloc[[0, -1]].iterrows(), strict=False):
            shift, side = ((9, -4), "left") if point["stage"] == "decode" else _BELOW[end]
            left.annotate(
                f"{point['stage']} {point['label']}", (point["intensity_flops_per_byte"], point["tflops_per_s"]),
                xytext=shift, textcoords="offset points", ha=side,
            )  # fmt: skip
    panel_title(left, "eight A800 GPUs, 70B, bfloat16")
    first = measured.iloc[0]
    unit = "TFLOP/s" if first["peak_flops_per_s"] > TERA else "GFLOP/s"
    intensities = measured["intensity_flops_per_byte"].to_list()
    _roof(right, float(first["peak_flops_per_s"]), float(first["peak_bytes_per_s"]), intensities, unit)
    for stage, points in measured.groupby("stage", sort=False):
        right.plot(
            points["intensity_flops_per_byte"], points["flops_per_s"] / _UNITS[unit], linestyle="none", marker="o",
            color=COLOURS[str(stage)], label=f"{stage}, measured",
        )  # fmt: skip
    panel_title(right, f"this machine, {first['dtype']}")
    legend_above(figure)
    footer(figure, f"left: FAST'25 Fig. 14 and arXiv Fig. 2; right: measured, {first['machine']}")
    return figure


@styled
def kernels(device: Hardware, floors: pd.DataFrame) -> BookFigure:
    """Each kernel of a layer under the roof of a device, and the least time that the roof leaves it.

    Args:
        device: whose roof.
        floors: rows of `kernel_floors`.
    """
    figure, (left, right) = new_figure(1, 2, height=3.6)
    _roof(
        left, device.flops_per_s(), device.memory_bytes_per_s, floors["intensity_flops_per_byte"].to_list(),
        "TFLOP/s",
    )  # fmt: skip
    names = list(dict.fromkeys(floors["kernel"]))
    for stage, rows in floors.groupby("stage", sort=False):
        look: dict[str, Any] = {
            "linestyle": "none",
            **COMPUTED,
            "color": COLOURS[str(stage)],
            "label": f"{stage}, computed",
        }
        left.plot(rows["intensity_flops_per_byte"], rows["tflops_per_s"], **look)
        right.plot(rows["least_us"], [names.index(name) for name in rows["kernel"]], **look)
        (at,) = records(rows, kernel="attention")
        left.annotate(
            f"attention,\n{stage}", (at["intensity_flops_per_byte"], at["tflops_per_s"]), xytext=(7, -7),
            textcoords="offset points", va="top", color=letters(look["color"]),
        )  # fmt: skip
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.set(xscale="log", xlabel="least time in one layer (µs)")
    legend_above(figure)
    footer(figure, f"computed from bytes and FLOPs; no device was measured; roof: {device.source}")
    return figure


def _roof(axes: Axes, flops_per_s: float, bytes_per_s: float, intensities: Sequence[float], unit: str) -> None:
    ridge = flops_per_s / bytes_per_s
    span = np.geomspace(min(*intensities, ridge) / 3, max(*intensities, ridge) * 3, 300)
    roof = np.minimum(flops_per_s, span * bytes_per_s) / _UNITS[unit]
    axes.plot(span, roof, color=COLOURS["optimum"], label="roof")
    peak = f"{flops_per_s / _UNITS[unit]:,.0f} {unit}, {bytes_per_s / GB:,.0f} GB/s"
    axes.annotate(peak, (0.03, 0.97), xycoords="axes fraction", va="top")
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/B)", ylabel=f"speed ({unit})")
    axes.set_ylim(float(roof[0]) / 10, float(roof[-1]) * 8)


@styled
def calibration(misses: pd.DataFrame, *, decode_steps: int) -> BookFigure:
    """The bars of FAST'25 Fig. 14 that the node was fitted to, and the model's time for each.

    Args:
        misses: rows of `calibration_misses`.
        decode_steps: output tokens of a decode bar.
    """
    figure, panels = new_figure(1, 3, height=3.0)
    prefill = where(misses, stage="prefill")
    prefill = prefill.assign(reuses=prefill["reused_tokens"] > 0)
    _bars(panels[0], where(prefill, reuses=False), 1, "prefill")
    _bars(panels[1], where(prefill, reuses=True), 1, "prefill")
    _bars(panels[2], where(misses, stage="decode step, batch 1"), decode_steps, "decode")
    panel_title(panels[0], "prefill, nothing reused")
    panel_title(panels[1], "prefill, 95 % reused")
    panel_title(panels[2], f"decode, {decode_steps} tokens")
    panels[0].set_ylabel("latency (s)")
    legend_above(figure)
    footer(figure, "bars: fitted model; diamonds: FAST'25 Fig. 14, read from the drawing")
    return figure


def _bars(panel: Axes, table: pd.DataFrame, times: int, stage: str) -> None:
    places = np.arange(len(table))
    heights = times * table["model_s"]
    panel.bar(
        places, heights, label=f"{stage}, model", color=COLOURS[stage], edgecolor="white", hatch=HATCHES[stage]
    )
    paper_points(panel, places, times * table["paper_s"], "FAST'25 Fig. 14")
    panel.set_xticks(places, [_thousands(float(tokens)) for tokens in table["tokens"]])
    panel.set_xlabel("prompt length (tokens)")


def _thousands(tokens: float, _: object = None) -> str:
    """8192 as 8k: prompt lengths are powers of two."""
    if tokens >= 1024 and tokens % 1024 == 0:
        return f"{tokens / 1024:g}k"
    return f"{tokens / 1000:g}k" if tokens >= 1000 else f"{tokens:g}"
