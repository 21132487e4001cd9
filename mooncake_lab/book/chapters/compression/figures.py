"""Figures of compression: accuracy against bytes, where methods break, layers alike, steps, the store."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS

_LOOK: Final = {
    "full": ("optimum", "o", "full cache"),
    "oracle": ("optimum", "*", "oracle"),
    "snapkv": ("snapkv", "o", "SnapKV"),
    "snapkv_wide": ("snapkv", "^", "SnapKV, pooling over 7"),
    "snapkv_unpooled": ("snapkv", "v", "SnapKV, no pooling"),
    "pyramidinfer": ("pyramidinfer", "s", "PyramidInfer"),
    "minicache": ("minicache", "^", "MiniCache, 32 to 2 bits"),
    "rounding": ("rounding", "v", "rounding alone, 8 to 2 bits"),
    "kcache": ("kcache", "P", "KCache, 128 to 2 values"),
    "snapkv_kcache": ("snapkv", "X", "SnapKV, then KCache"),
    "sinks_recent": ("straw_man", "s", "sinks and recent"),
    "recent": ("straw_man", "o", "recent"),
    "random": ("straw_man_light", "^", "random"),
}
"""Colour, marker and label of a method; everything here is measured, so everything has a marker."""
_TASKS: Final = {"recall": "key-value recall, 16 pairs", "needle": "needle of four tokens"}
_FAMILIES: Final = {
    "tokens chosen\nby attention": ("snapkv", "snapkv_wide", "snapkv_unpooled", "pyramidinfer"),
    "tokens chosen\nwithout it": ("oracle", "sinks_recent", "recent", "random"),
    "fewer bits": ("minicache", "rounding"),
    "values left\nin the host": ("kcache", "snapkv_kcache"),
}
"""Rows of the figure of accuracy; the full cache is drawn in each."""


@style.styled
def accuracy(table: pd.DataFrame, source: str) -> style.BookFigure:
    """Right answers over the bytes left on the device, with 95 % intervals: a column a task, a row a family.

    Args:
        table: what `chapters.compression.experiment.accuracy` made, of exams after the question.
        source: said under the figure.
    """
    tasks = [task for task in _TASKS if task in set(table["task"])]
    families = {name: some for name, some in _FAMILIES.items() if set(some) & set(table["method"])}
    size: dict[str, Any] = {"height": 1.45 * len(families) + 1.0, "sharex": True, "sharey": True}
    figure, axes = style.new_figure(len(families), len(tasks), **size)
    for panel, (family, task) in zip(axes, [(f, t) for f in families for t in tasks], strict=True):
        rows = where(table, task=task, when="asked").sort_values("device_share")
        full = float(where(rows, method="full")["accuracy"].iloc[0])
        panel.axhline(full, color=COLOURS["optimum"], linestyle=(0, (4, 3)), linewidth=1.0)
        for method in families[family]:
            mine, (colour, marker, label) = where(rows, method=method), _LOOK[method]
            if len(mine):
                look: dict[str, Any] = {"color": COLOURS[colour], "marker": marker, "label": label}
                bars: dict[str, Any] = {"yerr": _spread(mine), "elinewidth": 0.8, "capsize": 2}
                panel.errorbar(mine["device_share"], mine["accuracy"], linewidth=1.2, **bars, **look)
        panel.set_xscale("log", base=2)
        panel.set_xticks([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], ["1/32", "1/16", "1/8", "1/4", "1/2", "1"])
        panel.set_ylim(-0.03, 1.08)
        if family == next(iter(families)):
            style.panel_title(panel, _TASKS[task])
        if task == tasks[0]:
            panel.set_ylabel(f"{family}\nright (share)")
        if task == tasks[-1]:
            panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    for panel in axes[-len(tasks) :]:
        panel.set_xlabel("KVCache (share of full)")
    return style.finished(figure, f"dashed: the full cache; {source}", legend=False)


def _spread(rows: pd.DataFrame) -> Any:
    """The interval around each accuracy, as matplotlib wants it: shape (2, rows)."""
    middle = rows["accuracy"]
    return np.clip(np.stack([middle - rows["low"], rows["high"] - middle]), 0, None)


@style.styled
def breaking(
    table: pd.DataFrame, names: Mapping[str, tuple[str, str]], share: float, source: str
) -> style.BookFigure:
    """Bars of right answers, a panel a situation, each method at about the same bytes.

    Args:
        table: what `accuracy` made.
        names: situations by name: task, and when the cache is made smaller.
        share: of the full cache that methods may keep.
        source: said under the figure.
    """
    asked = {name: where(table, task=task, when=when) for name, (task, when) in names.items()}
    examined = {method for rows in asked.values() for method in rows["method"]}
    methods = [method for method in _LOOK if method in examined]
    size: dict[str, Any] = {"height": 0.28 * len(methods) + 1.2, "sharex": True, "sharey": True}
    figure, axes = style.new_figure(1, len(names), **size)
    for panel, (name, rows) in zip(axes, asked.items(), strict=True):
        for at, method in enumerate(methods):
            own = where(rows, method=method)  # the nearest to the share; the full cache and KCache as they are
            own = own.iloc[np.abs(own["device_share"].to_numpy() - share).argsort()[:1]]
            look: dict[str, Any] = {"color": COLOURS[_LOOK[method][0]], "ecolor": COLOURS["optimum"]}
            panel.barh([at] * len(own), own["accuracy"], height=0.7, xerr=_spread(own), capsize=2, **look)
        panel.grid(visible=False, axis="y")
        style.panel_title(panel, fill(name, 18))
        panel.set(xlabel="right (share)", xlim=(0, 1.05))
    axes[0].set_yticks(range(len(methods)), [_short(method) for method in methods])
    axes[0].set_ylim(len(methods) - 0.4, -0.6)
    return style.finished(figure, source, legend=False)


@style.styled
def similarity(table: pd.DataFrame, names: Mapping[str, str], source: str) -> style.BookFigure:
    """Cosine of neighbouring layers' keys and values over depth, for several models: rows of `LayerSimilarity`."""
    figure, axes = style.new_figure(1, 2, height=3.2, sharey=True)
    for panel, side in zip(axes, ("keys", "values"), strict=True):
        for colour, (model, label) in zip(("here", "straw_man_light"), names.items(), strict=False):
            rows = where(table, model=model, side=side)
            panel.plot(rows["shallow"] + 1, rows["cosine"], marker="o", color=COLOURS[colour], label=label)
        style.panel_title(panel, side)
        panel.set(xlabel="shallower layer of the pair (number)", ylim=(-0.25, 1.0))
        panel.set_xticks(sorted({int(each) + 1 for each in table["shallow"]}))
    axes[0].set_ylabel("mean cosine, token by token (1)")
    return style.finished(figure, source)


@style.styled
def decode(table: pd.DataFrame, source: str) -> style.BookFigure:
    """A decode step's processor time and the bytes behind it, by method: rows of `DecodeSteps`."""
    figure, (times, sizes) = style.new_figure(1, 2, height=0.36 * len(table) + 1.2, sharey=True)
    methods = table["method"].astype(str)
    colours = [COLOURS[_LOOK[method.removesuffix("_4bit")][0]] for method in methods]
    labels = ["MiniCache, 4 bits" if method == "minicache_4bit" else _short(method) for method in methods]
    times.barh(labels, 1e3 * table["step_s"], color=colours)
    times.set(xlabel="processor time of a decode step (ms)")
    device, host = table["device_bytes"] / 1e6, table["host_bytes"] / 1e6
    sizes.barh(labels, device, color=colours)
    sizes.barh(labels, host, left=device, color=colours, alpha=0.35, hatch="//")
    sizes.set(xlabel="KVCache (MB; hatched: host memory)")
    times.invert_yaxis()
    for panel in (times, sizes):
        panel.grid(visible=False, axis="y")
    return style.finished(figure, source, legend=False)


def _short(method: str) -> str:
    return _LOOK[method][2].split(",")[0]


@style.styled
def value_reads(table: pd.DataFrame, source: str) -> style.BookFigure:
    """Processor time of mixing all values, and of choosing and mixing a few, over the context: `ValueReads`."""
    figure, (axes,) = style.new_figure(height=3.4)
    micro = table.assign(all=1e6 * table["all_values_s"], few=1e6 * table["few_values_s"])
    every = where(micro, top=table["top"].iloc[0])
    axes.plot(every["context_tokens"], every["all"], "o-", color=COLOURS["kcache"], label="all values")
    for (top, rows), size in zip(micro.groupby("top"), ("size_1", "size_2", "size_4"), strict=False):
        axes.plot(rows["context_tokens"], rows["few"], "P-", color=COLOURS[size], label=f"the {top} largest")
    style.log_axes(axes, "x", base=2)
    style.log_axes(axes, "y")
    axes.set(xlabel="context (tokens)", ylabel="processor time, one layer (µs)")
    style.label_lines(axes)
    return style.finished(figure, source, legend=False)


@style.styled
def store(table: pd.DataFrame, names: Mapping[float, str], source: str) -> style.BookFigure:
    """What a share of the bytes buys in the store: hit rate at fixed room, load time, and the bandwidth that pays.

    Args:
        table: rows of `StoredPrefixes` on one node.
        names: stored shares to mark, and which method they stand for.
        source: said under the figure.
    """
    figure, (left, *others) = style.new_figure(1, 3, height=3.6)
    ordered = table.sort_values(by="stored_share")
    sizes = ("size_1", "size_2", "size_4")
    for (capacity, rows), size in zip(ordered.groupby("capacity_bytes"), sizes, strict=False):
        look: dict[str, Any] = {"color": COLOURS[size], "label": f"{float(str(capacity)) / 1e12:g} TB of store"}
        left.plot(rows["stored_share"], 100 * rows["hit_rate"], **look)
    one = ordered.drop_duplicates("stored_share")
    for panel, column, unit in zip(others, ("load_s", "least_bytes_per_s"), (1e3, 1e-9), strict=True):
        panel.plot(one["stored_share"], unit * one[column], color=COLOURS["dram"])
    labels = ("token hit rate (%)", "time to load a prefix (ms)", "least bandwidth by Eq. 2 (GB/s)")
    for panel, label in zip((left, *others), labels, strict=True):
        style.log_axes(panel, "x", base=2)
        panel.set(xlabel="stored bytes (share of full)", ylabel=label, ylim=(0, None))
        for share in names:
            panel.axvline(share, color=COLOURS["slo"], linewidth=0.8, linestyle=":")
    for share, name in names.items():
        left.annotate(name, (share, 1.01), xycoords=("data", "axes fraction"), rotation=40)
    return style.finished(figure, source)
