"""Figures of a GPU, from what `benchmarks/gpu.py` measured: rates, chunks, riders and copies."""

from typing import Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from mooncake_lab.figures.style import (
    COLOURS,
    BookFigure,
    footer,
    legend_above,
    new_figure,
    panel_title,
    plain_number,
    slo_line,
    styled,
)
from mooncake_lab.perf import balanced_ratio

_CONTEXTS: Final = ("size_1", "size_2", "size_3", "size_4")
_LINES: Final = ("-", "--", ":", "-.")


@styled
def rates(decode: pd.DataFrame, prefill: pd.DataFrame, peers: pd.DataFrame, source: str) -> BookFigure:
    """Decode beside the copy, prefill beside the matrix product, and both beside transformers.

    Args:
        decode: batch, context, share_of_copy.
        prefill: tokens, share_of_gemm.
        peers: peer, ratio.
        source: who measured, for the footer.
    """
    figure, (left, middle, right, spare) = new_figure(2, 2, height=5.0, height_ratios=(3, 2))
    spare.remove()
    for (context, table), colour in zip(decode.groupby("context"), _CONTEXTS, strict=False):
        left.plot(
            table["batch"],
            table["share_of_copy"],
            "o-",
            color=COLOURS[colour],
            label=f"{context:g} tokens of context",
        )
    left.set(
        xscale="log",
        xlabel="batch (requests)",
        ylabel="decode, of a copy's bytes (share)",
        ylim=(0, None),
    )
    legend_above(figure)
    slo_line(left, 0.75, "goal 0.75")
    middle.plot(prefill["tokens"], prefill["share_of_gemm"], "o-", color=COLOURS["here"])
    middle.set(
        xscale="log",
        xlabel="prompt (tokens)",
        ylabel="prefill, of a product's FLOPs (share)",
        ylim=(0, None),
    )
    slo_line(middle, 0.65, "goal 0.65")
    right.plot(peers["ratio"], range(len(peers)), "o", color=COLOURS["here"])
    right.set_yticks(range(len(peers)), peers["peer"])
    right.set(xlabel="their time over ours (ratio)", ylabel="transformers (way)", xlim=(0, None))
    right.set_ylim(len(peers) - 0.5, -0.5)
    slo_line(right, 2, "goal 2", vertical=True)
    for panel in (left, middle):
        _plain(panel)
    footer(figure, source)
    return figure


@styled
def chunks(cut: pd.DataFrame, tiles: pd.DataFrame, source: str) -> BookFigure:
    """What chunking a prompt costs, and the time of widths around multiples of a tile (SARATHI Figs. 13 and 7).

    Args:
        cut: prompt, chunk, over_whole.
        tiles: tokens, seconds.
        source: who measured, for the footer.
    """
    figure, (left, right) = new_figure(1, 2, height=4.2)
    left.plot(cut["chunk"], cut["over_whole"], "o-", color=COLOURS["here"])
    left.set(xscale="log", xlabel="chunk (tokens)", ylabel="time over the whole prompt's (ratio)")
    panel_title(left, f"a prompt of {cut['prompt'].iloc[0]:,} tokens")
    _plain(left)
    right.plot(tiles["tokens"], 1e3 * tiles["seconds"], "o", color=COLOURS["here"])
    right.set(xlabel="tokens of an iteration (tokens)", ylabel="time (ms)", ylim=(0, None))
    footer(figure, source)
    return figure


@styled
def riders(hybrid: pd.DataFrame, bursts: pd.DataFrame, source: str) -> BookFigure:
    """A decode alone, by SARATHI's account and by a fair one (Table 2), and the gain over P:D (Fig. 9).

    Args:
        hybrid: chunk, decodes, decode_token_alone_s, decode_token_marginal_s, decode_token_fair_s.
        bursts: ratio, gain, chunk, batch.
        source: who measured, for the footer.
    """
    figure, (left, right) = new_figure(1, 2, height=4.4)
    accounts = (("alone", "straw_man"), ("marginal", "vllm_chunked"), ("fair", "by_tokens"))
    sizes = list(hybrid.groupby("chunk"))
    for (_, table), line in zip(sizes, _LINES, strict=False):
        for account, colour in accounts:
            time_ms = 1e3 * table[f"decode_token_{account}_s"]
            left.plot(table["decodes"], time_ms, "o", linestyle=line, color=COLOURS[colour])
    left.set_yscale("symlog", linthresh=0.1)  # what an iteration grew by may be nothing, or less
    left.set(xscale="log", xlabel="decodes in the iteration (requests)", ylabel="a decode's token (ms)")
    keys = [Line2D([], [], color=COLOURS[colour], marker="o", label=account) for account, colour in accounts]
    keys += [
        Line2D([], [], color=COLOURS["slo"], linestyle=line, label=f"chunk {chunk:g}")
        for (chunk, _), line in zip(sizes, _LINES, strict=False)
    ]
    left.yaxis.set_major_formatter(FuncFormatter(plain_number))
    _plain(left)
    right.plot(bursts["ratio"], bursts["gain"], "o-", color=COLOURS["here"])
    chunk, batch = int(bursts["chunk"].iloc[0]), int(bursts["batch"].iloc[0])
    right.axvline(
        balanced_ratio(chunk, batch), color=COLOURS["optimum"], linestyle=":", label="P:D = (C-(B-1))/(B-1)"
    )
    right.axhline(1, color=COLOURS["slo"], linestyle=(0, (4, 3)), linewidth=1.2)
    right.set(xscale="log", xlabel="P:D ratio (ratio)", ylabel="gain over separate batches (ratio)")
    panel_title(right, f"chunks of {chunk}, {batch} at once")
    legend_above(figure, [*keys, *right.get_legend_handles_labels()[0]])
    _plain(right)
    footer(figure, source)
    return figure


@styled
def copies(moved: pd.DataFrame, hidden: pd.DataFrame, source: str) -> BookFigure:
    """Copies between GPU and pinned DRAM over their peak, and how much of them prefill hides (arXiv Fig. 7).

    Args:
        moved: what, bytes, device_to_host_share, host_to_device_share.
        hidden: operation, moved_tokens, hidden_share.
        source: who measured, for the footer.
    """
    figure, (left, right) = new_figure(1, 2, height=4.2)
    ways = (("device_to_host", "gpu"), ("host_to_device", "dram"))
    for what, marker in (("arena", "o-"), ("cache", "s")):
        table = moved[moved["what"] == what]
        for way, colour in ways:
            label = f"{way.replace('_', ' ')}, {what}"
            left.plot(table["bytes"] / 1e6, table[f"{way}_share"], marker, color=COLOURS[colour], label=label)
    left.set(xscale="log", xlabel="size of a piece (MB)", ylabel="rate over the peak (share)", ylim=(0, None))
    _plain(left)
    for (operation, table), colour in zip(hidden.groupby("operation"), ("dram", "gpu"), strict=True):
        right.plot(table["moved_tokens"], table["hidden_share"], "o-", color=COLOURS[colour], label=str(operation))
    right.set(xlabel="KVCache (tokens)", ylabel="hidden behind prefill (share)")
    right.set_ylim(min(0, *hidden["hidden_share"]) - 0.02, max(1.05, *hidden["hidden_share"]))
    right.set_xticks(sorted(set(hidden["moved_tokens"])))
    legend_above(figure, columns=4)
    for panel in (left, right):
        slo_line(panel, 0.9, "goal 0.9")
    footer(figure, source)
    return figure


def _plain(panel: Axes) -> None:
    panel.xaxis.set_major_formatter(FuncFormatter(plain_number))
    panel.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
