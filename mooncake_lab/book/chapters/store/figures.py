"""The figures of chapter 07."""

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS

_LABEL: Final = {
    "conversation": "conversation",
    "toolagent": "tool&agent",
    "synthetic": "synthetic",
    "all": "all three",
}
_POLICY: Final = {
    "lru": "LRU",
    "fifo": "FIFO",
    "lfu": "LFU",
    "length_aware": "LengthAware",
    "arc": "ARC",
    "s3fifo": "S3-FIFO",
    "sieve": "SIEVE",
    "2q": "2Q",
    "belady": "Belady's optimum",
}
_ON_PREFIXES: Final = {
    "lru on prefixes": "LRU, whole prefixes",
    "slru on prefixes": "segmented LRU, whole prefixes",
}
_TABLE_1_LINES: Final = {"lru": ("-", -0.24), "lfu": ("--", 0.0), "length_aware": (":", 0.24)}
_TIERS: Final = {
    "none": ("computed anew", "straw_man", "-"),
    "dram": ("from DRAM", "dram", "-"),
    "ssd": ("from SSD", "ssd", "-"),
    "tcp": ("from another process, TCP", "remote", "--"),
}


@style.styled
def key_chains(keys: pd.DataFrame) -> style.BookFigure:
    """Block keys of a few prompts as chains, equal keys in equal colour: rows of `key_table` (arXiv Fig. 3)."""
    names = list(dict.fromkeys(keys["prompt"]))
    figure, (axes,) = style.new_figure(height=1.1 * len(names))
    for row in keys.to_dict(orient="records"):
        x, y = row["position"], -names.index(row["prompt"])
        colour = COLOURS["mooncake_variant"] if row["shared"] else COLOURS["straw_man_light"]
        axes.add_patch(Rectangle((x + 0.04, y - 0.3), 0.8, 0.6, facecolor=colour, edgecolor=colour, alpha=0.28))
        axes.text(x + 0.44, y, f"{row['tokens']}\n{row['key']}", ha="center", va="center")
        if x:
            arrow = {"arrowstyle": "->", "color": COLOURS["optimum"]}
            axes.annotate("", (x + 0.04, y), (x - 0.16, y), arrowprops=arrow)
    axes.set(xlim=(-0.1, keys["position"].max() + 1), ylim=(0.5 - len(names), 0.5), xlabel="block (number)")
    axes.set_xticks([position + 0.44 for position in sorted(set(keys["position"]))], sorted(set(keys["position"])))
    axes.set_yticks([-i for i in range(len(names))], names)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


@style.styled
def table_1(rates: pd.DataFrame, paper: pd.DataFrame, policies: Mapping[str, str]) -> style.BookFigure:
    """Hit rates by capacity of the three policies of arXiv Table 1, one panel a workload.

    The policies stand side by side at each capacity, so that each diamond is beside the circle that it belongs to.

    Args:
        rates: rows of `PolicyHitRates`; an absent capacity is unlimited.
        paper: the curve of arXiv Table 1, drawn in the first panel, whose workload is nearest.
        policies: the paper's names of the policies to ours.
    """
    rates = rates.assign(capacity_blocks=rates["capacity_blocks"].fillna(float("inf")))
    workloads = list(dict.fromkeys(rates["workload"]))
    sizes = sorted(set(rates["capacity_blocks"]))
    figure, axes = style.new_figure(1, len(workloads), height=3.4, sharey=True)
    for panel, workload in zip(axes, workloads, strict=True):
        for name, table in where(rates, workload=workload).groupby("policy", sort=False):
            policy = str(name)
            line, shift = _TABLE_1_LINES[policy]
            at = [sizes.index(size) + shift for size in table["capacity_blocks"]]
            look: dict[str, Any] = {"color": COLOURS[policy], "label": _POLICY[policy], "linewidth": 1.0}
            panel.plot(at, table["prefix_hit_rate"], line, **look, **style.COMPUTED)
        panel.set_xticks(range(len(sizes)), [f"{size / 1000:g}k".replace("infk", "unlimited") for size in sizes])
        panel.set(ylim=(0, 0.65), xlabel="capacity (blocks)")
        style.panel_title(panel, _LABEL[str(workload)])
    for series, policy in policies.items():
        points = where(paper, series=series)
        at = [sizes.index(x) + _TABLE_1_LINES[policy][1] for x in points["x"]]
        style.paper_points(axes[0], at, points["y"], "arXiv Table 1, its own trace")
    axes[0].set_ylabel("prefix hit rate (fraction of blocks)")
    return style.finished(figure, _origin(rates))


@style.styled
def capacity(points: pd.DataFrame, node_tokens: int) -> style.BookFigure:
    """Prefix hit rate by capacity beside FAST'25 Fig. 9: rows of `beside_fig_9`, and one node's tokens."""
    figure, (axes,) = style.new_figure(height=3.8)
    for workload, table in points.groupby("workload", sort=False):
        name, tokens = str(workload), table["capacity_tokens"]
        label = f"{_LABEL[name]} ({table['origin'].iloc[0]})"
        axes.plot(tokens, table["hit_rate"], color=COLOURS[name], label=label)
    lines = axes.get_lines()[:]
    drawn = style.paper_points(axes, points["capacity_tokens"], points["paper"], "FAST'25 Fig. 9")
    axes.axvline(node_tokens, color=COLOURS["dram"], linestyle=(0, (4, 3)), linewidth=1.2)
    text, at = f"DRAM of one node, {node_tokens / 1e6:g}M tokens", (node_tokens, 0.98)
    axes.annotate(text, at, xycoords=("data", "axes fraction"), xytext=(-4, 0), textcoords="offset points",
                  ha="right", va="top", color=COLOURS["dram"])  # fmt: skip
    axes.set(xscale="log", ylim=(0, 0.7), xlabel="cache capacity (tokens)", ylabel="hit rate (fraction of tokens)")
    style.label_lines(axes, lines)
    return style.finished(figure, _origin(points), legend=[drawn])


@style.styled
def optimum(rates: pd.DataFrame) -> style.BookFigure:
    """Every policy against Belady's optimum: rows of `PolicyHitRates`, one panel a workload and capacity."""
    workloads, sizes = set(rates["workload"]), set(rates["capacity_blocks"])
    figure, axes = style.new_figure(len(workloads), len(sizes), height=5.6, sharey=True, sharex="row")
    panels = iter(axes)
    for _, ours in rates.groupby("workload", sort=False):
        widest = max(ours["prefix_hit_rate"].tolist())
        for _, same_size in ours.groupby("capacity_blocks"):
            _against_best(next(panels), same_size, widest)
    for panel in axes[-len(sizes) :]:
        panel.set_xlabel("prefix hit rate (fraction)")
    axes[0].invert_yaxis()
    return style.finished(figure, _origin(rates), legend=False)


def _against_best(panel: Axes, rates: pd.DataFrame, widest: float) -> None:
    found: dict[str, float] = rates.set_index("policy")["prefix_hit_rate"].to_dict()
    best = found.pop("belady")
    colours = [COLOURS["lru" if policy == "lru" else "straw_man_light"] for policy in found]
    panel.barh([_POLICY[policy] for policy in found], list(found.values()), color=colours)
    panel.axvline(best, color=COLOURS["optimum"], linewidth=2)
    panel.annotate(f"{best:.2f}", (best, -0.65), xytext=(3, 0), textcoords="offset points", va="center")
    workload, size = rates["workload"].iloc[0], rates["capacity_blocks"].iloc[0]
    style.panel_title(panel, f"{_LABEL[workload]}, {size:,.0f} blocks\n")
    panel.set_xlim(0, max(1.15 * widest, 0.01))  # a few first requests may share nothing


@style.styled
def gap(rates: pd.DataFrame) -> style.BookFigure:
    """Each policy between LRU and the optimum of whole prefixes: rows of `EvictionGap`, one panel a workload.

    Bars have the rules of `kvcache-simulator`, and beside them stands what share of the gap they close; ticks have
    the rule of the chapter.
    """
    workloads = list(dict.fromkeys(rates["workload"]))
    figure, axes = style.new_figure(1, len(workloads), height=4.2, sharey=True)
    for panel, workload in zip(axes, workloads, strict=True):
        _gap_panel(panel, where(rates, workload=workload))
    return style.finished(figure, _origin(rates), legend=axes[0].get_legend_handles_labels()[0])


def _gap_panel(panel: Axes, rates: pd.DataFrame) -> None:
    best: Any = where(rates, policy="optimum on prefixes").iloc[0]
    names = {name: label for name, label in {**_POLICY, **_ON_PREFIXES}.items() if name != "belady"}
    every: list[dict[Any, Any]] = rates.to_dict(orient="records")
    rows = sorted([row for row in every if row["policy"] in names], key=itemgetter("hit_rate"))
    labels = [names[row["policy"]] for row in rows]
    colours = [COLOURS["lru" if row["policy"] == "lru" else "straw_man_light"] for row in rows]
    panel.barh(labels, [row["hit_rate"] for row in rows], color=colours)
    look: dict[str, Any] = {"color": COLOURS["ink"], "linestyle": "None", "markersize": 9}
    panel.plot([row["own_hit_rate"] for row in rows], labels, "|", label="all requests, in blocks", **look)
    panel.axvline(best["hit_rate"], color=COLOURS["optimum"], linewidth=2, label="the optimum of whole prefixes")
    for label, row in zip(labels, rows, strict=True):
        closed = row["gap_closed"]
        words = "" if closed is None or math.isnan(closed) else f"{round(100 * closed):d} %".replace("-", "\u2212")
        at = (max(row["hit_rate"], row["own_hit_rate"]), label)
        panel.annotate(words, at, xytext=(5, 0), textcoords="offset points", va="center")
    style.panel_title(panel, f"{_LABEL[str(best['workload'])]}, {best['capacity_blocks']:,.0f} blocks")
    panel.set(xlim=(0, max(1.1 * best["hit_rate"], 0.01)), xlabel="hit rate (fraction of tokens)")


@style.styled
def live(blocks: pd.DataFrame, needs: pd.DataFrame) -> style.BookFigure:
    """Why the optimum needs so little: rows of `LiveBlocks` left, rows of `LRUNeeds` right."""
    figure, (left, right) = style.new_figure(1, 2, height=3.6)
    for workload, table in blocks.groupby("workload", sort=False):
        name, minutes, colour = _LABEL[str(workload)], table["at_s"] / 60, COLOURS[str(workload)]
        left.plot(minutes, table["seen_blocks"], "--", color=colour, label=f"{name}: seen so far")
        left.plot(minutes, table["live_blocks"], color=colour, label=f"{name}: will be used again")
        enough = int(table["peak_live_blocks"].iloc[0]) + 1
        label = f"{name}: {enough:,} blocks suffice for the optimum"
        right.axvline(enough, color=colour, linestyle=(0, (1.2, 1.6)), label=label)
    for workload, table in needs.groupby("workload", sort=False):
        look: dict[str, Any] = {"color": COLOURS[str(workload)], "label": f"{_LABEL[str(workload)]}: LRU"}
        right.plot(table["capacity_blocks"], table["percent"], **look)
    left.set(yscale="log", ylim=(100, None), xlabel="time (min)", ylabel="blocks (count)")
    right.set(xscale="log", ylim=(0, 102), xlabel="capacity (blocks)", ylabel="share of all possible hits (%)")
    return style.finished(figure, _origin(blocks), columns=3)


def _origin(rows: pd.DataFrame) -> str:
    single = rows.query("workload != 'all'")  # the merged trace would name the others once more
    return f"replayed: {style.sources(single)}"


@style.styled
def tiers(
    turns: pd.DataFrame, tried: pd.DataFrame, crossing: float | None, asked: Mapping[str, str]
) -> style.BookFigure:
    """TTFT of each turn by tier, and recompute over reuse by the bandwidth of the tier.

    Args:
        turns: rows of `Conversation`.
        tried: rows of `BreakEven`.
        crossing: the measured break-even (MB/s), if there is one.
        asked: what Eq. 2 asks for: columns of `tried` and their names.
    """
    figure, (left, right) = style.new_figure(1, 2, height=3.6)
    for tier, rows in turns.groupby("tier", sort=False):
        label, colour, line = _TIERS[str(tier)]
        prompt = rows["prompt_tokens"]
        look: dict[str, Any] = {"color": COLOURS[colour]}
        left.fill_between(prompt, rows["least_ms"], rows["most_ms"], alpha=0.15, lw=0, **look)
        left.plot(prompt, rows["ttft_ms"], "o", linestyle=line, label=label, **look)
    left.set(xlabel="prompt of the turn (tokens)", ylabel="TTFT (ms)")
    left.set_ylim(bottom=0)
    right.plot(tried["mb_per_s"], tried["ratio"], "o-", color=COLOURS["here"], label="time ratio, measured")
    right.axhline(1, color=COLOURS["slo"], linewidth=1)
    for (column, label), line in zip(asked.items(), (":", "-.", "--"), strict=False):
        right.axvline(tried[column].iloc[0], color=COLOURS["optimum"], linestyle=line, lw=1.4, label=label)
    if crossing is not None:
        right.plot([crossing], [1], "o", color=COLOURS["latency"], markersize=8, label="measured break-even")
    style.log_axes(right)
    right.set(xlabel="bandwidth of the tier (MB/s)", ylabel="time of computing\nover reusing (ratio)")
    right.set_yticks([0.2, 0.5, 1, 2, 5])
    right.minorticks_off()
    source = "measured: medians of few rounds, shaded from fastest to slowest"
    return style.finished(figure, f"{source}; {turns['machine'].iloc[0]}", columns=3)
