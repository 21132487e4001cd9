"""Figures of compression: accuracy against bytes, where methods break, layers alike, steps, the store."""

from collections.abc import Mapping
from textwrap import fill
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from mooncake_lab.experiments import where
from mooncake_lab.figures.style import (
    COLOURS,
    BookFigure,
    footer,
    label_lines,
    legend_above,
    new_figure,
    panel_title,
    plain_number,
    styled,
)

_LOOK: Final[Mapping[str, tuple[str, str, str]]] = MappingProxyType(
    {
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
)
"""Colour, marker and label of a method; everything here is measured, so everything has a marker."""
_TASKS: Final = MappingProxyType({"recall": "key-value recall, 16 pairs", "needle": "needle of four tokens"})


_FAMILIES: Final = MappingProxyType(
    {
        "tokens chosen\nby attention": ("snapkv", "snapkv_wide", "snapkv_unpooled", "pyramidinfer"),
        "tokens chosen\nwithout it": ("oracle", "sinks_recent", "recent", "random"),
        "fewer bits": ("minicache", "rounding"),
        "values left\nin the host": ("kcache", "snapkv_kcache"),
    }
)
"""Rows of the figure of accuracy; the full cache is drawn in each."""


@styled
def accuracy(table: pd.DataFrame, source: str) -> BookFigure:
    """Right answers over the bytes left on the device, with 95 % intervals: a column a task, a row a family.

    Args:
        table: what `chapters.compression.experiment.accuracy` made, of exams after the question.
        source: said under the figure.
    """
    tasks = [task for task in _TASKS if task in set(table["task"])]
    families = {name: some for name, some in _FAMILIES.items() if set(some) & set(table["method"])}
    figure, axes = new_figure(
        len(families), len(tasks), height=1.45 * len(families) + 1.0, sharex=True, sharey=True
    )
    for panel, (family, task) in zip(axes, [(f, t) for f in families for t in tasks], strict=True):
        rows = where(table, task=task, when="asked")
        full = float(where(rows, method="full")["accuracy"].iloc[0])
        panel.axhline(full, color=COLOURS["optimum"], linestyle=(0, (4, 3)), linewidth=1.0)
        for method in families[family]:
            colour, marker, label = _LOOK[method]
            if method in set(rows["method"]):
                _points(panel, where(rows, method=method), COLOURS[colour], marker, label)
        panel.set_xscale("log", base=2)
        panel.set_xticks([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], ["1/32", "1/16", "1/8", "1/4", "1/2", "1"])
        panel.set_ylim(-0.03, 1.08)
        if family == next(iter(families)):
            panel_title(panel, _TASKS[task])
        if task == tasks[0]:
            panel.set_ylabel(f"{family}\nright (share)")
        if task == tasks[-1]:
            panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    for panel in axes[-len(tasks) :]:
        panel.set_xlabel("KVCache (share of full)")
    footer(figure, f"dashed: the full cache; {source}")
    return figure


def _points(axes: Axes, rows: pd.DataFrame, colour: str, marker: str, label: str) -> None:
    rows = rows.sort_values(by="device_share")
    x, y, low, high = (rows[name].to_numpy() for name in ("device_share", "accuracy", "low", "high"))
    errors = [np.maximum(y - low, 0), np.maximum(high - y, 0)]
    axes.errorbar(
        x, y, yerr=errors, color=colour, marker=marker, linewidth=1.2, elinewidth=0.8, capsize=2, label=label
    )


@styled
def breaking(table: pd.DataFrame, names: Mapping[str, tuple[str, str]], share: float, source: str) -> BookFigure:
    """Bars of right answers, a panel a situation, each method at about the same bytes.

    Args:
        table: what `accuracy` made.
        names: situations by name: task, and when the cache is made smaller.
        share: of the full cache that methods may keep.
        source: said under the figure.
    """
    examined = {method for task, when in names.values() for method in where(table, task=task, when=when)["method"]}
    methods = [method for method in _LOOK if method in examined]
    figure, axes = new_figure(1, len(names), height=0.28 * len(methods) + 1.2, sharex=True, sharey=True)
    for panel, (name, (task, when)) in zip(axes, names.items(), strict=True):
        rows = where(table, task=task, when=when)
        for at, method in enumerate(methods):
            row = _at(rows, method, share)
            if row is not None:
                spread = [[max(0.0, row["accuracy"] - row["low"])], [max(0.0, row["high"] - row["accuracy"])]]
                look: dict[str, Any] = {"color": COLOURS[_LOOK[method][0]], "ecolor": COLOURS["optimum"]}
                panel.barh(at, row["accuracy"], height=0.7, xerr=spread, capsize=2, **look)
        panel.grid(visible=False, axis="y")
        panel_title(panel, fill(name, 18))
        panel.set(xlabel="right (share)", xlim=(0, 1.05))
    axes[0].set_yticks(range(len(methods)), [_LOOK[method][2].split(",")[0] for method in methods])
    axes[0].set_ylim(len(methods) - 0.4, -0.6)
    footer(figure, source)
    return figure


def _at(rows: pd.DataFrame, method: str, share: float) -> dict[Any, Any] | None:
    """The row of a method whose device bytes are nearest to a share; the full cache and KCache as they are."""
    own = where(rows, method=method)
    away = np.abs(own["device_share"].to_numpy() - share)
    return own.to_dict(orient="records")[int(away.argmin())] if len(own) else None


@styled
def similarity(table: pd.DataFrame, names: Mapping[str, str], source: str) -> BookFigure:
    """Cosine of neighbouring layers' keys and values over depth, for several models.

    Args:
        table: rows of `LayerSimilarity`.
        names: models and what to call them.
        source: said under the figure.
    """
    figure, axes = new_figure(1, 2, height=3.2, sharey=True)
    colours = (COLOURS["here"], COLOURS["straw_man_light"])
    for panel, side in zip(axes, ("keys", "values"), strict=True):
        for colour, (model, label) in zip(colours, names.items(), strict=False):
            rows = table[(table["model"] == model) & (table["side"] == side)]
            panel.plot(rows["shallow"] + 1, rows["cosine"], marker="o", color=colour, label=label)
        panel_title(panel, side)
        panel.set(xlabel="shallower layer of the pair (number)", ylim=(-0.25, 1.0))
        panel.set_xticks(sorted({int(each) + 1 for each in table["shallow"]}))
    axes[0].set_ylabel("mean cosine, token by token (1)")
    legend_above(figure)
    footer(figure, source)
    return figure


@styled
def decode(table: pd.DataFrame, source: str) -> BookFigure:
    """A decode step's processor time and the bytes behind it, by method.

    Args:
        table: rows of `DecodeSteps`.
        source: said under the figure.
    """
    figure, axes = new_figure(1, 2, height=0.36 * len(table) + 1.2, sharey=True)
    rows = table.to_dict(orient="records")
    labels = [_short(str(row["method"])) for row in rows]
    colours = [COLOURS[_LOOK[str(row["method"]).removesuffix("_4bit")][0]] for row in rows]
    axes[0].barh(labels, [1e3 * float(row["step_s"]) for row in rows], color=colours)
    axes[0].set(xlabel="processor time of a decode step (ms)")
    device = [float(row["device_bytes"]) / 1e6 for row in rows]
    axes[1].barh(labels, device, color=colours)
    axes[1].barh(
        labels,
        [float(row["host_bytes"]) / 1e6 for row in rows],
        left=device,
        color=colours,
        alpha=0.35,
        hatch="//",
    )
    axes[1].set(xlabel="KVCache (MB; hatched: host memory)")
    axes[0].invert_yaxis()
    for panel in axes:
        panel.grid(visible=False, axis="y")
    footer(figure, source)
    return figure


def _short(method: str) -> str:
    return "MiniCache, 4 bits" if method == "minicache_4bit" else _LOOK[method][2].split(",")[0]


@styled
def value_reads(table: pd.DataFrame, source: str) -> BookFigure:
    """Processor time of mixing all values, and of choosing and mixing a few, over the context.

    Args:
        table: rows of `ValueReads`.
        source: said under the figure.
    """
    figure, (axes,) = new_figure(height=3.4)
    every = table[table["top"] == table["top"].iloc[0]]
    axes.plot(
        every["context_tokens"], 1e6 * every["all_values_s"], "o-", color=COLOURS["kcache"], label="all values"
    )
    for top, size in zip(sorted(table["top"].unique()), ("size_1", "size_2", "size_4"), strict=False):
        rows = table[table["top"] == top]
        axes.plot(
            rows["context_tokens"], 1e6 * rows["few_values_s"], "P-", color=COLOURS[size],
            label=f"the {top} largest",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(plain_number)
    axes.yaxis.set_major_formatter(plain_number)
    axes.set(xlabel="context (tokens)", ylabel="processor time, one layer (µs)")
    label_lines(axes)
    footer(figure, source)
    return figure


@styled
def store(table: pd.DataFrame, names: Mapping[float, str], source: str) -> BookFigure:
    """What a share of the bytes buys in the store: hit rate at fixed room, load time, and the bandwidth that pays.

    Args:
        table: rows of `StoredPrefixes` on one node.
        names: stored shares to mark, and which method they stand for.
        source: said under the figure.
    """
    figure, axes = new_figure(1, 3, height=3.6)
    capacities = sorted(table["capacity_bytes"].unique())
    for size, capacity in zip(("size_1", "size_2", "size_4"), capacities, strict=False):
        rows = where(table, capacity_bytes=capacity).sort_values(by="stored_share")
        label = f"{capacity / 1e12:g} TB of store"
        axes[0].plot(rows["stored_share"], 100 * rows["hit_rate"], color=COLOURS[size], label=label)
    one = table.drop_duplicates("stored_share").sort_values(by="stored_share")
    axes[1].plot(one["stored_share"], 1e3 * one["load_s"], color=COLOURS["dram"])
    axes[2].plot(one["stored_share"], one["least_bytes_per_s"] / 1e9, color=COLOURS["dram"])
    labels = ("token hit rate (%)", "time to load a prefix (ms)", "least bandwidth by Eq. 2 (GB/s)")
    for panel, label in zip(axes, labels, strict=True):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(plain_number)
        panel.set(xlabel="stored bytes (share of full)", ylabel=label, ylim=(0, None))
        for share, name in names.items():
            panel.axvline(share, color=COLOURS["slo"], linewidth=0.8, linestyle=":")
            if panel is axes[0]:
                panel.annotate(name, (share, 1.01), xycoords=("data", "axes fraction"), rotation=40)
    legend_above(figure)
    footer(figure, source)
    return figure
