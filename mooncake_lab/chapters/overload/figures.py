"""Figures of overload: which requests were rejected and when, how load swings, and what makes it swing more."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from mooncake_lab.experiments import records
from mooncake_lab.figures.style import (
    COLOURS,
    COMPUTED,
    HATCHES,
    BookFigure,
    footer,
    legend_above,
    new_figure,
    panel_title,
    paper_points,
    plain_number,
    simulated_footer,
    slo_line,
    sources,
    styled,
)

LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "none": "no rejection",
        "after_prefill": "baseline",
        "early": "early\nrejection",
        "predictive": "prediction",
        "committed": "counting\nprefills",
        "reserving": "predicted,\nreserving",
        "length_predicting": "learned\nlengths",
        "length_reserving": "learned,\nreserving",
        "adaptive": "adaptive\nthreshold",
        "priority": "priority\nclasses",
        "oracle": "oracle",
    }
)
"""Policies as the figures call them."""
_COLOUR: Final[Mapping[str, str]] = MappingProxyType(
    {
        "after_prefill": COLOURS["straw_man"],
        "early": COLOURS["mooncake_variant"],
        "predictive": COLOURS["mooncake"],
        "committed": COLOURS["vllm_prefix"],
        "length_predicting": COLOURS["vllm_chunked"],
        "oracle": COLOURS["optimum"],
    }
)
PRODUCTION: Final = "arXiv Fig. 9: production, 20 machines, early rejection"


@styled
def rejections(panels: Mapping[str, pd.DataFrame], paper_percent: Mapping[str, float]) -> BookFigure:
    """Rejected requests by policy, those rejected after prefill cross-hatched; the paper's Table 3 as diamonds.

    Args:
        panels: rows of `Overload`, one a policy, by the name of the panel.
        paper_percent: what Table 3 prints by policy (%).
    """
    policies = list(dict.fromkeys(str(policy) for rows in panels.values() for policy in rows["policy"]))
    figure, axes = new_figure(1, len(panels), height=0.42 * len(policies) + 1.5, sharex=True, sharey=True)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        at = [policies.index(policy) for policy in rows["policy"]]
        late = (100 * rows["rejected_late"] / rows["requests"]).to_numpy(dtype=float)
        early = 100 * rows["rejected_share"].to_numpy(dtype=float) - late
        axis.barh(at, early, color=COLOURS["refused_early"], label="rejected on arrival", height=0.7)
        axis.barh(
            at, late, left=early, color=COLOURS["refused_late"], hatch="xx", edgecolor="white",
            label="rejected after prefill", height=0.7,
        )  # fmt: skip
        known = [policy for policy in rows["policy"] if policy in paper_percent]
        paper_points(
            axis,
            [paper_percent[each] for each in known],
            [policies.index(each) for each in known],
            "arXiv Table 3",
        )
        panel_title(axis, title.replace(", ", ",\n"))
        axis.set_xlabel("rejected requests (%)")
    _rows_of_policies(axes, policies)
    legend_above(figure)
    simulated_footer(figure, sources(*panels.values()))
    return figure


@styled
def with_intervals(rows: pd.DataFrame, quantities: Mapping[str, str], policies: Sequence[str]) -> BookFigure:
    """Several quantities by policy: a dot for each seed, a bar at the mean with its 95 % interval.

    Args:
        rows: rows of `Overload`, a policy and seed each.
        quantities: column by its label with unit.
        policies: in the order to draw.
    """
    figure, axes = new_figure(1, len(quantities), height=0.55 * len(policies) + 0.9, sharey=True)
    for axis, (label, column) in zip(axes, quantities.items(), strict=True):
        for at, policy in enumerate(policies):
            values = np.asarray(rows.loc[rows["policy"] == policy, column], dtype=float)
            half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5
            axis.barh(at, values.mean(), color=_colour(policy), height=0.5, alpha=0.75)
            axis.errorbar(values.mean(), at, xerr=half, color=COLOURS["optimum"], capsize=4)
            spread = [at - 0.25 + 0.5 * i / max(1, len(values) - 1) for i in range(len(values))]
            (dots,) = axis.plot(values, spread, linestyle="none", color=COLOURS["optimum"], **COMPUTED)
            dots.set_markersize(3)
        axis.set(xlabel=label, xlim=(0, None))
    _rows_of_policies(axes, policies)
    simulated_footer(figure, sources(rows))
    return figure


def _rows_of_policies(axes: Sequence[Axes], policies: Sequence[str]) -> None:
    """Policies down the side of the first panel, the first on top."""
    axes[0].set_yticks(range(len(policies)), [LABELS[policy].replace("\n", " ") for policy in policies])
    axes[0].set_ylim(len(policies) - 0.45, -0.55)
    for axis in axes:
        axis.grid(visible=False, axis="y")


@styled
def series(panels: Mapping[str, pd.DataFrame], paper: pd.DataFrame) -> BookFigure:
    """Load of both pools over time, one panel a policy; the paper's samples in a panel of their own.

    Args:
        panels: rows of `LoadSeries` by the name of the panel.
        paper: the loads of arXiv Fig. 9, columns at_s, prefill, decode.
    """
    figure, axes = new_figure(len(panels) + 1, 1, height=1.5 * (len(panels) + 1) + 0.9, sharex=True)
    for axis, (title, rows) in zip(axes, {PRODUCTION: paper, **panels}.items(), strict=True):
        for stage, style in (("prefill", "-"), ("decode", "--")):
            axis.plot(
                rows["at_s"] / 60, rows[stage], style, color=COLOURS[stage], linewidth=1.2, label=f"{stage} pool"
            )
            if title == PRODUCTION:
                paper_points(axis, rows["at_s"] / 60, rows[stage], "arXiv Fig. 9").set_markersize(3)
        panel_title(axis, title)
        axis.set(ylabel="load (share)", ylim=(0, 1.15), xlim=(0, None))
        slo_line(axis, 1.0, "full")
    axes[-1].set_xlabel("time (min)")
    legend_above(figure)
    simulated_footer(figure, sources(*panels.values()))
    return figure


@styled
def four_stages(ours: Mapping[str, pd.DataFrame], paper: Mapping[str, pd.DataFrame]) -> BookFigure:
    """The sketch of arXiv Fig. 10: load of both pools stage by stage, ours as bars, the paper's as diamonds.

    Args:
        ours: columns number, decode, prefill, by the name of the panel.
        paper: columns stage, decode, prefill, by the same names.
    """
    figure, axes = new_figure(2, len(ours), height=3.6, sharex=True, sharey=True)
    pools = ("prefill", "decode")
    for axis, (pool, title) in zip(axes, [(pool, title) for pool in pools for title in ours], strict=True):
        axis.bar(
            ours[title]["number"], ours[title][pool], 0.6, color=COLOURS[pool], hatch=HATCHES[pool],
            edgecolor="white", label=f"{pool} pool, by hand",
        )  # fmt: skip
        paper_points(axis, paper[title]["stage"], paper[title][pool], "arXiv Fig. 10")
        axis.set(ylim=(0, 1.1))
        axis.set_xticks(list(ours[title]["number"]))
        axis.grid(visible=False, axis="x")
        if pool == pools[0]:
            panel_title(axis, title)
        else:
            axis.set_xlabel("stage (number)")
    for axis, pool in zip(axes[:: len(ours)], pools, strict=True):
        axis.set_ylabel(f"{pool} load\n(share of full)")
    legend_above(figure)
    footer(figure, "by hand, no simulation")
    return figure


@styled
def sweep(rows: pd.DataFrame, knob: str, label: str, quantities: Mapping[str, str]) -> BookFigure:
    """Quantities over one knob, a line a policy.

    Args:
        rows: rows of `Overload`, a policy and value of the knob each.
        knob: its column.
        label: of the horizontal axis, with its unit.
        quantities: column by its label with unit.
    """
    figure, axes = new_figure(1, len(quantities), height=2.9)
    for axis, (title, column) in zip(axes, quantities.items(), strict=True):
        _lines(axis, rows, knob, column)
        axis.set(xlabel=label, ylabel=fill(title, 26), ylim=(0, None))
        axis.xaxis.set_major_formatter(plain_number)
    legend_above(figure)
    simulated_footer(figure, sources(rows))
    return figure


@styled
def crowd(rows: pd.DataFrame) -> BookFigure:
    """A crowd on the live cluster beside its simulation: what became of the requests, and prefill in vain.

    Args:
        rows: rows of `LiveCrowd`, two a policy.
    """
    figure, (left, right) = new_figure(1, 2, height=3.4)
    policies = list(dict.fromkeys(map(str, rows["policy"])))
    at = np.arange(len(policies))
    for world, shift, alpha in (("live", -0.21, 1.0), ("simulated", 0.21, 0.5)):
        table = rows[rows["world"] == world].set_index("policy").loc[policies].reset_index()
        _fates(left, at + shift, table, width=0.38, alpha=alpha, label=world == "live")
        wasted = table["wasted_prefill_s"].to_numpy(dtype=float)
        right.bar(at + shift, wasted, width=0.38, alpha=alpha, color=COLOURS["refused_late"])
    left.set_ylabel("requests (count)")
    right.set(ylabel="prefill of requests rejected later (s)", ylim=(0, None))
    for axis in (left, right):
        axis.set_xticks(at, [LABELS[policy] for policy in policies])
        axis.grid(visible=False, axis="x")
    legend_above(figure)
    measured = f"left bar of a pair measured once, no interval: {rows['machine'].iloc[0]}"
    footer(figure, f"{measured}; right and fainter bar simulated at the same pace")
    return figure


def _colour(policy: str) -> str:
    """That of a policy, also of one that has none of its own."""
    return _COLOUR.get(policy, COLOURS["straw_man_light"])


def _fates(axis: Axes, at: npt.ArrayLike, rows: pd.DataFrame, *, label: bool = True, **look: Any) -> None:
    """What became of the requests of each policy, stacked."""
    bottom = np.zeros(len(rows))
    for column, name, colour in (
        ("finished", "finished", "finished"),
        ("refused_after_prefill", "rejected after prefill", "refused_late"),
        ("refused_on_arrival", "rejected on arrival", "refused_early"),
    ):
        heights = rows[column].to_numpy(dtype=float)
        axis.bar(at, heights, bottom=bottom, color=COLOURS[colour], label=name if label else "_", **look)
        bottom += heights


def _lines(axis: Axes, rows: pd.DataFrame, knob: str, column: str) -> None:
    for policy in dict.fromkeys(map(str, rows["policy"])):
        found: dict[float, list[float]] = {}
        for row in records(rows, policy=policy):
            found.setdefault(float(row[knob]), []).append(float(row[column]))
        at = sorted(found)
        means = [sum(found[value]) / len(found[value]) for value in at]
        colour = _colour(policy)
        axis.plot(at, means, color=colour, label=LABELS[policy].replace("\n", " "), **COMPUTED)
