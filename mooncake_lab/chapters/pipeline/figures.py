"""Figures of pipelines: timelines, bubbles by cause, SARATHI's Fig. 12, its sensitivity, chunk size."""

from collections.abc import Mapping
from textwrap import fill
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mooncake_lab.figures.colours import FRAME, GROUND
from mooncake_lab.figures.style import (
    COLOURS,
    COMPUTED,
    HATCHES,
    BookFigure,
    footer,
    legend_above,
    new_figure,
    paper_points,
    plain_number,
    styled,
)

MODELLED: Final = "simulated: GPT-3 on 64 A100s, iteration costs carried over from SARATHI Table 2 and Fig. 7"
_SCHEMES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"Orca-best": ("straw_man", "-"), "TP8 replicas": ("straw_man", "--"), "SARATHI": ("vllm_chunked", "-")}
)
_WORK: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "prompts": ("prefill", HATCHES["prefill"]),
        "both": ("vllm_chunked", HATCHES["prefill"]),
        "decodes": ("decode", HATCHES["decode"]),
    }
)
_IDLE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fill": FRAME["grid"][0],
        "drain": FRAME["shade"][0],
        "PB1": COLOURS["pb1"],
        "PB2": COLOURS["pb2"],
        "PB3": COLOURS["pb3"],
        "no work": GROUND,
    }
)


@styled
def timelines(runs: Mapping[str, pd.DataFrame]) -> BookFigure:
    """Two stages iteration by iteration, gaps by cause (SARATHI Figs. 1 and 5): rows of `timeline` by scheme."""
    figure, panels = new_figure(len(runs), 1, height=1.3 * len(runs) + 0.9, sharex=True)
    for panel, (scheme, rows) in zip(panels, runs.items(), strict=True):
        _timeline(panel, rows)
        panel.set_ylabel(f"{scheme}\n(stage)")
    panels[-1].set_xlabel("time (ms)")
    busy = [Patch(facecolor=COLOURS[c], hatch=h, edgecolor="white", label=n) for n, (c, h) in _WORK.items()]
    idle = [
        Patch(facecolor=c, edgecolor=FRAME["axis"][0], label=n)
        for n, c in _IDLE.items()
        if n in {"PB1", "PB2", "PB3"}
    ]
    legend_above(figure, [*busy, *idle])
    footer(figure, "simulated: six requests through GPT-3 in two stages; letters name the micro-batch")
    return figure


def _timeline(panel: Axes, rows: pd.DataFrame) -> None:
    for row in rows.to_dict("records"):
        start, width, what = float(row["start_ms"]), float(row["end_ms"] - row["start_ms"]), str(row["what"])
        place = float(row["stage"])
        if what in _WORK:
            colour, hatch = _WORK[what]
            panel.barh(place, width, left=start, height=0.8, color=COLOURS[colour], hatch=hatch, edgecolor="white")
            if width > 22:
                panel.text(
                    start + width / 2, place, "AB"[int(row["micro_batch"])], ha="center", va="center", color=GROUND
                )
        elif what not in {"fill", "drain"}:
            panel.barh(
                place, width, left=start, height=0.8, color=_IDLE[what], edgecolor=FRAME["axis"][0], linewidth=0.6
            )
    stages = sorted({int(stage) for stage in rows["stage"].tolist()})
    panel.set_yticks(stages, [str(stage + 1) for stage in stages])
    panel.invert_yaxis()
    panel.grid(visible=False, axis="y")


@styled
def bubbles_and_completion(bubbles: pd.DataFrame, done: pd.DataFrame, paper: pd.DataFrame) -> BookFigure:
    """Bubble time of requests, and requests done over time (SARATHI Fig. 12): quantile rows, the curve."""
    figure, (left, right) = new_figure(1, 2, height=3.4)
    last_s = max(done[done["scheme"] == "SARATHI"]["value"].tolist())
    for scheme, (colour, line) in _SCHEMES.items():
        rows = bubbles[bubbles["scheme"] == scheme]
        if scheme != "TP8 replicas":
            left.step(rows["value"], 100 * rows["share"], color=COLOURS[colour], linestyle=line, label=scheme)
        rows = done[done["scheme"] == scheme]
        right.plot(
            rows["value"] / last_s, 100 * rows["share"], color=COLOURS[colour], linestyle=line, label=scheme
        )
    left.set_xscale("log")
    left.xaxis.set_major_formatter(plain_number)
    left.set(xlabel="idle time before a request's iterations (s)", ylabel="requests (%)", ylim=(0, 101))
    ratios = paper[paper["x"] == "time_over_sarathi"]["y"]
    paper_points(right, [1.0, *ratios], [100] * (1 + len(ratios)), "SARATHI Fig. 12b")
    right.set(xlabel="time / completion under SARATHI (ratio)", ylabel="requests done (%)", ylim=(0, 104))
    legend_above(figure)
    footer(figure, MODELLED)
    return figure


@styled
def causes(shares: pd.DataFrame) -> BookFigure:
    """What the stages spent their time on, by scheme: the table of `shares_by_cause`."""
    figure, (axes,) = new_figure(height=2.8)
    left = np.zeros(len(shares))
    places = np.arange(len(shares))
    for name in shares.columns:
        widths = shares[name].to_numpy()
        if widths.sum() < 0.005 and name != "busy":
            continue
        colour = COLOURS["size_1"] if name == "busy" else _IDLE[str(name)]
        axes.barh(
            places, widths, left=left, color=colour, edgecolor=FRAME["axis"][0], linewidth=0.5, label=str(name)
        )
        left += widths
    axes.set_yticks(places, [str(scheme) for scheme in shares.index])
    axes.invert_yaxis()
    axes.set(xlabel="time of all stages (%)", xlim=(0, 100))
    axes.grid(visible=False, axis="y")
    legend_above(figure, columns=7)
    footer(figure, MODELLED)
    return figure


@styled
def sensitivity(table: pd.DataFrame, paper: pd.DataFrame) -> BookFigure:
    """The three ratios of completion over the cost of a decode iteration: rows of `sensitivity`, the curve."""
    figure, panels = new_figure(1, 3, height=3.2, sharex=True)
    facts = {(s, x): y for s, x, y in zip(paper["series"], paper["x"], paper["y"], strict=True)}
    orca = "Orca-best, TP8 x PP8"
    shown = {
        "orca_over_sarathi": ("Orca / SARATHI (ratio)", facts[orca, "time_over_sarathi"]),
        "replicas_over_sarathi": ("TP8 replicas / SARATHI (ratio)", facts["TP8 replicas", "time_over_sarathi"]),
        "bubbles_orca_over_sarathi": (
            "median bubble, Orca / SARATHI (ratio)",
            facts[orca, "median_bubble_over_sarathi"],
        ),
    }
    for panel, (column, (label, printed)) in zip(panels, shown.items(), strict=True):
        for overhead, rows in table.groupby("overhead_ms_a_layer"):
            line = "-" if not overhead else "--"
            ordered = rows.sort_values("prompt_over_decode")
            panel.plot(
                ordered["prompt_over_decode"], ordered[column], line, **COMPUTED, color=COLOURS["vllm_chunked"],
                label=f"{overhead:g} ms a layer beside the roofline",
            )  # fmt: skip
        panel.axhline(float(printed), color=COLOURS["paper"], linewidth=1, linestyle=":")
        panel.annotate(
            f"paper {printed:g}", (0.02, float(printed)), xycoords=("axes fraction", "data"),
            xytext=(0, 3), textcoords="offset points",
        )  # fmt: skip
        panel.set(xlabel="prompt of 2K /\ndecode of 27 (ratio)", ylabel=fill(label, 24))
        panel.set_ylim(0, None)
    legend_above(figure)
    footer(figure, MODELLED)
    return figure


@styled
def chunk_sizes(runs: pd.DataFrame, orca: pd.DataFrame) -> BookFigure:
    """Idle share and completion over the fused chunk: runs of SARATHI by `fused_tokens`, and one of Orca-best."""
    figure, (left, right) = new_figure(1, 2, height=3.0)
    ordered = runs.sort_values("fused_tokens")
    left.plot(ordered["fused_tokens"], 100 * ordered["idle_share"], **COMPUTED, color=COLOURS["vllm_chunked"])
    right.plot(ordered["fused_tokens"], ordered["completion_s"], **COMPUTED, color=COLOURS["vllm_chunked"])
    for panel, value in (
        (left, 100 * float(orca["idle_share"].iloc[0])),
        (right, float(orca["completion_s"].iloc[0])),
    ):
        panel.axhline(value, color=COLOURS["straw_man"])
        panel.annotate("Orca-best", (1.0, value), xycoords=("axes fraction", "data"), ha="right",
                       xytext=(0, 3), textcoords="offset points")  # fmt: skip
        panel.set_xlabel("chunk and decodes together (tokens)")
        panel.set_ylim(0, None)
        panel.set_xscale("log", base=2)
        panel.set_xticks(ordered["fused_tokens"].tolist(), ordered["fused_tokens"].astype(str).tolist())
    left.set_ylabel("idle time of all stages (%)")
    right.set_ylabel("completion of all requests (s)")
    footer(figure, MODELLED)
    return figure


@styled
def measured(rows: Mapping[str, pd.DataFrame], machine: str) -> BookFigure:
    """Who computed and who waited when, on this machine: rows of `activity`, by way."""
    figure, panels = new_figure(len(rows), 1, height=1.1 * len(rows) + 1.0, sharex=True)
    for panel, (way, table) in zip(panels, rows.items(), strict=True):
        for row in table.to_dict("records"):
            width = float(row["end_ms"] - row["start_ms"])
            busy = row["what"] == "compute"
            panel.barh(
                float(row["rank"]), width, left=float(row["start_ms"]), height=0.7 if busy else 0.25,
                color=COLOURS["prefill" if busy else "straw_man_light"], edgecolor="white", linewidth=0.8,
                label="computes" if busy else "waits",
            )  # fmt: skip
        ranks = sorted(set(table["rank"].tolist()))
        panel.set_yticks(ranks, [str(rank) for rank in ranks])
        panel.invert_yaxis()
        panel.grid(visible=False, axis="y")
        panel.set_ylabel(f"{way}\n(process)")
    panels[-1].set_xlabel("time (ms)")
    legend_above(figure)
    footer(figure, f"measured: {machine}; each process computes with one thread")
    return figure
