"""Figures of the live cluster: real against simulated distributions, errors with intervals, and their causes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from mooncake_lab.figures.style import (
    COLOURS,
    BookFigure,
    footer,
    legend_above,
    new_figure,
    panel_title,
    slo_line,
    styled,
)

_SHADE: Final[Mapping[str, str]] = MappingProxyType({"light": "size_1", "overloaded": "size_4"})
_STATISTIC: Final[Mapping[str, str]] = MappingProxyType({"mean": "s", "median": "o", "P90": "^"})
_STAGE: Final[Mapping[str, str]] = MappingProxyType(
    {"wait": "straw_man_light", "prefill": "prefill", "handover": "transfer"}
)
_QUANTITY: Final[Mapping[str, tuple[str, str, float]]] = MappingProxyType(
    {"ttft_s": ("TTFT", "s", 1.0), "tbt_s": ("TBT", "ms", 1e3)}
)


@styled
def distributions(requests: pd.DataFrame, machine: str) -> BookFigure:
    """TTFT and TBT of every request as CDFs, a column a cluster: measured as points, simulated as lines.

    Args:
        requests: rows of `requests.side_by_side` with run, cluster, placement and load.
        machine: which measured.
    """
    rows = requests[requests["placement"] == "default"]
    clusters = list(dict.fromkeys(rows["cluster"]))
    figure, axes = new_figure(2, len(clusters), height=5.4, sharey=True)
    places = [(quantity, cluster) for quantity in _QUANTITY for cluster in clusters]
    for panel, (quantity, cluster) in zip(axes, places, strict=True):
        name, unit, scale = _QUANTITY[quantity]
        for load, colour in _SHADE.items():
            table = rows.query(f"cluster == {cluster!r} and load == {load!r}")
            for side, marker, line in (("simulated", "", "-"), ("real", "o", "none")):
                values = np.sort(table[f"{side}_{quantity}"].dropna().to_numpy(dtype=float)) * scale
                share = np.arange(1, len(values) + 1) / max(1, len(values))
                panel.plot(
                    values, share, color=COLOURS[colour], marker=marker, markersize=4, linestyle=line,
                    drawstyle="default" if side == "real" else "steps-post",
                )  # fmt: skip
        panel.set(xscale="log", xlabel=f"{name} ({unit})", ylim=(0, 1.03))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.tick_params(axis="x", which="minor", labelbottom=False)
        if quantity == "ttft_s":
            panel_title(panel, cluster)
    for panel in axes[:: len(clusters)]:
        panel.set_ylabel("requests (share)")
    legend_above(figure, _keys())
    footer(figure, f"points measured: logs of live clusters; lines simulated, calibrated on 1P+1D; {machine}")
    return figure


@styled
def errors(rows: pd.DataFrame, machine: str) -> BookFigure:
    """Error of each prediction with its interval, a row a run: TTFT on the left, TBT on the right.

    Args:
        rows: what `requests.errors` made.
        machine: which measured.
    """
    runs = list(dict.fromkeys(rows["run"]))
    figure, axes = new_figure(1, 2, height=0.42 * len(runs) + 1.9, sharey=True)
    for panel, quantity in zip(axes, ("TTFT", "TBT"), strict=True):
        for k, (statistic, marker) in enumerate(_STATISTIC.items()):
            chosen = rows.query(f"quantity == {quantity!r} and statistic == {statistic!r}")
            at = [runs.index(run) + 0.24 * (k - 1) for run in chosen["run"]]
            panel.hlines(at, 100 * chosen["low"], 100 * chosen["high"], color=COLOURS["here"], linewidth=1.2)
            panel.plot(
                100 * chosen["error"], at, linestyle="none", marker=marker, color=COLOURS["here"],
                markersize=5, label=statistic,
            )  # fmt: skip
        slo_line(panel, 0.0, "", vertical=True)
        panel.set_xlabel(f"{quantity}, simulated over real less one (%)")
        panel.grid(visible=False, axis="y")
    axes[0].set_yticks(range(len(runs)), runs)
    axes[0].invert_yaxis()
    legend_above(figure)
    footer(figure, f"measured against simulated, 95 % intervals over requests; {machine}")
    return figure


@styled
def causes(rows: pd.DataFrame, machine: str) -> BookFigure:
    """Mean TTFT by stage, a pair of bars a run: measured above, simulated below (fainter).

    Args:
        rows: what `requests.causes` made.
        machine: which measured.
    """
    runs = list(dict.fromkeys(rows["run"]))
    figure, (axes,) = new_figure(height=0.5 * len(runs) + 1.7)
    left = {(run, side): 0.0 for run in runs for side in ("real", "simulated")}
    for stage, colour in _STAGE.items():
        for row in rows.query(f"stage == {stage!r}").to_dict(orient="records"):
            for side, shift in (("real", -0.2), ("simulated", 0.2)):
                key, seconds = (row["run"], side), row[f"{side}_s"]
                axes.barh(
                    runs.index(row["run"]) + shift, seconds, left=left[key], height=0.36, color=COLOURS[colour],
                    alpha=1.0 if side == "real" else 0.5, edgecolor="white", linewidth=0.6,
                    label=stage if side == "real" and row["run"] == runs[0] else "_",
                )  # fmt: skip
                left[key] += seconds
    axes.set_yticks(range(len(runs)), runs)
    axes.invert_yaxis()
    axes.set(xlabel="mean time from arrival to first token (s)")
    axes.grid(visible=False, axis="y")
    legend_above(figure)
    footer(figure, f"upper bars measured, lower and fainter ones simulated; {machine}")
    return figure


def _keys() -> list[Line2D]:
    return [
        Line2D(
            [], [], color=COLOURS[colour], label=f"{load}, {side}", markersize=4,
            marker="o" if side == "measured" else "", linestyle="none" if side == "measured" else "-",
        )
        for load, colour in _SHADE.items()
        for side in ("measured", "simulated")
    ]  # fmt: skip
