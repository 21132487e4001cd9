"""Figures of piggybacking: where time goes, tiles, accounts of a decode, the P:D ratio, this machine."""

from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS

MODELLED: Final = "modelled: LLaMA-13B on an A6000, anchored to SARATHI Table 2 and Fig. 7"
_OPERATORS: Final = {
    "preproj": "size_4",
    "postproj": "size_3",
    "ffn1": "size_2",
    "ffn2": "size_1",
    "attention": "attention",
}
_PARTS: Final = {"linear": "size_2", "chunk attention": "prefill", "decode attention": "decode"}
_LINES: Final = {"1K": ("vllm_chunked", "-"), "2K": ("vllm_chunked", "--"), "3K": ("vllm_chunked", ":")}
_CHUNKS: Final = {
    "Orca-best": ("vllm", "-."),
    "chunk 128": ("size_1", "-"),
    "chunk 256": ("size_2", "-"),
    "chunk 512": ("size_4", "-"),
}
_ACCOUNTS: Final = {
    "marginal": ("marginal (the paper's)", "vllm_chunked"),
    "by_token": ("by token", "by_tokens"),
    "by_order": ("by order", "by_order"),
}


@style.styled
def time_per_token(times: pd.DataFrame, paper: pd.DataFrame) -> style.BookFigure:
    """Milliseconds a token by operator over batch size (SARATHI Fig. 3): rows of `time_per_token`, the curve."""
    figure, panels = style.new_figure(1, 2, height=3.4)
    for panel, stage in zip(panels, ("prefill", "decode"), strict=True):
        table = where(times, stage=stage).pivot_table(index="batch", columns="operator", values="ms")
        places = range(len(table))
        parts = {operator: (table[operator], COLOURS[colour]) for operator, colour in _OPERATORS.items()}
        style.stacked(panel, places, parts, hatch=style.HATCHES[stage])
        points = paper[(paper["series"] == stage) & paper["x"].isin(list(table.index))]
        style.paper_points(panel, [list(table.index).index(x) for x in points["x"]], points["y"], "SARATHI Fig. 3")
        panel.set_xticks(places, [str(batch) for batch in table.index])
        panel.set(xlabel="batch size (requests)", ylabel=f"time per {stage} token (ms)")
    return style.finished(figure, MODELLED)


@style.styled
def sawtooth(times: pd.DataFrame, paper: pd.DataFrame) -> style.BookFigure:
    """Iteration time over tokens, with tiles and without (SARATHI Fig. 7): rows of `sawtooth`, the curve."""
    figure, (axes,) = style.new_figure(height=3.4)
    for tiles, colour, label in (
        (False, "straw_man_light", "no tiles"),
        (True, "vllm_chunked", "with tiles of 128"),
    ):
        rows = where(times, tiles=tiles)
        axes.plot(rows["tokens"], rows["ms"], color=COLOURS[colour], label=label)
    style.paper_points(axes, paper["x"], paper["y"], "SARATHI Fig. 7 (anchors)")
    axes.set(xlabel="tokens of the iteration (tokens)", ylabel="iteration time (ms)", ylim=(0, None))
    axes.set_xticks(np.arange(0, int(max(times["tokens"])) + 1, 128))
    return style.finished(figure, MODELLED)


@style.styled
def accounts(sweep: pd.DataFrame, paper: pd.DataFrame) -> style.BookFigure:
    """The speed-up of a decode by a chunk in its iteration (SARATHI Fig. 8) by three accounts: `account_sweep`."""
    figure, (left, right) = style.new_figure(1, 2, height=3.4, sharey=True)
    style.curves(left, sweep, "batch", "marginal", "label", _LINES)
    style.paper_points(left, paper["x"], paper["y"], "SARATHI Fig. 8")
    short = where(sweep, label="1K")
    for name, (label, colour) in _ACCOUNTS.items():
        right.plot(short["batch"], short[name], color=COLOURS[colour], label=label)
    for panel in (left, right):
        panel.axhline(1, color=COLOURS["slo"], linewidth=1)
        panel.set(xlabel="batch size (requests)", ylim=(0, None))
    left.set_ylabel("decode speed-up (ratio)")
    style.panel_title(right, "1K, three accounts")
    style.panel_title(left, "marginal account, three lengths")
    return style.finished(figure, f"{MODELLED}; chunk 256", columns=4)


@style.styled
def ratio_sweep(sweep: pd.DataFrame, printed: pd.DataFrame, balance: pd.DataFrame) -> style.BookFigure:
    """Throughput over the baseline by P:D ratio (SARATHI Figs. 9 and 11b).

    Args:
        sweep: rows of `ratio_sweep`.
        printed: the curve of SARATHI Fig. 9, whose series are `1K/chunk 256` and the like.
        balance: rows of `peaks`.
    """
    labels = list(dict.fromkeys(sweep["label"]))
    figure, panels = style.new_figure(1, len(labels), height=3.2, sharey=True)
    names = [f"chunk {fused}" if fused else "Orca-best" for fused in sweep["fused_tokens"]]
    for panel, label in zip(panels, labels, strict=True):
        table = where(sweep.assign(name=names), label=label)
        style.curves(panel, table, "ratio", "gain", "name", _CHUNKS)
        for ratio in where(balance, label=label)["ratio"]:
            panel.axvline(ratio, color=COLOURS["slo"], linewidth=0.8, linestyle=(0, (1, 2)))
        points = printed[printed["series"].str.startswith(label)]
        style.paper_points(panel, points["x"], points["y"], "SARATHI Fig. 9a" if len(points) else "_nolegend_")
        style.log_axes(panel, "x")
        panel.set(xlabel="P:D (ratio)", ylim=(0.8, 1.35))
        style.panel_title(panel, f"{label}, batch {table['batch'].iloc[0]}")
    panels[0].set_ylabel("throughput over the baseline (ratio)")
    return style.finished(figure, f"{MODELLED}; dotted: (C - (B-1)) / (B-1)")


@style.styled
def breakdown(parts: pd.DataFrame, paper: pd.DataFrame) -> style.BookFigure:
    """Seconds of a round by what they are spent on (SARATHI Fig. 10): rows of `breakdown`, the curve."""
    chunks = sorted(set(parts["fused_tokens"]))
    figure, panels = style.new_figure(1, len(chunks), height=3.0, sharex=True, sharey=True)
    hatches = {"decode attention": style.HATCHES["decode"]}
    for panel, fused in zip(panels, chunks, strict=True):
        keys = ["label", "scheme"]
        table = where(parts, fused_tokens=fused).pivot_table(index=keys, columns="part", values="seconds")
        names = sorted(table.index, key=lambda key: (key[0], key[1] != "baseline"))
        spent = {part: (table.loc[names, part], COLOURS[colour]) for part, colour in _PARTS.items()}
        style.stacked(panel, range(len(names)), spent, across=True, hatches=hatches)
        if fused == chunks[0]:
            at = [names.index(("1K", str(series))) for series in paper["series"]]
            style.paper_points(panel, paper["y"], at, "SARATHI Fig. 10, total")
            style.rows_down(panel, [f"{label} {scheme}" for label, scheme in names])
        style.panel_title(panel, f"chunk {fused}")
        panel.set_xlabel("a round of the batch (s)")
        panel.grid(visible=False, axis="y")
    return style.finished(figure, MODELLED)


@style.styled
def predicted(cells: pd.DataFrame) -> style.BookFigure:
    """Every predicted cell beside the paper's: rows of `predictions`, with the error in percent.

    Ratios are above, seconds below, each on an axis of its own.
    """
    seconds = cells["place"].str.contains("seconds") | cells["cell"].str.contains("seconds")
    groups = [(cells[~seconds], "speed-up (ratio)"), (cells[seconds], "a round of the batch (s)")]
    shares = [len(rows) + 0.5 for rows, _ in groups]
    figure, panels = style.new_figure(2, 2, height=7.2, sharey="row", height_ratios=shares)
    most = 1.1 * max(abs(cells["error_percent"]))
    for (rows, quantity), left, right in zip(groups, panels[::2], panels[1::2], strict=True):
        places = range(len(rows))
        left.barh(places, rows["model"], color=COLOURS["vllm_chunked"], label="model")
        style.paper_points(left, rows["paper"], places, "SARATHI")
        left.set_yticks(places, rows["place"] + ": " + rows["cell"])
        left.set(xlabel=quantity, xlim=(0, None), ylim=(len(rows) - 0.4, -0.6))
        right.barh(places, rows["error_percent"], color=COLOURS["straw_man"])
        right.axvline(0, color=COLOURS["slo"], linewidth=1)
        right.set(xlabel="error of the model (%)", xlim=(-most, most))
        for panel in (left, right):
            panel.grid(visible=False, axis="y")
    source = "predicted from SARATHI Table 2 and Fig. 7; LLaMA-33B on an A100 carried over by the roofline"
    return style.finished(figure, source)


@style.styled
def beside_orca(bars: pd.DataFrame, paper: pd.DataFrame) -> style.BookFigure:
    """Baseline, Orca-best and SARATHI (SARATHI Fig. 11a): rows of `beside_orca`, and the curve."""
    figure, (axes,) = style.new_figure(height=3.4)
    labels = list(dict.fromkeys(bars["label"]))
    looks = {"baseline": "straw_man_light", "Orca-best": "straw_man", "SARATHI": "vllm_chunked"}
    for number, (scheme, colour) in enumerate(looks.items()):
        places = style.bar_places(len(labels), len(looks), number, 0.27)
        axes.bar(places, where(bars, scheme=scheme)["gain"], width=0.25, color=COLOURS[colour], label=scheme)
        points = where(paper, series=scheme)
        at = [places[labels.index(str(label))] for label in points["x"]]
        style.paper_points(axes, at, points["y"], "SARATHI Fig. 11a" if scheme == "SARATHI" else "_nolegend_")
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel="sequence length (tokens)", ylabel="throughput over the baseline (ratio)", ylim=(0, 1.5))
    return style.finished(figure, f"{MODELLED}; chunk 256, largest batch, balanced P:D")


@style.styled
def measured_accounts(table: pd.DataFrame, machine: str) -> style.BookFigure:
    """A decode here, alone and beside a chunk: rows of `rider_accounts`; error bars are quartiles of rounds."""
    widths = sorted(set(table["fused"]))
    figure, panels = style.new_figure(1, len(widths), height=3.3, sharey=True)
    for panel, fused in zip(panels, widths, strict=True):
        rows = where(table, fused=fused)
        for name, (label, colour) in {"alone": ("alone", "straw_man"), **_ACCOUNTS}.items():
            panel.plot(rows["decodes"], rows[f"{name}_ms"], "o", color=COLOURS[colour], label=label)
        middle, low, high = (rows[f"marginal{which}_ms"] for which in ("", "_low", "_high"))
        spread = np.clip(np.stack([middle - low, high - middle]), 0, None)
        look: dict[str, Any] = {"fmt": "none", "capsize": 3, "color": COLOURS["vllm_chunked"]}
        panel.errorbar(rows["decodes"], middle, yerr=spread, **look)
        panel.set_xlabel("decodes in the batch (requests)")
        style.panel_title(panel, f"{fused} tokens in all")
        panel.set_xticks(sorted(set(rows["decodes"])))
    panels[0].set(ylabel="time of a decode token (ms)", ylim=(0, None))  # once all panels are drawn: they share it
    return style.finished(figure, f"measured: {machine}")
