"""Figures of placement: TTFT boxes, local against global cache, replicas, sensitivity."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes

from mooncake_lab.book.experiments import records, where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS

_LOOK: Final = {
    "kvcache_centric": ("mooncake", "KVCache-centric"),
    "cache_aware": ("mooncake_variant", "local\ncache-aware"),
    "load_balance": ("straw_man", "load\nbalancing"),
    "random": ("straw_man_light", "random"),
    "local, longest_prefix": ("straw_man_light", "local, longest prefix"),
    "local, load_balance": ("straw_man", "local, least backlog"),
    "local, cache_aware": ("mooncake_variant", "local, shortest expected TTFT"),
    "global": ("mooncake", "global cache"),
}
"""Colour and label of policies, and of caches."""
_PARTS: Final = {
    "q1": "q1",
    "median": "med",
    "q3": "q3",
    "whisker_low": "whislo",
    "whisker_high": "whishi",
    "mean": "mean",
}
"""The parts of a box, and what matplotlib calls them."""


@style.styled
def boxes(
    panels: Mapping[str, pd.DataFrame], paper: Mapping[str, pd.DataFrame], names: Mapping[str, Mapping[str, str]]
) -> style.BookFigure:
    """TTFT by policy as box plots, ours in colour, the paper's beside it in black with a diamond at its mean.

    Args:
        panels: rows of `PlacementReplay`, one a policy, by the name of the panel.
        paper: the curve of the paper's box plot, by the same names.
        names: by the same names, what the paper calls each policy.
    """
    figure, axes = style.new_figure(1, len(panels), height=4.0)
    for panel, (title, rows) in zip(axes, panels.items(), strict=True):
        table = rows.set_index("policy")
        policies = [policy for policy in names[title] if policy in table.index]
        for at, policy in enumerate(policies):
            _box(panel, at - 0.19, table.loc[policy].to_dict(), COLOURS[_LOOK[policy][0]], filled=True)
            theirs = _printed(paper[title], names[title][policy])
            _box(panel, at + 0.19, theirs, COLOURS["paper"], filled=False)
            style.paper_points(panel, [at + 0.19], [theirs["mean"]], "mean in the paper" if at == 0 else "_")
        style.log_axes(panel, "y")
        style.panel_title(panel, title)
        panel.set_ylabel("TTFT (s)")
        panel.set_xticks(range(len(policies)), [_LOOK[policy][1] for policy in policies])
        style.slo_line(panel, 30.0, "limit 30 s", left=True)
    return style.finished(figure, style.simulated(style.sources(*panels.values())))


@style.styled
def caches(rows: pd.DataFrame, paper: Mapping[str, pd.DataFrame], names: Mapping[str, str]) -> style.BookFigure:
    """Hit rate and prefill GPU time of ten nodes, with local caches under three policies and with a global one.

    Args:
        rows: what `local_and_global` made.
        paper: the curves of FAST'25 Fig. 10 by `token_hit_rate` and `prefill_gpu_s`.
        names: what the paper calls our workloads.
    """
    figure, axes = style.new_figure(1, 2, height=3.6)
    kinds = [kind for kind in _LOOK if kind.startswith(("local,", "global"))]
    panels = (("token_hit_rate", "token hit rate (%)", 100), ("prefill_gpu_s", "prefill GPU time (s/request)", 1))
    for panel, (quantity, ylabel, unit) in zip(axes, panels, strict=True):
        for i, kind in enumerate(kinds):
            heights = unit * where(rows, cache=kind).set_index("workload")[quantity].loc[list(names)]
            colour, label = _LOOK[kind]
            at = style.bar_places(len(names), len(kinds), i, 0.2)
            panel.bar(at, heights, width=0.19, color=COLOURS[colour], label=label)
        for series, offset in (("Local cache", -0.2), ("Global cache", 0.3)):
            printed = where(paper[quantity], series=series).set_index("x")["y"].loc[list(names.values())]
            at = [k + offset for k in range(len(names))]
            style.paper_points(panel, at, printed, "paper" if offset < 0 else "_")
        panel.set_xticks(range(len(names)), list(names.values()))
        panel.set(ylabel=ylabel, ylim=(0, None))
    return style.finished(figure, style.simulated(style.sources(rows)), columns=3)


@style.styled
def replicas(rows: pd.DataFrame, paper: pd.DataFrame, names: Mapping[str, str]) -> style.BookFigure:
    """Replicas of popular blocks over time, one panel a rank and workload.

    Args:
        rows: rows of `Replicas` with eviction `lru`, and `lfu` where that is of interest.
        paper: the curve of FAST'25 Fig. 11.
        names: what the paper calls our workloads.
    """
    ranks = sorted(set(rows["rank"]))
    size: dict[str, Any] = {"height": 1.6 * len(names) + 1.1, "sharey": True}
    figure, axes = style.new_figure(len(names), len(ranks), **size)
    for panel, (workload, rank) in zip(axes, [(w, r) for w in names for r in ranks], strict=True):
        for eviction in ("lru", "lfu"):
            line = where(rows, workload=workload, rank=rank, eviction=eviction)
            look: dict[str, Any] = {"color": COLOURS[eviction], "label": eviction.upper()}
            panel.step(line["at_s"], line["replicas"], where="post", **look)
        theirs = where(paper, series=f"{names[workload]}/{rank}th").iloc[::6]
        style.paper_points(panel, theirs["x"], theirs["y"], "FAST'25 Fig. 11")
        if workload == next(iter(names)):
            style.panel_title(panel, f"block of rank {rank:,}")
        panel.set(ylim=(-0.3, 8.6))
    for panel, name in zip(axes[:: len(ranks)], names.values(), strict=True):
        panel.set_ylabel(f"{name}\nreplicas (count)")
    for panel in axes[-len(ranks) :]:
        panel.set_xlabel("time (s)")
    return style.finished(figure, style.simulated(style.origins(rows)))


@style.styled
def thresholds(rows: pd.DataFrame) -> style.BookFigure:
    """Mean TTFT, and how often a prefix is fetched, by the balancing threshold: rows of `PlacementReplay`."""
    figure, (left, right) = style.new_figure(1, 2, height=3.0)
    look: dict[str, Any] = {**style.COMPUTED, "color": COLOURS["mooncake"]}
    left.plot(rows["threshold"], rows["mean"], **look)
    left.set(ylabel="mean TTFT (s)", ylim=(0, 1.15 * max(rows["mean"])))
    right.plot(rows["threshold"], 100 * rows["fetching"], **look)
    right.set(ylabel="requests that fetch a prefix (%)", ylim=(0, None))
    for panel in (left, right):
        panel.set(xscale="log", xlabel="balancing threshold (ratio of matches)")
        style.log_ticks(panel, sorted(set(rows["threshold"])))
    return style.finished(figure, style.simulated(style.sources(rows)), legend=False)


@style.styled
def load(rows: pd.DataFrame, paper: pd.DataFrame, names: Mapping[str, str]) -> style.BookFigure:
    """Mean TTFT by policy over the number of prefill nodes; the paper's means at the eight we assume.

    Args:
        rows: rows of `PlacementReplay` by policy and prefill nodes.
        paper: the curve of FAST'25 Fig. 5.
        names: what the paper calls each policy.
    """
    figure, (axes,) = style.new_figure(height=3.6)
    for policy in names:
        line, (colour, label) = where(rows, policy=policy), _LOOK[policy]
        look: dict[str, Any] = {**style.COMPUTED, "color": COLOURS[colour], "label": label.replace("\n", " ")}
        axes.plot(line["prefill_nodes"], line["mean"], **look)
    lines = axes.get_lines()[:]
    means = where(paper, x="mean").set_index("series")["y"].loc[list(names.values())]
    drawn = style.paper_points(axes, [8] * len(names), means, "FAST'25 Fig. 5, split assumed")
    axes.set(xlabel="prefill nodes of 16 (nodes)", ylabel="mean TTFT (s)")
    axes.set_xticks(sorted(set(rows["prefill_nodes"])))
    style.log_axes(axes, "y")
    style.label_lines(axes, lines)
    return style.finished(figure, style.simulated(style.sources(rows)), legend=[drawn])


@style.styled
def capacity(rows: pd.DataFrame, assumed_tokens: float) -> style.BookFigure:
    """TTFT and hit rate by what a prefill node holds, in DRAM or in little DRAM and on SSD.

    Args:
        rows: rows of `ClusterCapacity`; the first SSD's speed is drawn as a line, others as points beside it.
        assumed_tokens: the DRAM that this book assumes elsewhere.
    """
    figure, panels = style.new_figure(1, 2, height=3.4)
    held = rows.assign(millions=(rows["dram_tokens"] + rows["ssd_tokens"]) / 1e6)
    held["token_hit_rate"] *= 100
    dram, ssd = held.query("ssd_tokens == 0"), held.query("ssd_tokens > 0")
    usual = float(ssd["ssd_bytes_per_s"].iloc[0])
    line = pd.concat([dram.head(1), where(ssd, ssd_bytes_per_s=usual)])
    below = f"{dram['dram_tokens'].iloc[0] / 1e6:g}M in DRAM, rest on SSD, {usual / 1e9:g} GB/s"
    labels = {"ttft_mean_s": "mean TTFT (s)", "token_hit_rate": "token hit rate (%)"}
    for panel, (column, label) in zip(panels, labels.items(), strict=True):
        look: dict[str, Any] = {**style.COMPUTED, "color": COLOURS["dram"], "label": "all in DRAM"}
        panel.plot(dram["millions"], dram[column], **look)
        look |= {"color": COLOURS["ssd"], "label": below}
        panel.plot(line["millions"], line[column], "--", **look)
        panel.set(xscale="log", xlabel="KVCache of a prefill node (million tokens)")
        panel.set(ylabel=label, ylim=(0, 1.15 * held[column].max()))
        style.log_ticks(panel, sorted(set(held["millions"])))
        style.slo_line(panel, assumed_tokens / 1e6, "about 1 TB", vertical=True)
    for row, mark in zip(records(pd.DataFrame(ssd[ssd["ssd_bytes_per_s"] != usual])), "v^", strict=True):
        at = f"the same at {row['ssd_bytes_per_s'] / 1e9:g} GB/s"
        panels[0].plot(row["millions"], row["ttft_mean_s"], mark, color=COLOURS["ssd"], label=at)
    return style.finished(figure, style.simulated(style.sources(rows)), columns=2)


@style.styled
def elsewhere(rows: pd.DataFrame, base: pd.DataFrame) -> style.BookFigure:
    """The four policies on another trace and node, beside the paper's: mean and 90th percentile of TTFT, hits.

    Args:
        rows: rows of `PlacementReplay`, one a policy, of one trace and node.
        base: the same of another.
    """
    figure, (times, hits) = style.new_figure(1, 2, height=3.4)
    names = [str(policy) for policy in rows["policy"]]
    for table, size, offset in ((base, "size_1", -0.2), (rows, "size_4", 0.2)):
        found, what, colour = table.set_index("policy").loc[names], table.iloc[0], COLOURS[size]
        at = [i + offset for i in range(len(names))]
        label = f"{Path(str(what['workload'])).name} on {what['node']}"
        times.vlines(at, found["mean"], found["p90_s"], color=colour, linewidth=3)
        times.plot(at, found["mean"], linestyle="none", color=colour, label=label, **style.COMPUTED)
        times.plot(at, found["p90_s"], "_", color=colour, markersize=14, markeredgewidth=3)
        hits.bar(at, 100 * found["token_hit_rate"], width=0.38, color=colour)
    times.set_ylabel("TTFT (s), mean to 90th percentile")
    style.log_axes(times, "y")
    hits.set(ylabel="token hit rate (%)", ylim=(0, None))
    for panel in (times, hits):
        panel.set_xticks(range(len(names)), [_LOOK[name][1] for name in names])
    times.set_xlim(hits.get_xlim())
    return style.finished(figure, f"simulated; {base['source'].iloc[0]}; {rows['source'].iloc[0]}")


def _printed(paper: pd.DataFrame, series: str) -> dict[str, float]:
    """The parts of a box as read; a whisker that lies outside the page ends where the box does."""
    parts: dict[str, float] = where(paper, series=series).set_index("x")["y"].to_dict()
    return {part: parts.get(part, parts["q3"]) for part in _PARTS}


def _box(axes: Axes, at: float, parts: Mapping[Any, float], colour: str, *, filled: bool) -> None:
    stats = {called: float(parts[part]) for part, called in _PARTS.items()}
    line = {"color": COLOURS["optimum"] if filled else colour, "linewidth": 1.1}
    axes.bxp(
        [stats], positions=[at], widths=0.32, showfliers=False, showmeans=filled, patch_artist=True,
        boxprops={"facecolor": colour if filled else "none", "edgecolor": line["color"], "linewidth": 1.1},
        medianprops=line, whiskerprops=line, capprops=line,
        meanprops={**style.COMPUTED, "markeredgecolor": COLOURS["optimum"]}, manage_ticks=False,
    )  # fmt: skip
