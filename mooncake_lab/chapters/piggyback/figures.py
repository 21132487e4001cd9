"""Figures of piggybacking: where time goes, tiles, accounts of a decode, the P:D ratio, this machine."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from mooncake_lab.experiments import where
from mooncake_lab.figures.style import (
    COLOURS,
    HATCHES,
    BookFigure,
    footer,
    legend_above,
    new_figure,
    panel_title,
    paper_points,
    plain_number,
    styled,
)

MODELLED: Final = "modelled: LLaMA-13B on an A6000, anchored to SARATHI Table 2 and Fig. 7"
_OPERATORS: Final[Mapping[str, str]] = MappingProxyType(
    {"preproj": "size_4", "postproj": "size_3", "ffn1": "size_2", "ffn2": "size_1", "attention": "attention"}
)
_PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {"linear": "size_2", "chunk attention": "prefill", "decode attention": "decode"}
)
_LINES: Final[Mapping[str, str]] = MappingProxyType({"1K": "-", "2K": "--", "3K": ":"})
_CHUNKS: Final[Mapping[int, tuple[str, str]]] = MappingProxyType(
    {0: ("vllm", "-."), 128: ("size_1", "-"), 256: ("size_2", "-"), 512: ("size_4", "-")}
)
_ACCOUNTS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "marginal": ("marginal (the paper's)", "vllm_chunked"),
        "by_token": ("by token", "by_tokens"),
        "by_order": ("by order", "by_order"),
    }
)


@styled
def time_per_token(times: pd.DataFrame, paper: pd.DataFrame) -> BookFigure:
    """Milliseconds a token by operator over batch size (SARATHI Fig. 3): rows of `time_per_token`, the curve."""
    figure, panels = new_figure(1, 2, height=3.4)
    for panel, stage in zip(panels, ("prefill", "decode"), strict=True):
        table = times[times["stage"] == stage].pivot_table(index="batch", columns="operator", values="ms")
        bottom, places = np.zeros(len(table)), np.arange(len(table))
        for operator, colour in _OPERATORS.items():
            heights = table[operator].to_numpy()
            panel.bar(
                places, heights, bottom=bottom, label=operator, color=COLOURS[colour], edgecolor="white",
                hatch=HATCHES[stage],
            )  # fmt: skip
            bottom = bottom + heights
        points = paper[(paper["series"] == stage) & paper["x"].isin(list(table.index))]
        paper_points(panel, [list(table.index).index(x) for x in points["x"]], points["y"], "SARATHI Fig. 3")
        panel.set_xticks(places, [str(batch) for batch in table.index])
        panel.set(xlabel="batch size (requests)", ylabel=f"time per {stage} token (ms)")
    legend_above(figure)
    footer(figure, MODELLED)
    return figure


@styled
def sawtooth(times: pd.DataFrame, paper: pd.DataFrame) -> BookFigure:
    """Iteration time over tokens, with tiles and without (SARATHI Fig. 7): rows of `sawtooth`, the curve."""
    figure, (axes,) = new_figure(height=3.4)
    for tiles, colour in ((False, "straw_man_light"), (True, "vllm_chunked")):
        rows = times[times["tiles"] == tiles]
        axes.plot(
            rows["tokens"], rows["ms"], color=COLOURS[colour], label="with tiles of 128" if tiles else "no tiles"
        )
    paper_points(axes, paper["x"], paper["y"], "SARATHI Fig. 7 (anchors)")
    axes.set(xlabel="tokens of the iteration (tokens)", ylabel="iteration time (ms)", ylim=(0, None))
    axes.set_xticks(np.arange(0, int(max(times["tokens"])) + 1, 128))
    legend_above(figure)
    footer(figure, MODELLED)
    return figure


@styled
def accounts(sweep: pd.DataFrame, paper: pd.DataFrame) -> BookFigure:
    """The speed-up of a decode by a chunk in its iteration (SARATHI Fig. 8), and by other accounts.

    Args:
        sweep: rows of `account_sweep`.
        paper: the curve of SARATHI Fig. 8.
    """
    figure, (left, right) = new_figure(1, 2, height=3.4, sharey=True)
    for label, table in sweep.groupby("label"):
        left.plot(
            table["batch"], table["marginal"], _LINES[str(label)], color=COLOURS["vllm_chunked"], label=str(label)
        )
    paper_points(left, paper["x"], paper["y"], "SARATHI Fig. 8")
    short = sweep[sweep["label"] == "1K"]
    for name, (label, colour) in _ACCOUNTS.items():
        right.plot(short["batch"], short[name], color=COLOURS[colour], label=label)
    for panel in (left, right):
        panel.axhline(1, color=COLOURS["slo"], linewidth=1)
        panel.set(xlabel="batch size (requests)", ylim=(0, None))
    legend_above(figure, columns=4)
    left.set_ylabel("decode speed-up (ratio)")
    panel_title(right, "1K, three accounts")
    panel_title(left, "marginal account, three lengths")
    footer(figure, f"{MODELLED}; chunk 256")
    return figure


@styled
def ratio_sweep(sweep: pd.DataFrame, peaks: pd.DataFrame, balance: pd.DataFrame) -> BookFigure:
    """Throughput over the baseline by P:D ratio (SARATHI Figs. 9 and 11b).

    Args:
        sweep: rows of `ratio_sweep`.
        peaks: the curve of SARATHI Fig. 9, whose series are `1K/chunk 256` and the like.
        balance: rows of `peaks`.
    """
    labels = list(dict.fromkeys(sweep["label"]))
    figure, panels = new_figure(1, len(labels), height=3.2, sharey=True)
    for panel, label in zip(panels, labels, strict=True):
        table = where(sweep, label=label)
        for fused, rows in table.groupby("fused_tokens"):
            colour, line = _CHUNKS[int(str(fused))]
            name = f"chunk {fused}" if fused else "Orca-best"
            panel.plot(rows["ratio"], rows["gain"], line, color=COLOURS[colour], label=name)
        for ratio in balance[balance["label"] == label]["ratio"]:
            panel.axvline(ratio, color=COLOURS["slo"], linewidth=0.8, linestyle=(0, (1, 2)))
        points = peaks[peaks["series"].str.startswith(label)]
        paper_points(panel, points["x"], points["y"], "SARATHI Fig. 9a" if len(points) else "_nolegend_")
        panel.set(xscale="log", xlabel="P:D (ratio)", ylim=(0.8, 1.35))
        panel_title(panel, f"{label}, batch {table['batch'].iloc[0]}")
        panel.xaxis.set_major_formatter(FuncFormatter(plain_number))
    panels[0].set_ylabel("throughput over the baseline (ratio)")
    legend_above(figure)
    footer(figure, f"{MODELLED}; dotted: (C - (B-1)) / (B-1)")
    return figure


@styled
def breakdown(parts: pd.DataFrame, paper: pd.DataFrame) -> BookFigure:
    """Seconds of a round by what they are spent on (SARATHI Fig. 10): rows of `breakdown`, the curve."""
    chunks = sorted(set(parts["fused_tokens"]))
    figure, panels = new_figure(1, len(chunks), height=3.0, sharex=True, sharey=True)
    for panel, fused in zip(panels, chunks, strict=True):
        table = parts[parts["fused_tokens"] == fused].pivot_table(
            index=["label", "scheme"], columns="part", values="seconds"
        )
        names = sorted(table.index, key=lambda key: (key[0], key[1] != "baseline"))
        ends, places = np.zeros(len(names)), np.arange(len(names))
        for part, colour in _PARTS.items():
            widths = table.loc[names, part].to_numpy()
            hatch = HATCHES["decode" if part == "decode attention" else "prefill"]
            look: dict[str, Any] = {"color": COLOURS[colour], "edgecolor": "white", "hatch": hatch}
            panel.barh(places, widths, left=ends, label=part, **look)
            ends = ends + widths
        if fused == chunks[0]:
            where = [names.index(("1K", str(series))) for series in paper["series"]]
            paper_points(panel, paper["y"], where, "SARATHI Fig. 10, total")
            panel.set_yticks(places, [f"{label} {scheme}" for label, scheme in names])
            panel.invert_yaxis()
        panel_title(panel, f"chunk {fused}")
        panel.set_xlabel("a round of the batch (s)")
        panel.grid(visible=False, axis="y")
    legend_above(figure)
    footer(figure, MODELLED)
    return figure


@styled
def predicted(cells: pd.DataFrame) -> BookFigure:
    """Every predicted cell beside the paper's: rows of `predictions`, with the error in percent.

    Ratios are above, seconds below, each on an axis of its own.
    """
    seconds = cells["place"].str.contains("seconds") | cells["cell"].str.contains("seconds")
    groups = [(cells[~seconds], "speed-up (ratio)"), (cells[seconds], "a round of the batch (s)")]
    shares = [len(rows) + 0.5 for rows, _ in groups]
    figure, panels = new_figure(2, 2, height=7.2, sharey="row", height_ratios=shares)
    for (rows, quantity), left, right in zip(groups, panels[::2], panels[1::2], strict=True):
        places = np.arange(len(rows))
        left.barh(places, rows["model"], color=COLOURS["vllm_chunked"], label="model")
        paper_points(left, rows["paper"], places, "SARATHI")
        names = [f"{place}: {cell}" for place, cell in zip(rows["place"], rows["cell"], strict=True)]
        left.set_yticks(places, names)
        left.set(xlabel=quantity, xlim=(0, None), ylim=(len(rows) - 0.4, -0.6))
        right.barh(places, rows["error_percent"], color=COLOURS["straw_man"])
        right.axvline(0, color=COLOURS["slo"], linewidth=1)
        right.set_xlabel("error of the model (%)")
        right.set_xlim(-1.1 * max(abs(cells["error_percent"])), 1.1 * max(abs(cells["error_percent"])))
        for panel in (left, right):
            panel.grid(visible=False, axis="y")
    legend_above(figure)
    footer(figure, "predicted from SARATHI Table 2 and Fig. 7; LLaMA-33B on an A100 carried over by the roofline")
    return figure


@styled
def beside_orca(bars: pd.DataFrame, paper: pd.DataFrame) -> BookFigure:
    """Baseline, Orca-best and SARATHI (SARATHI Fig. 11a): rows of `beside_orca`, and the curve."""
    figure, (axes,) = new_figure(height=3.4)
    labels = list(dict.fromkeys(bars["label"]))
    looks = {"baseline": "straw_man_light", "Orca-best": "straw_man", "SARATHI": "vllm_chunked"}
    for offset, (scheme, colour) in enumerate(looks.items()):
        rows = bars[bars["scheme"] == scheme]
        places = np.arange(len(labels)) + 0.27 * (offset - 1)
        axes.bar(places, rows["gain"], width=0.25, color=COLOURS[colour], label=scheme)
        points = paper[paper["series"] == scheme]
        where = [places[labels.index(str(label))] for label in points["x"]]
        paper_points(axes, where, points["y"], "SARATHI Fig. 11a" if scheme == "SARATHI" else "_nolegend_")
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel="sequence length (tokens)", ylabel="throughput over the baseline (ratio)", ylim=(0, 1.5))
    legend_above(figure)
    footer(figure, f"{MODELLED}; chunk 256, largest batch, balanced P:D")
    return figure


@styled
def measured_accounts(table: pd.DataFrame, machine: str) -> BookFigure:
    """A decode here, alone and beside a chunk: rows of `rider_accounts`; error bars are quartiles of rounds."""
    widths = sorted(set(table["fused"]))
    figure, panels = new_figure(1, len(widths), height=3.3, sharey=True)
    for panel, fused in zip(panels, widths, strict=True):
        rows = where(table, fused=fused)
        _circles(panel, rows, "alone_ms", "alone", "straw_man")
        for name, (label, colour) in _ACCOUNTS.items():
            _circles(panel, rows, f"{name}_ms", label, colour)
        spread = np.stack(
            [rows["marginal_ms"] - rows["marginal_low_ms"], rows["marginal_high_ms"] - rows["marginal_ms"]]
        )
        panel.errorbar(
            rows["decodes"], rows["marginal_ms"], yerr=np.clip(spread, 0, None), fmt="none", capsize=3,
            color=COLOURS["vllm_chunked"],
        )  # fmt: skip
        panel.set_xlabel("decodes in the batch (requests)")
        panel_title(panel, f"{fused} tokens in all")
        panel.set_xticks(sorted(set(rows["decodes"])))
    panels[0].set(ylabel="time of a decode token (ms)", ylim=(0, None))  # once all panels are drawn: they share it
    legend_above(figure)
    footer(figure, f"measured: {machine}")
    return figure


def _circles(panel: Axes, rows: pd.DataFrame, column: str, label: str, colour: str) -> None:
    panel.plot(rows["decodes"], rows[column], linestyle="none", marker="o", color=COLOURS[colour], label=label)
