"""Figures of the live cluster: real against simulated distributions, errors with intervals, and their causes."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS

_SHADE: Final = {"light": "size_1", "overloaded": "size_4"}
_SIDES: Final[dict[str, tuple[str, Any]]] = {"simulated": ("", "-"), "real": ("o", "none")}
_STATISTIC: Final = {"mean": "s", "median": "o", "P90": "^"}
_STAGE: Final = {"wait": "straw_man_light", "prefill": "prefill", "handover": "transfer"}
_QUANTITY: Final = {"ttft_s": ("TTFT (s)", 1.0), "tbt_s": ("TBT (ms)", 1e3)}


@style.styled
def distributions(requests: pd.DataFrame, machine: str) -> style.BookFigure:
    """TTFT and TBT of every request as CDFs, a column a cluster: measured as points, simulated as lines.

    Args:
        requests: rows of `requests.side_by_side` with run, cluster, placement and load.
        machine: which measured.
    """
    rows = where(requests, placement="default")
    clusters = list(dict.fromkeys(rows["cluster"]))
    figure, axes = style.new_figure(2, len(clusters), height=5.4, sharey=True)
    places = [(quantity, cluster) for quantity in _QUANTITY for cluster in clusters]
    for panel, (quantity, cluster) in zip(axes, places, strict=True):
        label, scale = _QUANTITY[quantity]
        for load, colour in _SHADE.items():
            table = where(rows, cluster=cluster, load=load)
            for side, (marker, line) in _SIDES.items():
                values = np.sort(table[f"{side}_{quantity}"].dropna().to_numpy(dtype=float)) * scale
                share = np.arange(1, len(values) + 1) / max(1, len(values))
                look: dict[str, Any] = {
                    "marker": marker,
                    "markersize": 4,
                    "linestyle": line,
                    "color": COLOURS[colour],
                }
                panel.plot(values, share, drawstyle="default" if marker else "steps-post", **look)
        style.log_axes(panel, "x")
        panel.set(xlabel=label, ylim=(0, 1.03))
        panel.tick_params(axis="x", which="minor", labelbottom=False)
        if quantity == "ttft_s":
            style.panel_title(panel, cluster)
    for panel in axes[:: len(clusters)]:
        panel.set_ylabel("requests (share)")
    keys = [
        Line2D([], [], color=COLOURS[colour], label=f"{load}, {word}", markersize=4, marker=mark, linestyle=line)
        for load, colour in _SHADE.items()
        for word, (mark, line) in (("measured", _SIDES["real"]), ("simulated", _SIDES["simulated"]))
    ]
    source = f"points measured: logs of live clusters; lines simulated, calibrated on 1P+1D; {machine}"
    return style.finished(figure, source, legend=keys)


@style.styled
def errors(rows: pd.DataFrame, machine: str) -> style.BookFigure:
    """Error of each prediction with its interval, a row a run: TTFT on the left, TBT on the right.

    Args:
        rows: what `requests.errors` made.
        machine: which measured.
    """
    runs = list(dict.fromkeys(rows["run"]))
    figure, axes = style.new_figure(1, 2, height=0.42 * len(runs) + 1.9, sharey=True)
    for panel, quantity in zip(axes, ("TTFT", "TBT"), strict=True):
        for k, (statistic, marker) in enumerate(_STATISTIC.items()):
            chosen, colour = where(rows, quantity=quantity, statistic=statistic), COLOURS["here"]
            at = [runs.index(run) + 0.24 * (k - 1) for run in chosen["run"]]
            panel.hlines(at, 100 * chosen["low"], 100 * chosen["high"], color=colour, linewidth=1.2)
            panel.plot(100 * chosen["error"], at, marker, color=colour, markersize=5, label=statistic)
        style.slo_line(panel, 0.0, "", vertical=True)
        panel.set_xlabel(f"{quantity}, simulated over real less one (%)")
        panel.grid(visible=False, axis="y")
    style.rows_down(axes[0], runs)
    return style.finished(figure, f"measured against simulated, 95 % intervals over requests; {machine}")


@style.styled
def causes(rows: pd.DataFrame, machine: str) -> style.BookFigure:
    """Mean TTFT by stage, a pair of bars a run: measured above, simulated below (fainter).

    Args:
        rows: what `requests.causes` made.
        machine: which measured.
    """
    runs = list(dict.fromkeys(rows["run"]))
    figure, (axes,) = style.new_figure(height=0.5 * len(runs) + 1.7)
    for side, shift, alpha, hidden in (("real", -0.2, 1.0, ""), ("simulated", 0.2, 0.5, "_")):
        table = rows.pivot_table(f"{side}_s", "run", "stage").loc[runs]
        parts = {f"{hidden}{stage}": (table[stage], COLOURS[colour]) for stage, colour in _STAGE.items()}
        look: dict[str, Any] = {"height": 0.36, "alpha": alpha, "linewidth": 0.6}
        style.stacked(axes, np.arange(len(runs)) + shift, parts, across=True, **look)
    style.rows_down(axes, runs)
    axes.set(xlabel="mean time from arrival to first token (s)")
    return style.finished(figure, f"upper bars measured, lower and fainter ones simulated; {machine}")


@style.styled
def servers(rows: pd.DataFrame, labels: Mapping[str, str], source: str) -> style.BookFigure:
    """Predicted against measured latency, a column a server: filled below saturation, hollow above it.

    Args:
        rows: what `servers.errors` made; a point is a statistic of a rate and a trace.
        labels: title of each column.
        source: of the measurement.
    """
    figure, axes = style.new_figure(2, len(labels), height=5.6)
    places = [(quantity, server) for quantity in ("TTFT", "TBT") for server in labels]
    for panel, (quantity, server) in zip(axes, places, strict=True):
        table = where(rows, quantity=quantity, server=server)
        ends = np.array([0.8, 1.25]) * 1e3 * np.array([table["real"].min(), table["real"].max()])
        panel.plot(ends, ends, color=COLOURS["slo"], linewidth=1.2, linestyle=(0, (4, 3)))
        panel.fill_between(ends, 0.9 * ends, 1.1 * ends, color=COLOURS["slo"], alpha=0.15, linewidth=0)
        for statistic, marker in _STATISTIC.items():
            for is_over, face in ((False, COLOURS["here"]), (True, "none")):
                chosen = where(table, statistic=statistic)
                chosen = chosen[(chosen["share"] > 1) == is_over]
                look: dict[str, Any] = {"color": COLOURS["here"], "markerfacecolor": face, "markersize": 5}
                panel.plot(1e3 * chosen["real"], 1e3 * chosen["simulated"], marker, **look)
        style.log_axes(panel)
        panel.tick_params(axis="both", which="minor", labelbottom=False, labelleft=False)
        panel.set(xlabel=f"{quantity} measured (ms)")
        if quantity == "TTFT":
            style.panel_title(panel, labels[server])
    for panel, quantity in zip(axes[:: len(labels)], ("TTFT", "TBT"), strict=True):
        panel.set_ylabel(f"{quantity} predicted (ms)")
    keys = [
        Line2D([], [], color=COLOURS["here"], marker=marker, linestyle="none", markersize=5, label=statistic)
        for statistic, marker in _STATISTIC.items()
    ]
    return style.finished(figure, source, legend=keys)
