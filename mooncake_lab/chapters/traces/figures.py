"""Figures of the traces: lengths, block uses, arrivals, sharing, block sizes."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import pandas as pd
from matplotlib.ticker import PercentFormatter

from mooncake_lab.figures.style import (
    COLOURS,
    COMPUTED,
    BookFigure,
    footer,
    legend_above,
    log_ticks,
    new_figure,
    panel_title,
    paper_points,
    styled,
)
from mooncake_lab.paper import Fact

_COLOUR: Final[Mapping[str, str]] = MappingProxyType(
    {"conversation": "conversation", "synthetic": "synthetic", "toolagent": "toolagent", "arxiv": "all"}
)
_LABEL: Final[Mapping[str, str]] = MappingProxyType(
    {"conversation": "conversation", "synthetic": "synthetic", "toolagent": "tool&agent", "arxiv": "arXiv"}
)


@styled
def lengths(histograms: pd.DataFrame, paper: Mapping[str, pd.DataFrame], numbers: pd.DataFrame) -> BookFigure:
    """Prompt and answer lengths beside arXiv Fig. 5.

    Args:
        histograms: rows of `TraceLengths` with `of` input and output, for one or more workloads.
        paper: the curves of arXiv Fig. 5 by `of`.
        numbers: rows of `TraceNumbers`, for the labels and the footer.
    """
    figure, axes = new_figure(1, 2, height=3.4)
    for panel, of in zip(axes, ("input", "output"), strict=True):
        table = histograms[histograms["of"] == of]
        for workload, bins in table.groupby("workload", sort=False):
            edges = [*bins["left"], bins["right"].max()]
            panel.stairs(bins["requests"], edges, linewidth=1.8, **_identity(workload, numbers))
        middle = (table["right"] - table["left"]).mean()
        points = paper[of][paper[of]["y"] > 0]
        paper_points(panel, points["x"] + middle / 2, points["y"], "arXiv Fig. 5")
        panel.set(yscale="log", xlabel=f"{of} length (tokens)", ylabel="requests in the bin (count)")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    legend_above(figure)
    _origin(figure, numbers, histograms["workload"])
    return figure


@styled
def block_uses(uses: pd.DataFrame, paper: pd.DataFrame, numbers: pd.DataFrame) -> BookFigure:
    """How often blocks are used beside arXiv Fig. 6: rows of `BlockUses`, the curve, rows of `TraceNumbers`."""
    figure, (axes,) = new_figure(height=3.7)
    for workload, table in uses.groupby("workload", sort=False):
        axes.step(table["uses"], table["share_at_most"], where="post", **_identity(workload, numbers))
    paper_points(axes, paper["x"], paper["y"], "arXiv Fig. 6")
    axes.set(xscale="log", ylim=(0, 1.02), xlabel="uses of a block (requests)", ylabel="share of blocks (%)")
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    legend_above(figure)
    _origin(figure, numbers, uses["workload"])
    return figure


@styled
def arrivals(arriving: pd.DataFrame, numbers: pd.DataFrame) -> BookFigure:
    """Requests at each timestamp of the first seconds: rows of `Arrivals`, one panel a workload."""
    workloads = list(dict.fromkeys(arriving["workload"]))
    figure, axes = new_figure(len(workloads), 1, height=1.5 * len(workloads) + 0.6, sharex=True)
    for panel, workload in zip(axes, workloads, strict=True):
        table = arriving[arriving["workload"] == workload]
        panel.vlines(table["at_s"], 0, table["arriving"], linewidth=2, **_identity(workload, numbers))
        panel.set(ylim=(0, None), ylabel="requests (count)")
        panel_title(panel, _identity(workload, numbers)["label"])
    axes[-1].set_xlabel("arrival time (s)")
    _origin(figure, numbers, workloads)
    return figure


@styled
def sharing(conversations: pd.DataFrame, gaps: pd.DataFrame, numbers: pd.DataFrame) -> BookFigure:
    """Who shares and for how long: rows of `Conversations` left, rows of `ReuseGaps` right."""
    figure, (left, right) = new_figure(1, 2)
    for workload, table in conversations.groupby("workload", sort=False):
        left.step(table["turns"], table["share_at_least"], where="post", **_identity(workload, numbers))
    left.set(xscale="log", ylim=(0, 1.02), xlabel="turns of the conversation (requests, at least)")
    for workload, table in gaps.groupby("workload", sort=False):
        right.plot(table["gap_s"].clip(lower=0.1), table["share"], **_identity(workload, numbers))
    right.set(xscale="log", ylim=(0, 1.02), xlabel="time until a block is used again (s, at most)")
    for panel, of in ((left, "requests"), (right, "reuses")):
        panel.set_ylabel(f"share of {of} (%)")
        panel.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    legend_above(figure)
    _origin(figure, numbers, conversations["workload"])
    return figure


@styled
def block_sizes(
    sizes: pd.DataFrame, paper: Mapping[str, Fact], paper_block: Fact, numbers: pd.DataFrame
) -> BookFigure:
    """What an endless cache can reuse of prompts by block size.

    Args:
        sizes: rows of `LargerBlocks`.
        paper: the printed cache ratio (percent) of each workload.
        paper_block: tokens per block of the paper's store, the size at which its ratios are drawn.
        numbers: rows of `TraceNumbers`, for the labels and the footer.
    """
    figure, (axes,) = new_figure(height=3.7)
    for workload, table in sizes.groupby("workload", sort=False):
        identity = _identity(workload, numbers)
        axes.plot(table["block_size_tokens"], table["ideal_token_hit_rate"], **COMPUTED, **identity)
        ratio = paper[str(workload)].value / 100
        paper_points(axes, [paper_block.value], [ratio], "FAST'25 Table 2, drawn at the store's block size")
    axes.set(xscale="log", ylim=(0, 0.8), xlabel="block size (tokens)", ylabel="reusable prompt tokens (%)")
    log_ticks(axes, [paper_block.value, *sorted(set(sizes["block_size_tokens"]))])
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    legend_above(figure, columns=3)
    _origin(figure, numbers, sizes["workload"])
    return figure


def _identity(workload: object, numbers: pd.DataFrame) -> dict[str, Any]:
    name = str(workload)
    origin = numbers.set_index("workload").loc[name, "origin"]
    return {"color": COLOURS[_COLOUR[name]], "label": f"{_LABEL[name]} ({origin})"}


def _origin(figure: BookFigure, numbers: pd.DataFrame, workloads: Iterable[Any]) -> None:
    sources = numbers.set_index("workload")["source"]
    footer(figure, "counted in: " + "; ".join(str(sources[name]) for name in dict.fromkeys(workloads)))
