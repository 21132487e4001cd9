"""Figures of the traces: lengths, block uses, arrivals, sharing, block sizes."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pandas as pd
from matplotlib.ticker import PercentFormatter

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS
from mooncake_lab.book.paper import Fact

_LOOK: Final = {
    "conversation": ("conversation", "conversation"),
    "synthetic": ("synthetic", "synthetic"),
    "toolagent": ("toolagent", "tool&agent"),
    "arxiv": ("all", "arXiv"),
}
"""Colour and label of a trace."""


@style.styled
def lengths(
    histograms: pd.DataFrame, paper: Mapping[str, pd.DataFrame], numbers: pd.DataFrame
) -> style.BookFigure:
    """Prompt and answer lengths beside arXiv Fig. 5.

    Args:
        histograms: rows of `TraceLengths` with `of` input and output, for one or more workloads.
        paper: the curves of arXiv Fig. 5 by `of`.
        numbers: rows of `TraceNumbers`, for the labels and the footer.
    """
    figure, axes = style.new_figure(1, 2, height=3.4)
    for panel, of in zip(axes, ("input", "output"), strict=True):
        table = where(histograms, of=of)
        for workload, bins in table.groupby("workload", sort=False):
            edges = [*bins["left"], bins["right"].max()]
            panel.stairs(bins["requests"], edges, linewidth=1.8, **_identity(workload, numbers))
        middle = (table["right"] - table["left"]).mean()
        points = paper[of][paper[of]["y"] > 0]
        style.paper_points(panel, points["x"] + middle / 2, points["y"], "arXiv Fig. 5")
        panel.set(yscale="log", xlabel=f"{of} length (tokens)", ylabel="requests in the bin (count)")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    return style.finished(figure, _origin(numbers, histograms["workload"]))


@style.styled
def block_uses(uses: pd.DataFrame, paper: pd.DataFrame, numbers: pd.DataFrame) -> style.BookFigure:
    """How often blocks are used beside arXiv Fig. 6: rows of `BlockUses`, the curve, rows of `TraceNumbers`."""
    figure, (axes,) = style.new_figure(height=3.7)
    for workload, table in uses.groupby("workload", sort=False):
        axes.step(table["uses"], table["share_at_most"], where="post", **_identity(workload, numbers))
    style.paper_points(axes, paper["x"], paper["y"], "arXiv Fig. 6")
    axes.set(xscale="log", ylim=(0, 1.02), xlabel="uses of a block (requests)", ylabel="share of blocks (%)")
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    return style.finished(figure, _origin(numbers, uses["workload"]))


@style.styled
def arrivals(arriving: pd.DataFrame, numbers: pd.DataFrame) -> style.BookFigure:
    """Requests at each timestamp of the first seconds: rows of `Arrivals`, one panel a workload."""
    tables = list(arriving.groupby("workload", sort=False))
    figure, axes = style.new_figure(len(tables), 1, height=1.5 * len(tables) + 0.6, sharex=True)
    for panel, (workload, table) in zip(axes, tables, strict=True):
        identity = _identity(workload, numbers)
        panel.vlines(table["at_s"], 0, table["arriving"], linewidth=2, **identity)
        panel.set(ylim=(0, None), ylabel="requests (count)")
        style.panel_title(panel, identity["label"])
    axes[-1].set_xlabel("arrival time (s)")
    return style.finished(figure, _origin(numbers, arriving["workload"]), legend=False)


@style.styled
def sharing(conversations: pd.DataFrame, gaps: pd.DataFrame, numbers: pd.DataFrame) -> style.BookFigure:
    """Who shares and for how long: rows of `Conversations` left, rows of `ReuseGaps` right."""
    figure, (left, right) = style.new_figure(1, 2)
    for workload, table in conversations.groupby("workload", sort=False):
        left.step(table["turns"], table["share_at_least"], where="post", **_identity(workload, numbers))
    left.set(xlabel="turns of the conversation (requests, at least)", ylabel="share of requests (%)")
    for workload, table in gaps.groupby("workload", sort=False):
        right.plot(table["gap_s"].clip(lower=0.1), table["share"], **_identity(workload, numbers))
    right.set(xlabel="time until a block is used again (s, at most)", ylabel="share of reuses (%)")
    for panel in (left, right):
        panel.set(xscale="log", ylim=(0, 1.02))
        panel.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    return style.finished(figure, _origin(numbers, conversations["workload"]))


@style.styled
def block_sizes(
    sizes: pd.DataFrame, paper: Mapping[str, Fact], paper_block: Fact, numbers: pd.DataFrame
) -> style.BookFigure:
    """What an endless cache can reuse of prompts by block size.

    Args:
        sizes: rows of `LargerBlocks`.
        paper: the printed cache ratio (percent) of each workload.
        paper_block: tokens per block of the paper's store, the size at which its ratios are drawn.
        numbers: rows of `TraceNumbers`, for the labels and the footer.
    """
    figure, (axes,) = style.new_figure(height=3.7)
    for workload, table in sizes.groupby("workload", sort=False):
        look: dict[str, Any] = {**style.COMPUTED, **_identity(workload, numbers)}
        axes.plot(table["block_size_tokens"], table["ideal_token_hit_rate"], **look)
        ratio = paper[str(workload)].value / 100
        style.paper_points(axes, [paper_block.value], [ratio], "FAST'25 Table 2, drawn at the store's block size")
    axes.set(xscale="log", ylim=(0, 0.8), xlabel="block size (tokens)", ylabel="reusable prompt tokens (%)")
    style.log_ticks(axes, [paper_block.value, *sorted(set(sizes["block_size_tokens"]))])
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    return style.finished(figure, _origin(numbers, sizes["workload"]), columns=3)


def _identity(workload: object, numbers: pd.DataFrame) -> dict[str, Any]:
    colour, label = _LOOK[str(workload)]
    origin = where(numbers, workload=workload)["origin"].iloc[0]
    return {"color": COLOURS[colour], "label": f"{label} ({origin})"}


def _origin(numbers: pd.DataFrame, workloads: Iterable[Any]) -> str:
    sources = numbers.set_index("workload")["source"]
    return "counted in: " + "; ".join(str(sources[name]) for name in dict.fromkeys(workloads))
