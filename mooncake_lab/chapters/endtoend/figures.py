"""Figures of the end-to-end chapter: capacity over TBT, GPU time, P:D splits, rates, distributions, what-ifs."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab.experiments import records
from mooncake_lab.figures.style import (
    COLOURS,
    COMPUTED,
    BookFigure,
    bar_places,
    legend_above,
    log_ticks,
    new_figure,
    origins,
    panel_title,
    paper_points,
    simulated_footer,
    slo_line,
    sources,
    styled,
)

_COLOUR: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mooncake": "mooncake",
        "vllm": "vllm",
        "vllm_prefix": "vllm_prefix",
        "vllm_chunked": "vllm_chunked",
        "3P+1D": "mooncake",
        "2P+2D": "mooncake_variant",
        "4M": "vllm",
    }
)
_DASHES: Final = (0, (1.2, 1.6))


@styled
def capacity(
    rows: pd.DataFrame,
    grid_ms: Sequence[float],
    paper: Mapping[str, pd.DataFrame],
    names: Mapping[str, str],
    limits_ms: Sequence[int],
) -> BookFigure:
    """Effective request capacity over the TBT limit: a workload a row, a system a column.

    Args:
        rows: rows of `EndToEnd`; a system that was run in two ways has two lines, the second one dotted.
        grid_ms: where `capacity` was recorded.
        paper: by workload, the curve of FAST'25 Fig. 1, 6 or 7.
        names: what the paper calls each system.
        limits_ms: the TBT limits of the paper.
    """
    size: dict[str, Any] = {"height": 1.75 * len(paper) + 1.0, "sharex": True, "sharey": True}
    figure, axes = new_figure(len(paper), len(names), **size)
    panels = [(workload, system) for workload in paper for system in names]
    for panel, (workload, system) in zip(axes, panels, strict=True):
        mine = records(rows, workload=workload, system=system)
        for i, row in enumerate(mine):
            label = _told_apart(row) if len(mine) > 1 else None
            style: Any = "-" if i == 0 else _DASHES
            shares = 100 * np.asarray(row["capacity"])
            panel.plot(grid_ms, shares, color=COLOURS[_COLOUR[system]], linestyle=style, label=label)
        theirs = _thinned(paper[workload], names[system], np.geomspace(30, 1000, 18))
        paper_points(panel, theirs["x"], theirs["y"], "FAST'25 Figs. 1, 6, 7")
        for limit in limits_ms:
            panel.axvline(limit, color=COLOURS["slo"], linewidth=0.8, linestyle=(0, (4, 3)))
        panel.set(xscale="log", xlim=(grid_ms[0], grid_ms[-1]), ylim=(-3, 103))
        if workload == next(iter(paper)):
            panel_title(panel, names[system].replace(" ", "\n", 1))
    for panel in axes[-len(names) :]:
        log_ticks(panel, [30, 100, 300, 1000])
        panel.set_xlabel("TBT limit (ms)")
    for panel, workload in zip(axes[:: len(names)], paper, strict=True):
        panel.set_ylabel(f"{workload}\neffective requests (%)")
    legend_above(figure)
    simulated_footer(figure, origins(rows), "diamonds: FAST'25 Figs. 1, 6, 7")
    return figure


def _told_apart(row: Mapping[str, Any]) -> str:
    """What a line of a system is, where it has several."""
    if row["system"] == "vllm_chunked":
        return f"{row['chunk_tokens']} tokens"
    return "with a host" if row["host_s"] else "engine alone"


@styled
def gpu_time(
    rows: pd.DataFrame, paper: pd.DataFrame, names: Mapping[str, str], groups: Mapping[str, str]
) -> BookFigure:
    """Prefill GPU time a request: bars of `EndToEnd` rows, FAST'25 Fig. 8 as diamonds.

    Args:
        rows: one a workload and system.
        paper: the curve of Fig. 8.
        names: what the paper calls each system.
        groups: what it calls each workload.
    """
    figure, (axes,) = new_figure(height=3.4)
    for i, (system, series) in enumerate(names.items()):
        heights = {str(r["workload"]): float(r["prefill_gpu_s"]) for r in records(rows, system=system)}
        at = bar_places(len(groups), len(names), i, 0.2)
        axes.bar(at, [heights[w] for w in groups], width=0.19, color=COLOURS[_COLOUR[system]], label=series)
        printed = paper[paper["series"] == series].set_index("x")["y"]
        paper_points(axes, at, [printed[name] for name in groups.values()], "FAST'25 Fig. 8" if i == 0 else "_")
    axes.set_xticks(range(len(groups)), list(groups.values()))
    axes.set(ylabel="prefill GPU time (s/request)", ylim=(0, None))
    legend_above(figure)
    simulated_footer(figure, origins(rows))
    return figure


@styled
def splits(rows: pd.DataFrame, paper: Mapping[str, pd.DataFrame]) -> BookFigure:
    """Effective requests, mean TTFT and mean TBT over the number of prefill nodes, one line a host overhead.

    Args:
        rows: rows of `EndToEnd` by prefill nodes and host overhead.
        paper: the three curves of FAST'25 Fig. 15 by our column.
    """
    figure, axes = new_figure(1, 3, height=3.0)
    panels = (
        ("effective", 100.0, "effective requests (%)"),
        ("ttft_mean_s", 1.0, "mean TTFT (s)"),
        ("tbt_fast_mean_s", 1e3, "mean TBT (ms)"),
    )
    overheads = sorted(set(rows["host_s"]))
    for panel, (column, unit, label) in zip(axes, panels, strict=True):
        for overhead, colour in zip(overheads, _blues(len(overheads)), strict=True):
            line = records(rows.sort_values("prefill_nodes"), host_s=overhead)
            name = f"host: {1e3 * overhead:g} ms/request"
            y = [unit * float(row[column]) for row in line]
            panel.plot([row["prefill_nodes"] for row in line], y, **COMPUTED, color=colour, label=name)
        paper_points(panel, paper[column]["x"], paper[column]["y"], "FAST'25 Fig. 15")
        panel.set(xlabel="prefill nodes of 16 (nodes)", ylabel=label, ylim=(0, None))
        panel.set_xticks(sorted(set(rows["prefill_nodes"]))[::2])
    legend_above(figure)
    simulated_footer(figure, origins(rows))
    return figure


@styled
def rates(
    rows: pd.DataFrame, paper: pd.DataFrame, datasets: Sequence[str], systems: Mapping[str, str]
) -> BookFigure:
    """P90 TTFT and TBT over their SLOs by request rate: a dataset a column.

    Args:
        rows: what `normalised` made.
        paper: the curve of arXiv Fig. 11 or 12; values that it cuts at 1.2 are drawn there.
        datasets: which, in order.
        systems: what the paper calls each system.
    """
    figure, axes = new_figure(2, len(datasets), height=4.8, sharey="row")
    for k, dataset in enumerate(datasets):
        for panel, metric in zip((axes[k], axes[k + len(datasets)]), ("ttft", "tbt"), strict=True):
            for system, series in systems.items():
                mine = records(rows.sort_values("requests_per_s"), dataset=dataset, system=system)
                x = [row["requests_per_s"] for row in mine]
                colour = COLOURS[_COLOUR[system]]
                panel.plot(x, [min(float(row[metric]), 1.3) for row in mine], color=colour, label=series)
                theirs = records(paper.sort_values("x"), series=f"{dataset}/{metric.upper()}/{series}")
                x, y = [float(row["x"]) for row in theirs], [min(float(row["y"]), 1.2) for row in theirs]
                panel.plot(x, y, color=colour, linestyle=_DASHES, linewidth=1.2)
                paper_points(panel, x, y, "arXiv v3" if system == "4M" else "_")
            slo_line(panel, 1.0, "SLO", left=True)
            panel.set_ylim(0, 1.35)
        panel_title(axes[k], dataset)
        axes[k + len(datasets)].set_xlabel("request rate (req/s)")
    axes[0].set_ylabel("P90 TTFT (of its SLO)")
    axes[len(datasets)].set_ylabel("P90 TBT (of its SLO)")
    legend_above(figure)
    simulated_footer(figure, "datasets generated like arXiv Table 2")
    return figure


@styled
def distributions(
    rows: pd.DataFrame,
    grids: Mapping[str, Sequence[float]],
    paper: Mapping[str, pd.DataFrame],
    names: Mapping[str, str],
    limits: Mapping[str, float],
) -> BookFigure:
    """Distributions of TTFT (s) and TBT (ms), ours as lines, arXiv Fig. 13 as diamonds on dots of the colour.

    Args:
        rows: one a system.
        grids: by column of `rows`, where it was recorded.
        paper: by the same columns, the curve with x in the grid's unit.
        names: what the paper calls each system.
        limits: by the same columns, the SLO.
    """
    figure, axes = new_figure(1, 2, height=3.4, sharey=True)
    labels = {"ttft_cdf": "TTFT (s)", "tbt_cdf": "TBT, longest tenth of gaps (ms)"}
    for panel, (column, grid) in zip(axes, grids.items(), strict=True):
        for row in rows.to_dict(orient="records"):
            system = str(row["system"])
            colour = COLOURS[_COLOUR[system]]
            panel.plot(grid, 100 * np.asarray(row[column]), color=colour, label=names[system])
            theirs = _thinned(paper[column], names[system], np.geomspace(grid[0], grid[-1], 13))
            panel.plot(theirs["x"], 100 * theirs["y"], color=colour, linestyle=_DASHES, linewidth=1.2)
            paper_points(panel, theirs["x"], 100 * theirs["y"], "arXiv Fig. 13" if system == "vllm" else "_")
        slo_line(panel, limits[column], "", vertical=True)  # a tick names it; at the top it would cover diamonds
        panel.set(xscale="log", xlabel=labels[column], xlim=(grid[0], grid[-1]), ylim=(-3, 103))
        log_ticks(panel, [x for x in (0.1, 1, 10, 30, 100, 300, 1000) if grid[0] <= x <= grid[-1]])
    axes[0].set_ylabel("requests (%)")
    legend_above(figure)
    simulated_footer(figure, origins(rows))
    return figure


@styled
def goodput(rows: pd.DataFrame, names: Mapping[str, str], attained: float) -> BookFigure:
    """The highest request rate at which the attained share of requests is effective: bars of `Goodput` rows.

    A line across the top of a bar is what the search leaves open: down by the overload that the arrivals are too
    short to show, up by the tolerance of the bisection.

    Args:
        rows: rows of `Goodput`; a split is named where a system was searched with several.
        names: what the paper calls each system.
        attained: the share of requests that had to be effective.
    """
    figure, (axes,) = new_figure(height=3.2)
    limits = sorted(set(rows["tbt_limit_ms"]))
    searched = list(dict.fromkeys(zip(rows["system"], rows["prefill_nodes"], rows["decode_nodes"], strict=True)))
    width = 0.8 / len(searched)
    drawn: list[str] = []
    for i, (system, prefill, decode) in enumerate(searched):
        mine = records(rows.sort_values("tbt_limit_ms"), system=system, prefill_nodes=prefill, decode_nodes=decode)
        heights = np.array([float(row["requests_per_s"]) for row in mine])
        below = [1 - 1 / (1 + float(row["hidden_overload"])) for row in mine]
        above = [float(row["relative_tolerance"]) for row in mine]
        at = bar_places(len(limits), len(searched), i, width)
        label = f"{names[system]} {prefill}P+{decode}D" if system == "mooncake" else names[system]
        colour = COLOURS["mooncake_variant" if system in drawn else _COLOUR[system]]
        axes.bar(at, heights, width=0.93 * width, color=colour, label=label)
        axes.errorbar(at, heights, yerr=heights * np.array([below, above]), fmt="none", ecolor=COLOURS["slo"])
        drawn.append(system)
    axes.set_xticks(range(len(limits)), [f"{limit}" for limit in limits])
    axes.set(xlabel="TBT limit (ms)", ylabel=f"rate with {attained:.0%} effective (req/s)")
    legend_above(figure)
    simulated_footer(figure, sources(rows))
    return figure


def _thinned(paper: pd.DataFrame, series: str, near: Iterable[float]) -> dict[str, npt.NDArray[np.float64]]:
    """The points of a series that lie nearest to the places given, each once."""
    points = np.array([(float(row["x"]), float(row["y"])) for row in records(paper, series=series)])
    inside = [place for place in near if points[:, 0].min() <= place <= points[:, 0].max()]
    kept = points[sorted({int(np.abs(points[:, 0] - place).argmin()) for place in inside})]
    return {"x": kept[:, 0], "y": kept[:, 1]}


def _blues(count: int) -> list[str]:
    """Grey for the engine alone, then the colours of Mooncake."""
    return [COLOURS[name] for name in ("straw_man", "mooncake", "mooncake_variant", "straw_man_light")][:count]
