"""Figures of the end-to-end chapter: capacity over TBT, GPU time, P:D splits, rates, distributions, what-ifs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.book.experiments import records, where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS

_COLOUR: Final = {name: COLOURS[name] for name in ("mooncake", "vllm", "vllm_prefix", "vllm_chunked")} | {
    "3P+1D": COLOURS["mooncake"],
    "2P+2D": COLOURS["mooncake_variant"],
    "4M": COLOURS["vllm"],
}
_ROUTERS: Final = ("vllm", "straw_man", "mooncake", "vllm_chunked")
"""Colours of the routers of vLLM, the chosen one first."""
_DASHES: Final = (0, (1.2, 1.6))


@style.styled
def capacity(
    rows: pd.DataFrame,
    grid_ms: Sequence[float],
    paper: Mapping[str, pd.DataFrame],
    names: Mapping[str, str],
    limits_ms: Sequence[int],
) -> style.BookFigure:
    """Effective request capacity over the TBT limit: a workload a row, a system a column.

    Args:
        rows: rows of `EndToEnd`; a system that was run in two ways has two lines, the second one dotted.
        grid_ms: where `capacity` was recorded.
        paper: by workload, the curve of FAST'25 Fig. 1, 6 or 7.
        names: what the paper calls each system.
        limits_ms: the TBT limits of the paper.
    """
    size: dict[str, Any] = {"height": 1.75 * len(paper) + 1.0, "sharex": True, "sharey": True}
    figure, axes = style.new_figure(len(paper), len(names), **size)
    panels = [(workload, system) for workload in paper for system in names]
    for panel, (workload, system) in zip(axes, panels, strict=True):
        mine = records(rows, workload=workload, system=system)
        for i, row in enumerate(mine):
            label = _told_apart(row) if len(mine) > 1 else None
            look: Any = {"color": _COLOUR[system], "linestyle": _DASHES if i else "-", "label": label}
            panel.plot(grid_ms, 100 * np.asarray(row["capacity"]), **look)
        theirs = _thinned(paper[workload], names[system], np.geomspace(30, 1000, 18))
        style.paper_points(panel, theirs["x"], theirs["y"], "FAST'25 Figs. 1, 6, 7")
        for limit in limits_ms:
            panel.axvline(limit, color=COLOURS["slo"], linewidth=0.8, linestyle=(0, (4, 3)))
        panel.set(xscale="log", xlim=(grid_ms[0], grid_ms[-1]), ylim=(-3, 103))
        if workload == next(iter(paper)):
            style.panel_title(panel, names[system].replace(" ", "\n", 1))
    for panel in axes[-len(names) :]:
        style.log_ticks(panel, [30, 100, 300, 1000])
        panel.set_xlabel("TBT limit (ms)")
    for panel, workload in zip(axes[:: len(names)], paper, strict=True):
        panel.set_ylabel(f"{workload}\neffective requests (%)")
    return style.finished(figure, style.simulated(style.origins(rows), "diamonds: FAST'25 Figs. 1, 6, 7"))


def _told_apart(row: Mapping[str, Any]) -> str:
    """What a line of a system is, where it has several."""
    if row["system"] == "vllm_chunked":
        return f"{row['chunk_tokens']} tokens"
    return "with the host" if row["host_s"] else "engine alone"


@style.styled
def bracket(
    rows: pd.DataFrame, paper: Mapping[str, pd.DataFrame], names: Mapping[str, str], routers: Mapping[str, str]
) -> style.BookFigure:
    """Effective requests of vLLM at each TBT limit: a workload a panel, a router a colour, solid with the host.

    Args:
        rows: what `bracket.bracket` made.
        paper: by workload, what the paper reads off its figure, with the columns `x` (ms) and `y` (percent).
        names: title of each panel.
        routers: what the book calls each router.
    """
    figure, axes = style.new_figure(1, len(paper), height=3.6, sharey=True)
    limits = sorted(set(rows["limit_ms"]))
    hosts_s = sorted(set(rows["host_s"]))
    for panel, workload in zip(axes, paper, strict=True):
        for (router, label), colour in zip(routers.items(), _ROUTERS, strict=True):
            for host_s, line in zip(hosts_s, (_DASHES, "-"), strict=True):
                mine = where(rows, workload=workload, router=router, host_s=host_s).sort_values("limit_ms")
                shown: Any = {"color": COLOURS[colour], "linestyle": line, "label": label if host_s else "_"}
                at = range(len(limits))
                panel.plot(at, mine["percent"], **shown, **style.COMPUTED)
                if bool(mine["low"].notna().all()):  # one seed has no interval
                    panel.vlines(at, mine["low"], mine["high"], color=COLOURS[colour], linewidth=2.0)
        printed = paper[workload].set_index("x")["y"].loc[limits]
        style.paper_points(panel, range(len(limits)), printed, "FAST'25 Figs. 1, 6, 7")
        style.panel_title(panel, names[workload])
        panel.set_xticks(range(len(limits)), [f"{limit}" for limit in limits])
        panel.set(xlabel="TBT limit (ms)", xlim=(-0.3, len(limits) - 0.7), ylim=(0, 103))
    axes[0].set_ylabel("effective requests of vLLM (%)")
    return style.finished(figure, style.simulated("solid: with the host; dotted: engine alone"))


@style.styled
def real_gain(
    measured: pd.DataFrame, predicted: pd.DataFrame, labels: Mapping[str, str], source: str
) -> style.BookFigure:
    """Requests within both limits over the rate: a system a panel, measured beside predicted.

    Args:
        measured: what `gain.measured` made; each round is a circle, and the line is their mean.
        predicted: what `gain.predicted` made; where two processes share a core, the area between both bounds.
        labels: title of each panel.
        source: of the measurement.
    """
    figure, axes = style.new_figure(2, -(-len(labels) // 2), height=4.6, sharex=True, sharey=True)
    for panel, (system, label) in zip(axes, labels.items(), strict=True):
        colour = COLOURS["mooncake" if system.startswith("ours") else "vllm"]
        mine = where(measured, system=system)
        rates = sorted(set(mine["requests_per_s"]))
        means = [np.mean(where(mine, requests_per_s=rate)["within"]) for rate in rates]
        panel.plot(rates, means, color=colour, label="_")
        panel.plot(mine["requests_per_s"], mine["within"], "o", color=colour, label="_")
        theirs = where(predicted, system=system).sort_values("requests_per_s")
        bounds = [where(theirs, slower=slower) for slower in sorted(set(theirs["slower"]))]
        for each in bounds:
            panel.plot(each["requests_per_s"], each["within"], color=COLOURS["here"], linestyle=_DASHES, label="_")
        low, high = bounds[-1], bounds[0]
        panel.fill_between(low["requests_per_s"], low["within"], high["within"], color=COLOURS["here"], alpha=0.12)
        style.panel_title(panel, label)
        panel.set(ylim=(-3, 103), xlim=(0, None))
    columns = len(axes) // 2
    for panel in axes[columns:]:
        panel.set_xlabel("request rate (req/s)")
    for panel in axes[::columns]:
        panel.set_ylabel("within both limits (%)")
    return style.finished(figure, source, legend=False)


@style.styled
def gpu_time(
    rows: pd.DataFrame, paper: pd.DataFrame, names: Mapping[str, str], groups: Mapping[str, str]
) -> style.BookFigure:
    """Prefill GPU time a request: bars of `EndToEnd` rows, FAST'25 Fig. 8 as diamonds.

    Args:
        rows: one a workload and system.
        paper: the curve of Fig. 8.
        names: what the paper calls each system.
        groups: what it calls each workload.
    """
    figure, (axes,) = style.new_figure(height=3.4)
    for i, (system, series) in enumerate(names.items()):
        heights = where(rows, system=system).set_index("workload")["prefill_gpu_s"].loc[list(groups)]
        at = style.bar_places(len(groups), len(names), i, 0.2)
        axes.bar(at, heights, width=0.19, color=_COLOUR[system], label=series)
        printed = where(paper, series=series).set_index("x")["y"].loc[list(groups.values())]
        style.paper_points(axes, at, printed, "FAST'25 Fig. 8" if i == 0 else "_")
    axes.set_xticks(range(len(groups)), list(groups.values()))
    axes.set(ylabel="prefill GPU time (s/request)", ylim=(0, None))
    return style.finished(figure, style.simulated(style.origins(rows)))


@style.styled
def splits(rows: pd.DataFrame, paper: Mapping[str, pd.DataFrame]) -> style.BookFigure:
    """Effective requests, mean TTFT and mean TBT over the number of prefill nodes.

    Args:
        rows: rows of `EndToEnd` by prefill nodes; the engine alone, with a host, and with prompts packed.
        paper: the three curves of FAST'25 Fig. 15 by our column.
    """
    figure, axes = style.new_figure(1, 3, height=3.0)
    panels = (
        ("effective", 100.0, "effective requests (%)"),
        ("ttft_mean_s", 1.0, "mean TTFT (s)"),
        ("tbt_fast_mean_s", 1e3, "mean TBT (ms)"),
    )
    looks: Any = {
        "engine alone": ("straw_man", "-"),
        "with the host": ("mooncake", "-"),
        "with the host, prompts packed": ("mooncake_variant", ":"),
    }
    alone, apart, packed = looks
    kinds = [packed if pack > 1 else apart if host_s else alone
             for pack, host_s in zip(rows["pack_tokens"], rows["host_s"], strict=True)]  # fmt: skip
    for panel, (column, unit, label) in zip(axes, panels, strict=True):
        told = rows.assign(kind=kinds, shown=unit * rows[column])
        style.curves(panel, told, "prefill_nodes", "shown", "kind", looks, **style.COMPUTED)
        style.paper_points(panel, paper[column]["x"], paper[column]["y"], "FAST'25 Fig. 15")
        panel.set(xlabel="prefill nodes of 16 (nodes)", ylabel=label, ylim=(0, None))
        panel.set_xticks(sorted(set(rows["prefill_nodes"]))[::2])
    return style.finished(figure, style.simulated(style.origins(rows)))


@style.styled
def rates(
    rows: pd.DataFrame, paper: pd.DataFrame, datasets: Sequence[str], systems: Mapping[str, str]
) -> style.BookFigure:
    """P90 TTFT and TBT over their SLOs by request rate: a dataset a column.

    Args:
        rows: what `normalised` made.
        paper: the curve of arXiv Fig. 11 or 12; values that it cuts at 1.2 are drawn there.
        datasets: which, in order.
        systems: what the paper calls each system.
    """
    figure, axes = style.new_figure(2, len(datasets), height=4.8, sharey="row")
    panels = [(metric, dataset) for metric in ("ttft", "tbt") for dataset in datasets]
    for panel, (metric, dataset) in zip(axes, panels, strict=True):
        for system, series in systems.items():
            mine = where(rows, dataset=dataset, system=system).sort_values("requests_per_s")
            colour = _COLOUR[system]
            panel.plot(mine["requests_per_s"], mine[metric].clip(upper=1.3), color=colour, label=series)
            theirs = where(paper, series=f"{dataset}/{metric.upper()}/{series}").sort_values("x")
            x, y = theirs["x"], theirs["y"].clip(upper=1.2)
            panel.plot(x, y, color=colour, linestyle=_DASHES, linewidth=1.2)
            style.paper_points(panel, x, y, "arXiv v3" if system == "4M" else "_")
        style.slo_line(panel, 1.0, "SLO", left=True)
        panel.set_ylim(0, 1.35)
    for top, bottom, dataset in zip(axes, axes[len(datasets) :], datasets, strict=False):
        style.panel_title(top, dataset)
        bottom.set_xlabel("request rate (req/s)")
    axes[0].set_ylabel("P90 TTFT (of its SLO)")
    axes[len(datasets)].set_ylabel("P90 TBT (of its SLO)")
    return style.finished(figure, style.simulated("datasets generated like arXiv Table 2"))


@style.styled
def distributions(
    rows: pd.DataFrame,
    grids: Mapping[str, Sequence[float]],
    paper: Mapping[str, pd.DataFrame],
    names: Mapping[str, str],
    limits: Mapping[str, float],
) -> style.BookFigure:
    """Distributions of TTFT (s) and TBT (ms), ours as lines, arXiv Fig. 13 as diamonds on dots of the colour.

    Args:
        rows: one a system.
        grids: by column of `rows`, where it was recorded.
        paper: by the same columns, the curve with x in the grid's unit.
        names: what the paper calls each system.
        limits: by the same columns, the SLO.
    """
    figure, axes = style.new_figure(1, 2, height=3.4, sharey=True)
    labels = {"ttft_cdf": "TTFT (s)", "tbt_cdf": "TBT, longest tenth of gaps (ms)"}
    for panel, (column, grid) in zip(axes, grids.items(), strict=True):
        for row in records(rows):
            system = str(row["system"])
            colour = _COLOUR[system]
            panel.plot(grid, 100 * np.asarray(row[column]), color=colour, label=names[system])
            theirs = _thinned(paper[column], names[system], np.geomspace(grid[0], grid[-1], 13))
            panel.plot(theirs["x"], 100 * theirs["y"], color=colour, linestyle=_DASHES, linewidth=1.2)
            label = "arXiv Fig. 13" if system == "vllm" else "_"
            style.paper_points(panel, theirs["x"], 100 * theirs["y"], label)
        style.slo_line(
            panel, limits[column], "", vertical=True
        )  # a tick names it; at the top it would cover diamonds
        panel.set(xscale="log", xlabel=labels[column], xlim=(grid[0], grid[-1]), ylim=(-3, 103))
        style.log_ticks(panel, [x for x in (0.1, 1, 10, 30, 100, 300, 1000) if grid[0] <= x <= grid[-1]])
    axes[0].set_ylabel("requests (%)")
    return style.finished(figure, style.simulated(style.origins(rows)))


@style.styled
def goodput(rows: pd.DataFrame, names: Mapping[str, str], attained: float) -> style.BookFigure:
    """The highest request rate at which the attained share of requests is effective: bars of `Goodput` rows.

    A line across the top of a bar is what the search leaves open: down by the overload that the arrivals are too
    short to show, up by the tolerance of the bisection.

    Args:
        rows: rows of `Goodput`; a split is named where a system was searched with several.
        names: what the paper calls each system.
        attained: the share of requests that had to be effective.
    """
    figure, (axes,) = style.new_figure(height=3.2)
    limits = sorted(set(rows["tbt_limit_ms"]))
    searched = list(dict.fromkeys(zip(rows["system"], rows["prefill_nodes"], rows["decode_nodes"], strict=True)))
    width, drawn = 0.8 / len(searched), set[str]()
    for i, (system, prefill, decode) in enumerate(searched):
        mine = where(rows, system=system, prefill_nodes=prefill, decode_nodes=decode).sort_values("tbt_limit_ms")
        heights = mine["requests_per_s"].to_numpy()
        errors = heights * np.stack([1 - 1 / (1 + mine["hidden_overload"]), mine["relative_tolerance"]])
        at = style.bar_places(len(limits), len(searched), i, width)
        label = f"{names[system]} {prefill}P+{decode}D" if system == "mooncake" else names[system]
        colour = COLOURS["mooncake_variant"] if system in drawn else _COLOUR[system]
        axes.bar(at, heights, width=0.93 * width, color=colour, label=label)
        axes.errorbar(at, heights, yerr=errors, fmt="none", ecolor=COLOURS["slo"])
        drawn.add(system)
    axes.set_xticks(range(len(limits)), [f"{limit}" for limit in limits])
    axes.set(xlabel="TBT limit (ms)", ylabel=f"rate with {attained:.0%} effective (req/s)")
    return style.finished(figure, style.simulated(style.sources(rows)))


def _thinned(paper: pd.DataFrame, series: str, near: Iterable[float]) -> pd.DataFrame:
    """The points of a series that lie nearest to the places given, each once."""
    points = where(paper, series=series)
    x = points["x"].to_numpy(dtype=float)
    return points.iloc[sorted({int(np.abs(x - place).argmin()) for place in near if x.min() <= place <= x.max()})]
