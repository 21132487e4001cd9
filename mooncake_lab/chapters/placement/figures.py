"""Figures of placement: TTFT boxes, local against global cache, replicas, sensitivity."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes

from mooncake_lab.figures.style import (
    COLOURS,
    COMPUTED,
    BookFigure,
    bar_places,
    footer,
    label_lines,
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
        "kvcache_centric": "mooncake",
        "cache_aware": "mooncake_variant",
        "load_balance": "straw_man",
        "random": "straw_man_light",
        "global": "mooncake",
        "local, cache_aware": "mooncake_variant",
        "local, load_balance": "straw_man",
        "local, longest_prefix": "straw_man_light",
    }
)
_LABEL: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kvcache_centric": "KVCache-centric",
        "cache_aware": "local\ncache-aware",
        "load_balance": "load\nbalancing",
        "random": "random",
        "global": "global cache",
        "local, cache_aware": "local, shortest expected TTFT",
        "local, load_balance": "local, least backlog",
        "local, longest_prefix": "local, longest prefix",
    }
)
_PARTS: Final = ("q1", "median", "q3", "whisker_low", "whisker_high", "mean")


@styled
def boxes(
    panels: Mapping[str, pd.DataFrame], paper: Mapping[str, pd.DataFrame], names: Mapping[str, Mapping[str, str]]
) -> BookFigure:
    """TTFT by policy as box plots, ours in colour, the paper's beside it in black with a diamond at its mean.

    Args:
        panels: rows of `PlacementReplay`, one a policy, by the name of the panel.
        paper: the curve of the paper's box plot, by the same names.
        names: by the same names, what the paper calls each policy.
    """
    figure, axes = new_figure(1, len(panels), height=4.0)
    for panel, (title, rows) in zip(axes, panels.items(), strict=True):
        table = {str(row["policy"]): row for row in rows.to_dict(orient="records")}
        policies = [policy for policy in names[title] if policy in table]
        for at, policy in enumerate(policies):
            ours = {part: float(table[policy][part]) for part in _PARTS}
            _box(panel, at - 0.19, ours, COLOURS[_COLOUR[policy]], filled=True)
            theirs = _printed(paper[title], names[title][policy])
            _box(panel, at + 0.19, theirs, COLOURS["paper"], filled=False)
            paper_points(panel, [at + 0.19], [theirs["mean"]], "mean in the paper" if at == 0 else "_")
        panel.set_yscale("log")
        panel_title(panel, title)
        panel.set_ylabel("TTFT (s)")
        panel.set_xticks(range(len(policies)), [_LABEL[policy] for policy in policies])
        panel.yaxis.set_major_formatter("{x:g}")
        slo_line(panel, 30.0, "limit 30 s", left=True)
    legend_above(figure)
    simulated_footer(figure, sources(*panels.values()))
    return figure


@styled
def caches(rows: pd.DataFrame, paper: Mapping[str, pd.DataFrame], names: Mapping[str, str]) -> BookFigure:
    """Hit rate and prefill GPU time of ten nodes, with local caches under three policies and with a global one.

    Args:
        rows: what `local_and_global` made.
        paper: the curves of FAST'25 Fig. 10 by `token_hit_rate` and `prefill_gpu_s`.
        names: what the paper calls our workloads.
    """
    figure, axes = new_figure(1, 2, height=3.6)
    records = rows.to_dict(orient="records")
    kinds = ("local, longest_prefix", "local, load_balance", "local, cache_aware", "global")
    panels = (
        ("token_hit_rate", "token hit rate (%)", 100.0),
        ("prefill_gpu_s", "prefill GPU time (s/request)", 1.0),
    )
    for panel, (quantity, label, unit) in zip(axes, panels, strict=True):
        for i, kind in enumerate(kinds):
            heights = {str(r["workload"]): float(r[quantity]) for r in records if r["cache"] == kind}
            at = bar_places(len(names), len(kinds), i, 0.2)
            panel.bar(
                at,
                [unit * heights[workload] for workload in names],
                width=0.19,
                color=COLOURS[_COLOUR[kind]],
                label=_LABEL[kind],
            )
        for series, offset in (("Local cache", -0.2), ("Global cache", 0.3)):
            printed = paper[quantity][paper[quantity]["series"] == series].set_index("x")["y"]
            at = [k + offset for k in range(len(names))]
            paper_points(panel, at, [printed[name] for name in names.values()], "paper" if offset < 0 else "_")
        panel.set_xticks(range(len(names)), list(names.values()))
        panel.set(ylabel=label, ylim=(0, None))
    legend_above(figure, columns=3)
    simulated_footer(figure, sources(rows))
    return figure


@styled
def replicas(rows: pd.DataFrame, paper: pd.DataFrame, names: Mapping[str, str]) -> BookFigure:
    """Replicas of popular blocks over time, one panel a rank and workload.

    Args:
        rows: rows of `Replicas` with eviction `lru`, and `lfu` where that is of interest.
        paper: the curve of FAST'25 Fig. 11.
        names: what the paper calls our workloads.
    """
    ranks = sorted(set(rows["rank"]))
    size: dict[str, Any] = {"height": 1.6 * len(names) + 1.1, "sharey": True}
    figure, axes = new_figure(len(names), len(ranks), **size)
    for panel, (workload, rank) in zip(axes, [(w, r) for w in names for r in ranks], strict=True):
        table = rows[(rows["workload"] == workload) & (rows["rank"] == rank)]
        for eviction, colour in (("lru", "lru"), ("lfu", "lfu")):
            line = table[table["eviction"] == eviction]
            panel.step(line["at_s"], line["replicas"], where="post", color=COLOURS[colour], label=eviction.upper())
        theirs = paper[paper["series"] == f"{names[workload]}/{rank}th"].iloc[::6]
        paper_points(panel, theirs["x"], theirs["y"], "FAST'25 Fig. 11")
        if workload == next(iter(names)):
            panel_title(panel, f"block of rank {rank:,}")
        panel.set(ylim=(-0.3, 8.6))
    for panel, name in zip(axes[:: len(ranks)], names.values(), strict=True):
        panel.set_ylabel(f"{name}\nreplicas (count)")
    for panel in axes[-len(ranks) :]:
        panel.set_xlabel("time (s)")
    legend_above(figure)
    simulated_footer(figure, origins(rows))
    return figure


@styled
def thresholds(rows: pd.DataFrame) -> BookFigure:
    """Mean TTFT, and how often a prefix is fetched, by the balancing threshold: rows of `PlacementReplay`."""
    figure, (left, right) = new_figure(1, 2, height=3.0)
    colour = COLOURS["mooncake"]
    left.plot(rows["threshold"], rows["mean"], **COMPUTED, color=colour)
    left.set(ylabel="mean TTFT (s)", ylim=(0, 1.15 * max(rows["mean"])))
    right.plot(rows["threshold"], 100 * rows["fetching"], **COMPUTED, color=colour)
    right.set(ylabel="requests that fetch a prefix (%)", ylim=(0, None))
    for panel in (left, right):
        panel.set(xscale="log", xlabel="balancing threshold (ratio of matches)")
        log_ticks(panel, sorted(set(rows["threshold"])))
    simulated_footer(figure, sources(rows))
    return figure


@styled
def load(rows: pd.DataFrame, paper: pd.DataFrame, names: Mapping[str, str]) -> BookFigure:
    """Mean TTFT by policy over the number of prefill nodes; the paper's means at the eight we assume.

    Args:
        rows: rows of `PlacementReplay` by policy and prefill nodes.
        paper: the curve of FAST'25 Fig. 5.
        names: what the paper calls each policy.
    """
    figure, (axes,) = new_figure(height=3.6)
    for policy in names:
        line = rows[rows["policy"] == policy]
        label = _LABEL[policy].replace("\n", " ")
        axes.plot(line["prefill_nodes"], line["mean"], **COMPUTED, color=COLOURS[_COLOUR[policy]], label=label)
    means = paper[paper["x"] == "mean"].set_index("series")["y"]
    paper_points(axes, [8] * len(names), [means[name] for name in names.values()], "FAST'25 Fig. 5, split assumed")
    axes.set(xlabel="prefill nodes of 16 (nodes)", ylabel="mean TTFT (s)", yscale="log")
    axes.set_xticks(sorted(set(rows["prefill_nodes"])))
    axes.yaxis.set_major_formatter("{x:g}")
    label_lines(axes, [line for line in axes.get_lines() if line.get_marker() == "o"])
    legend_above(figure, [line for line in axes.get_lines() if line.get_marker() == "D"])
    simulated_footer(figure, sources(rows))
    return figure


@styled
def capacity(rows: pd.DataFrame, assumed_tokens: float) -> BookFigure:
    """TTFT and hit rate by what a prefill node holds, in DRAM or in little DRAM and on SSD.

    Args:
        rows: rows of `Capacity`; the first SSD's speed is drawn as a line, others as points beside it.
        assumed_tokens: the DRAM that this book assumes elsewhere.
    """
    figure, panels = new_figure(1, 2, height=3.4)
    held = rows.assign(millions=(rows["dram_tokens"] + rows["ssd_tokens"]) / 1e6)
    dram, ssd = held.query("ssd_tokens == 0"), held.query("ssd_tokens > 0")
    usual = float(ssd["ssd_bytes_per_s"].iloc[0])
    line = pd.concat([dram.head(1), ssd.query(f"ssd_bytes_per_s == {usual!r}")])
    others = ssd.query(f"ssd_bytes_per_s != {usual!r}")
    below = f"{dram['dram_tokens'].iloc[0] / 1e6:g}M in DRAM, rest on SSD"
    for panel, column, factor in zip(panels, ("ttft_mean_s", "token_hit_rate"), (1, 100), strict=True):
        panel.plot(dram["millions"], factor * dram[column], **COMPUTED, color=COLOURS["dram"], label="all in DRAM")
        label = f"{below}, {usual / 1e9:g} GB/s"
        panel.plot(line["millions"], factor * line[column], "--", color=COLOURS["ssd"], label=label, **COMPUTED)
        room = (0, 1.15 * factor * held[column].max())
        panel.set(xscale="log", xlabel="KVCache of a prefill node (million tokens)", ylim=room)
        log_ticks(panel, sorted(set(held["millions"])))
        slo_line(panel, assumed_tokens / 1e6, "about 1 TB", vertical=True)
    for row, mark in zip(others.to_dict(orient="records"), "v^", strict=True):
        at = f"the same at {row['ssd_bytes_per_s'] / 1e9:g} GB/s"
        panels[0].plot(row["millions"], row["ttft_mean_s"], mark, color=COLOURS["ssd"], label=at)
    panels[0].set(ylabel="mean TTFT (s)")
    panels[1].set(ylabel="token hit rate (%)")
    legend_above(figure, columns=2)
    simulated_footer(figure, sources(rows))
    return figure


@styled
def elsewhere(rows: pd.DataFrame, base: pd.DataFrame) -> BookFigure:
    """The four policies on another trace and node, beside the paper's: mean and 90th percentile of TTFT, hits.

    Args:
        rows: rows of `PlacementReplay`, one a policy, of one trace and node.
        base: the same of another.
    """
    figure, (times, hits) = new_figure(1, 2, height=3.4)
    pairs = ((base, "size_1", -0.2), (rows, "size_4", 0.2))
    names = [str(policy) for policy in rows["policy"]]
    for table, colour, offset in pairs:
        found = table.set_index("policy").loc[names]
        at = [i + offset for i in range(len(names))]
        what = table.iloc[0]
        label = f"{Path(str(what['workload'])).name} on {what['node']}"
        times.vlines(at, found["mean"], found["p90_s"], color=COLOURS[colour], linewidth=3)
        times.plot(at, found["mean"], linestyle="none", color=COLOURS[colour], label=label, **COMPUTED)
        times.plot(at, found["p90_s"], "_", color=COLOURS[colour], markersize=14, markeredgewidth=3)
        hits.bar(at, 100 * found["token_hit_rate"], width=0.38, color=COLOURS[colour])
    times.set(ylabel="TTFT (s), mean to 90th percentile", yscale="log")
    times.yaxis.set_major_formatter("{x:g}")
    hits.set(ylabel="token hit rate (%)", ylim=(0, None))
    for panel in (times, hits):
        panel.set_xticks(range(len(names)), [_LABEL[name] for name in names])
    legend_above(figure)
    times.set_xlim(hits.get_xlim())
    footer(figure, "simulated; " + "; ".join(str(table.iloc[0]["source"]) for table, *_ in pairs))
    return figure


def _printed(paper: pd.DataFrame, series: str) -> dict[str, float]:
    """The parts of a box as read; a whisker that lies outside the page ends where the box does."""
    parts = {str(row["x"]): float(row["y"]) for row in paper.to_dict(orient="records") if row["series"] == series}
    return {part: parts.get(part, parts["q3"]) for part in _PARTS}


def _box(axes: Axes, at: float, parts: Mapping[str, float], colour: str, *, filled: bool) -> None:
    stats = {
        "med": parts["median"],
        "q1": parts["q1"],
        "q3": parts["q3"],
        "whislo": parts["whisker_low"],
        "whishi": parts["whisker_high"],
        "mean": parts["mean"],
    }
    line = {"color": COLOURS["optimum"] if filled else colour, "linewidth": 1.1}
    axes.bxp(
        [stats],
        positions=[at],
        widths=0.32,
        showfliers=False,
        showmeans=filled,
        patch_artist=True,
        boxprops={"facecolor": colour if filled else "none", "edgecolor": line["color"], "linewidth": 1.1},
        medianprops=line,
        whiskerprops=line,
        capprops=line,
        meanprops={**COMPUTED, "markeredgecolor": COLOURS["optimum"]},
        manage_ticks=False,
    )
