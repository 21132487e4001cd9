"""Figures of overload: which requests were rejected and when, how load swings, and what makes it swing more."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from mooncake_lab.book.chapters.overload.recorded import EARLY, GAIN, NONE, ORDER
from mooncake_lab.book.experiments import records, where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS

LABELS: Final = {
    "after_prefill": "baseline",
    "early": "early\nrejection",
    "predictive": "prediction",
    "committed": "counting\nprefills",
    "length_predicting": "learned\nlengths",
    "adaptive": "adaptive\nthreshold",
    "oracle": "oracle",
}
"""Policies as the figures call them."""
_COLOUR: Final = {
    "after_prefill": "straw_man",
    "early": "mooncake_variant",
    "predictive": "mooncake",
    "committed": "vllm_prefix",
    "length_predicting": "vllm_chunked",
    "oracle": "optimum",
}
PRODUCTION: Final = "arXiv Fig. 9: production, 20 machines, early rejection"


@style.styled
def rejections(panels: Mapping[str, pd.DataFrame], paper_percent: Mapping[str, float]) -> style.BookFigure:
    """Rejected requests by policy, those rejected after prefill cross-hatched; the paper's Table 3 as diamonds.

    Args:
        panels: rows of `Overload`, one a policy, by the name of the panel.
        paper_percent: what Table 3 prints by policy (%).
    """
    policies = list(dict.fromkeys(str(policy) for rows in panels.values() for policy in rows["policy"]))
    figure, axes = style.new_figure(1, len(panels), height=0.42 * len(policies) + 1.5, sharex=True, sharey=True)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        at = [policies.index(policy) for policy in rows["policy"]]
        late = 100 * rows["rejected_late"] / rows["requests"]
        parts = {
            "rejected on arrival": (100 * rows["rejected_share"] - late, COLOURS["refused_early"]),
            "rejected after prefill": (late, COLOURS["refused_late"]),
        }
        style.stacked(axis, at, parts, across=True, height=0.7, hatches={"rejected after prefill": "xx"})
        known = {
            policies.index(policy): paper_percent[policy] for policy in rows["policy"] if policy in paper_percent
        }
        style.paper_points(axis, list(known.values()), list(known), "arXiv Table 3")
        style.panel_title(axis, title.replace(", ", ",\n"))
        axis.set_xlabel("rejected requests (%)")
    _rows_of_policies(axes, policies)
    return style.finished(figure, style.simulated(style.sources(*panels.values())))


@style.styled
def with_intervals(rows: pd.DataFrame, quantities: Mapping[str, str], policies: Sequence[str]) -> style.BookFigure:
    """Several quantities by policy: a dot for each seed, a bar at the mean with its 95 % interval.

    Args:
        rows: rows of `Overload`, a policy and seed each.
        quantities: column by its label with unit.
        policies: in the order to draw.
    """
    figure, axes = style.new_figure(1, len(quantities), height=0.55 * len(policies) + 0.9, sharey=True)
    for axis, (label, column) in zip(axes, quantities.items(), strict=True):
        for at, policy in enumerate(policies):
            values = where(rows, policy=policy)[column].to_numpy(dtype=float)
            half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5
            axis.barh(at, values.mean(), color=_colour(policy), height=0.5, alpha=0.75)
            axis.errorbar(values.mean(), at, xerr=half, color=COLOURS["optimum"], capsize=4)
            dots: dict[str, Any] = {
                **style.COMPUTED,
                "linestyle": "none",
                "color": COLOURS["optimum"],
                "markersize": 3,
            }
            axis.plot(values, np.linspace(at - 0.25, at + 0.25, len(values)), **dots)
        axis.set(xlabel=label, xlim=(0, None))
    _rows_of_policies(axes, policies)
    return style.finished(figure, style.simulated(style.sources(rows)), legend=False)


@style.styled
def at_points(found: pd.DataFrame, replays: pd.DataFrame, paper_counts: Mapping[str, float]) -> style.BookFigure:
    """Mean rejections over twins with 95 % intervals, a panel a point; the paper's counts as diamonds.

    Args:
        found: what `recorded.ratios` says, with the column `half`: half the interval of the mean.
        replays: the recorded replays, for the footer.
        paper_counts: what Table 3 prints, by policy.
    """
    names = list(dict.fromkeys(map(str, found["point"])))
    policies = list(dict.fromkeys(map(str, found["policy"])))
    figure, axes = style.new_figure(2, -(-len(names) // 2), height=4.4, sharex=True, sharey=True)
    for axis, name in zip(axes, names, strict=False):
        for row in records(found, point=name):
            at = policies.index(row["policy"])
            axis.barh(at, row["rejected"], color=_colour(row["policy"]), height=0.55, alpha=0.75)
            axis.errorbar(row["rejected"], at, xerr=row["half"], color=COLOURS["optimum"], capsize=4)
        at = {policies.index(policy): count for policy, count in paper_counts.items() if policy in policies}
        style.paper_points(axis, list(at.values()), list(at), "arXiv Table 3")
        style.panel_title(axis, name)
        axis.set_xlim(0, None)
    for axis in axes[-2:]:
        axis.set_xlabel("rejected of 23,000 (requests)")
    _rows_of_policies(axes, policies)
    return style.finished(figure, f"simulated: arXiv testbed; {style.sources(replays)}")


CELL_COLOURS: Final = {
    ORDER: "mooncake",
    GAIN: "mooncake_variant",
    EARLY: "straw_man_light",
    NONE: "refused_late",
}
"""What a cell of the map shows, by the meaning of its colour."""


@style.styled
def overload_map(
    cells: pd.DataFrame, dots: Mapping[str, tuple[float, float, float]], region: Sequence[tuple[float, float]]
) -> style.BookFigure:
    """The map, a panel a TTFT limit: a square a cell, coloured by the order of the policies, with both ratios.

    Args:
        cells: what `recorded.cells` says.
        dots: TTFT limit (s), decode factor and prefill factor of points, by name.
        region: decode and prefill factors of the region of the fit.
    """
    limits = sorted(set(cells["ttft_limit_s"]))
    figure, axes = style.new_figure(1, len(limits), height=4.6, sharex=True, sharey=True)
    for axis, limit_s in zip(axes, limits, strict=True):
        for kind, colour in CELL_COLOURS.items():
            own = where(cells, ttft_limit_s=limit_s, kind=kind)
            face = to_rgba(COLOURS[colour], 0.35)
            look: dict[str, Any] = {"marker": "s", "facecolor": face, "linewidths": 1.8 if kind == ORDER else 0}
            look["edgecolor"] = COLOURS[colour]
            axis.scatter(own["decode_factor"], own["prefill_factor"], s=900, **look)
            axis.scatter([], [], s=60, label=f"{kind} (the ridge)" if kind == ORDER else kind, **look)
        for row in records(cells, ttft_limit_s=limit_s):
            text = f"{row['early']:.2f}\n{row['predictive']:.2f}"
            axis.annotate(
                text, (row["decode_factor"], row["prefill_factor"]), ha="center", va="center", fontsize=style.SMALL
            )
        axis.plot(
            *zip(*region, strict=True), "+", color=COLOURS["fitted"], markersize=4, label="region of the fit"
        )
        for name, (at_s, decode, prefill) in dots.items():
            if at_s == limit_s:
                axis.plot(
                    decode, prefill, marker="o", color=COLOURS["ink"], markerfacecolor="none", linestyle="none"
                )
                axis.annotate(name, (decode, prefill), xytext=(0, 18), textcoords="offset points", ha="center")
        style.panel_title(axis, f"TTFT limit {limit_s:.0f} s")
        axis.set(xlabel="decode pressure (slope, times FAST'25)", xlim=(4.8, 10.2), ylim=(1.18, 2.22))
        axis.grid(visible=False)
    axes[0].set_ylabel("prefill pressure (times FAST'25)")
    return style.finished(
        figure,
        "simulated: arXiv testbed; recorded replays of twin 0, one a cell and policy, no interval",
        columns=2,
    )


def _rows_of_policies(axes: Sequence[Axes], policies: Sequence[str]) -> None:
    """Policies down the side of the first panel, the first on top."""
    axes[0].set_yticks(range(len(policies)), [LABELS[policy].replace("\n", " ") for policy in policies])
    axes[0].set_ylim(len(policies) - 0.45, -0.55)
    for axis in axes:
        axis.grid(visible=False, axis="y")


@style.styled
def series(panels: Mapping[str, pd.DataFrame], paper: pd.DataFrame) -> style.BookFigure:
    """Load of both pools over time, one panel a policy; the paper's samples in a panel of their own.

    Args:
        panels: rows of `LoadSeries` by the name of the panel.
        paper: the loads of arXiv Fig. 9, columns at_s, prefill, decode.
    """
    figure, axes = style.new_figure(len(panels) + 1, 1, height=1.5 * (len(panels) + 1) + 0.9, sharex=True)
    for axis, (title, rows) in zip(axes, {PRODUCTION: paper, **panels}.items(), strict=True):
        minutes = rows["at_s"] / 60
        for stage, line in (("prefill", "-"), ("decode", "--")):
            axis.plot(minutes, rows[stage], line, color=COLOURS[stage], linewidth=1.2, label=f"{stage} pool")
            if title == PRODUCTION:
                style.paper_points(axis, minutes, rows[stage], "arXiv Fig. 9").set_markersize(3)
        style.panel_title(axis, title)
        axis.set(ylabel="load (share)", ylim=(0, 1.15), xlim=(0, None))
        style.slo_line(axis, 1.0, "full")
    axes[-1].set_xlabel("time (min)")
    return style.finished(figure, style.simulated(style.sources(*panels.values())))


@style.styled
def four_stages(ours: Mapping[str, pd.DataFrame], paper: Mapping[str, pd.DataFrame]) -> style.BookFigure:
    """The sketch of arXiv Fig. 10: load of both pools stage by stage, ours as bars, the paper's as diamonds.

    Args:
        ours: columns number, decode, prefill, by the name of the panel.
        paper: columns stage, decode, prefill, by the same names.
    """
    figure, axes = style.new_figure(2, len(ours), height=3.6, sharex=True, sharey=True)
    panels = [(pool, title) for pool in ("prefill", "decode") for title in ours]
    for axis, (pool, title) in zip(axes, panels, strict=True):
        number = ours[title]["number"]
        look: dict[str, Any] = {"color": COLOURS[pool], "hatch": style.HATCHES[pool]}
        axis.bar(number, ours[title][pool], 0.6, edgecolor="white", label=f"{pool} pool, by hand", **look)
        style.paper_points(axis, paper[title]["stage"], paper[title][pool], "arXiv Fig. 10")
        axis.set(ylim=(0, 1.1))
        axis.set_xticks(list(number))
        axis.grid(visible=False, axis="x")
        if pool == "prefill":
            style.panel_title(axis, title)
        else:
            axis.set_xlabel("stage (number)")
        if title == next(iter(ours)):
            axis.set_ylabel(f"{pool} load\n(share of full)")
    return style.finished(figure, "by hand, no simulation")


@style.styled
def sweep(rows: pd.DataFrame, knob: str, label: str, quantities: Mapping[str, str]) -> style.BookFigure:
    """Quantities over one knob, a line a policy.

    Args:
        rows: rows of `Overload`, a policy and value of the knob each.
        knob: its column.
        label: of the horizontal axis, with its unit.
        quantities: column by its label with unit.
    """
    figure, axes = style.new_figure(1, len(quantities), height=2.9)
    means = rows.pivot_table(list(quantities.values()), ["policy", knob], sort=False).reset_index()
    for axis, (title, column) in zip(axes, quantities.items(), strict=True):
        for policy, line in means.groupby("policy", sort=False):
            look: dict[str, Any] = {
                **style.COMPUTED,
                "color": _colour(str(policy)),
                "label": LABELS[str(policy)].replace("\n", " "),
            }
            ordered = line.sort_values(knob)
            axis.plot(ordered[knob], ordered[column], **look)
        axis.set(xlabel=label, ylabel=fill(title, 26), ylim=(0, None))
        axis.xaxis.set_major_formatter(style.plain_number)
    return style.finished(figure, style.simulated(style.sources(rows)))


@style.styled
def crowd(rows: pd.DataFrame) -> style.BookFigure:
    """A crowd on the live cluster beside its simulation: what became of the requests, and prefill in vain.

    Args:
        rows: rows of `LiveCrowd`, two a policy.
    """
    figure, (left, right) = style.new_figure(1, 2, height=3.4)
    policies = list(dict.fromkeys(map(str, rows["policy"])))
    at = np.arange(len(policies))
    for world, shift, alpha in (("live", -0.21, 1.0), ("simulated", 0.21, 0.5)):
        table = where(rows, world=world).set_index("policy").loc[policies]
        hidden = "" if world == "live" else "_"
        parts = {
            f"{hidden}finished": (table["finished"], COLOURS["finished"]),
            f"{hidden}rejected after prefill": (table["refused_after_prefill"], COLOURS["refused_late"]),
            f"{hidden}rejected on arrival": (table["refused_on_arrival"], COLOURS["refused_early"]),
        }
        look: dict[str, Any] = {"width": 0.38, "alpha": alpha}
        style.stacked(left, at + shift, parts, edgecolor="none", **look)
        right.bar(at + shift, table["wasted_prefill_s"], color=COLOURS["refused_late"], **look)
    left.set_ylabel("requests (count)")
    right.set(ylabel="prefill of requests rejected later (s)", ylim=(0, None))
    for axis in (left, right):
        axis.set_xticks(at, [LABELS[policy] for policy in policies])
        axis.grid(visible=False, axis="x")
    measured = f"left bar of a pair measured once, no interval: {rows['machine'].iloc[0]}"
    return style.finished(figure, f"{measured}; right and fainter bar simulated at the same pace")


def _colour(policy: str) -> str:
    """That of a policy, also of one that has none of its own."""
    return COLOURS[_COLOUR.get(policy, "straw_man_light")]
