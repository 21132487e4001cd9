"""The figures of chapter 07."""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

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
    sources,
    styled,
)

_LABEL: Final[Mapping[str, str]] = MappingProxyType(
    {"conversation": "conversation", "toolagent": "tool&agent", "synthetic": "synthetic", "all": "all three"}
)
_POLICY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lru": "LRU",
        "fifo": "FIFO",
        "lfu": "LFU",
        "length_aware": "LengthAware",
        "arc": "ARC",
        "s3fifo": "S3-FIFO",
        "sieve": "SIEVE",
        "belady": "Belady's optimum",
    }
)
_TABLE_1_LINES: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {"lru": ("-", -0.24), "lfu": ("--", 0.0), "length_aware": (":", 0.24)}
)


@styled
def key_chains(keys: pd.DataFrame) -> BookFigure:
    """Block keys of a few prompts as chains, equal keys in equal colour: rows of `key_table` (arXiv Fig. 3)."""
    names = list(dict.fromkeys(keys["prompt"]))
    figure, (axes,) = new_figure(height=1.1 * len(names))
    for row in keys.to_dict(orient="records"):
        x, y = row["position"], -names.index(row["prompt"])
        colour = COLOURS["mooncake_variant"] if row["shared"] else COLOURS["straw_man_light"]
        axes.add_patch(Rectangle((x + 0.04, y - 0.3), 0.8, 0.6, facecolor=colour, edgecolor=colour, alpha=0.28))
        axes.text(x + 0.44, y, f"{row['tokens']}\n{row['key']}", ha="center", va="center")
        if x:
            axes.annotate(
                "", (x + 0.04, y), (x - 0.16, y), arrowprops={"arrowstyle": "->", "color": COLOURS["optimum"]}
            )
    axes.set(xlim=(-0.1, keys["position"].max() + 1), ylim=(0.5 - len(names), 0.5), xlabel="block (number)")
    axes.set_xticks([position + 0.44 for position in sorted(set(keys["position"]))], sorted(set(keys["position"])))
    axes.set_yticks([-i for i in range(len(names))], names)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


@styled
def table_1(rates: pd.DataFrame, paper: pd.DataFrame, policies: Mapping[str, str]) -> BookFigure:
    """Hit rates by capacity of the three policies of arXiv Table 1, one panel a workload.

    The policies stand side by side at each capacity, so that each diamond is beside the circle that it belongs to.

    Args:
        rates: rows of `PolicyHitRates`; an absent capacity is unlimited.
        paper: the curve of arXiv Table 1, drawn in the first panel, whose workload is nearest.
        policies: the paper's names of the policies to ours.
    """
    workloads = list(dict.fromkeys(rates["workload"]))
    sizes = sorted(set(_sizes(rates["capacity_blocks"].tolist())))
    figure, axes = new_figure(1, len(workloads), height=3.4, sharey=True)
    for panel, workload in zip(axes, workloads, strict=True):
        for policy, table in rates[rates["workload"] == workload].groupby("policy", sort=False):
            line, shift = _TABLE_1_LINES[str(policy)]
            at = [sizes.index(size) + shift for size in _sizes(table["capacity_blocks"].tolist())]
            look: dict[str, Any] = {
                "color": COLOURS[str(policy)],
                "label": _POLICY[str(policy)],
                "linewidth": 1.0,
                **COMPUTED,
            }
            panel.plot(at, table["prefix_hit_rate"], line, **look)
        panel.set_xticks(range(len(sizes)), [_blocks(size) for size in sizes])
        panel.set(ylim=(0, 0.65), xlabel="capacity (blocks)")
        panel_title(panel, _LABEL[str(workload)])
    for series, policy in policies.items():
        points, shift = paper[paper["series"] == series], _TABLE_1_LINES[policy][1]
        at = [sizes.index(x) + shift for x in points["x"]]
        paper_points(axes[0], at, points["y"], "arXiv Table 1, its own trace")
    axes[0].set_ylabel("prefix hit rate (fraction of blocks)")
    legend_above(figure)
    _origin(figure, rates)
    return figure


@styled
def capacity(points: pd.DataFrame, node_tokens: int) -> BookFigure:
    """Prefix hit rate by capacity beside FAST'25 Fig. 9: rows of `beside_fig_9`, and one node's tokens."""
    figure, (axes,) = new_figure(height=3.8)
    for workload, table in points.groupby("workload", sort=False):
        name, origin = str(workload), table["origin"].iloc[0]
        axes.plot(
            table["capacity_tokens"], table["hit_rate"], color=COLOURS[name], label=f"{_LABEL[name]} ({origin})"
        )
        paper_points(axes, table["capacity_tokens"], table["paper"], "FAST'25 Fig. 9")
    axes.axvline(node_tokens, color=COLOURS["dram"], linestyle=(0, (4, 3)), linewidth=1.2)
    axes.annotate(
        f"DRAM of one node, {node_tokens / 1e6:g}M tokens",
        (node_tokens, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        color=COLOURS["dram"],
    )
    axes.set(xscale="log", ylim=(0, 0.7), xlabel="cache capacity (tokens)", ylabel="hit rate (fraction of tokens)")
    label_lines(axes, [line for line in axes.get_lines() if line.get_marker() != "D"])
    legend_above(figure, [line for line in axes.get_lines() if line.get_marker() == "D"])
    _origin(figure, points)
    return figure


@styled
def optimum(rates: pd.DataFrame) -> BookFigure:
    """Every policy against Belady's optimum: rows of `PolicyHitRates`, one panel a workload and capacity."""
    workloads = set(rates["workload"])
    sizes = set(rates["capacity_blocks"])
    figure, axes = new_figure(len(workloads), len(sizes), height=5.6, sharey=True, sharex="row")
    panels = iter(axes)
    for _, ours in rates.groupby("workload", sort=False):
        widest = max(ours["prefix_hit_rate"].tolist())
        for _, same_size in ours.groupby("capacity_blocks"):
            _against_best(next(panels), same_size, widest)
    for panel in axes[-len(sizes) :]:
        panel.set_xlabel("prefix hit rate (fraction)")
    axes[0].invert_yaxis()
    _origin(figure, rates)
    return figure


def _against_best(panel: Axes, rates: pd.DataFrame, widest: float) -> None:
    found: dict[str, float] = dict(zip(rates["policy"].tolist(), rates["prefix_hit_rate"].tolist(), strict=True))
    best = found.pop("belady")
    colours = [COLOURS["lru" if policy == "lru" else "straw_man_light"] for policy in found]
    panel.barh([_POLICY[policy] for policy in found], list(found.values()), color=colours)
    panel.axvline(best, color=COLOURS["optimum"], linewidth=2)
    panel.annotate(f"{best:.2f}", (best, -0.65), xytext=(3, 0), textcoords="offset points", va="center")
    workload, size = rates["workload"].iloc[0], rates["capacity_blocks"].iloc[0]
    panel_title(panel, f"{_LABEL[workload]}, {size:,.0f} blocks\n")
    panel.set_xlim(0, max(1.15 * widest, 0.01))  # a few first requests may share nothing


@styled
def live(blocks: pd.DataFrame, needs: pd.DataFrame) -> BookFigure:
    """Why the optimum needs so little: rows of `LiveBlocks` left, rows of `LRUNeeds` right."""
    figure, (left, right) = new_figure(1, 2, height=3.6)
    for workload, table in blocks.groupby("workload", sort=False):
        name, minutes = str(workload), table["at_s"] / 60
        left.plot(minutes, table["seen_blocks"], "--", color=COLOURS[name], label=f"{_LABEL[name]}: seen so far")
        left.plot(minutes, table["live_blocks"], color=COLOURS[name], label=f"{_LABEL[name]}: will be used again")
        enough = int(table["peak_live_blocks"].iloc[0]) + 1
        label = f"{_LABEL[name]}: {enough:,} blocks suffice for the optimum"
        right.axvline(enough, color=COLOURS[name], linestyle=(0, (1.2, 1.6)), label=label)
    for workload, table in needs.groupby("workload", sort=False):
        right.plot(
            table["capacity_blocks"],
            table["percent"],
            color=COLOURS[str(workload)],
            label=f"{_LABEL[str(workload)]}: LRU",
        )
    left.set(yscale="log", ylim=(100, None), xlabel="time (min)", ylabel="blocks (count)")
    right.set(xscale="log", ylim=(0, 102), xlabel="capacity (blocks)", ylabel="share of all possible hits (%)")
    legend_above(figure, columns=3)
    _origin(figure, blocks)
    return figure


def _sizes(capacities: Iterable[float]) -> list[float]:
    """Capacities in blocks; an absent one is unlimited."""
    return [float("inf") if math.isnan(size) else size for size in capacities]


def _blocks(size: float) -> str:
    return "unlimited" if size == float("inf") else f"{size / 1000:g}k"


def _origin(figure: BookFigure, rows: pd.DataFrame) -> None:
    single = rows.query("workload != 'all'")  # the merged trace would name the others once more
    footer(figure, f"replayed: {sources(single)}")


_TIERS: Final[Mapping[str, tuple[str, str, str]]] = MappingProxyType(
    {
        "none": ("computed anew", COLOURS["straw_man"], "-"),
        "dram": ("from DRAM", COLOURS["dram"], "-"),
        "ssd": ("from SSD", COLOURS["ssd"], "-"),
        "tcp": ("from another process, TCP", COLOURS["remote"], "--"),
    }
)
_LINES: Final = (":", "-.", "--")


@styled
def tiers(
    turns: pd.DataFrame, tried: pd.DataFrame, crossing: float | None, asked: Mapping[str, str]
) -> BookFigure:
    """TTFT of each turn by tier, and recompute over reuse by the bandwidth of the tier.

    Args:
        turns: rows of `Conversation`.
        tried: rows of `BreakEven`.
        crossing: the measured break-even (MB/s), if there is one.
        asked: what Eq. 2 asks for: columns of `tried` and their names.
    """
    figure, (left, right) = new_figure(1, 2, height=3.6)
    for tier, rows in turns.groupby("tier", sort=False):
        label, colour, style = _TIERS[str(tier)]
        left.fill_between(rows["prompt_tokens"], rows["least_ms"], rows["most_ms"], color=colour, alpha=0.15, lw=0)
        left.plot(rows["prompt_tokens"], rows["ttft_ms"], "o", linestyle=style, color=colour, label=label)
    left.set(xlabel="prompt of the turn (tokens)", ylabel="TTFT (ms)")
    left.set_ylim(bottom=0)
    right.plot(tried["mb_per_s"], tried["ratio"], "o-", color=COLOURS["here"], label="time ratio, measured")
    right.axhline(1, color=COLOURS["slo"], linewidth=1)
    for (column, label), style in zip(asked.items(), _LINES, strict=False):
        right.axvline(tried[column].to_list()[0], color=COLOURS["optimum"], linestyle=style, lw=1.4, label=label)
    if crossing is not None:
        right.plot([crossing], [1], "o", color=COLOURS["latency"], markersize=8, label="measured break-even")
    right.set(
        xscale="log",
        yscale="log",
        xlabel="bandwidth of the tier (MB/s)",
        ylabel="time of computing\nover reusing (ratio)",
    )
    right.set_yticks([0.2, 0.5, 1, 2, 5])
    right.minorticks_off()
    right.xaxis.set_major_formatter(plain_number)
    right.yaxis.set_major_formatter(plain_number)
    legend_above(figure, columns=3)
    footer(
        figure, f"measured: medians of few rounds, shaded from fastest to slowest; {turns['machine'].to_list()[0]}"
    )
    return figure
