"""Figures of a GPU, from what `benchmarks/gpu.py` measured: rates, chunks, riders and copies."""

from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS
from mooncake_lab.perf import balanced_ratio

_CONTEXTS: Final = ("size_1", "size_2", "size_3", "size_4")
_LINES: Final = ("-", "--", ":", "-.")


@style.styled
def rates(decode: pd.DataFrame, prefill: pd.DataFrame, peers: pd.DataFrame, source: str) -> style.BookFigure:
    """Decode beside the copy, prefill beside the matrix product, and both beside transformers.

    Args:
        decode: batch, context, share_of_copy.
        prefill: tokens, share_of_gemm.
        peers: peer, ratio.
        source: who measured, for the footer.
    """
    figure, (left, middle, right, spare) = style.new_figure(2, 2, height=5.0, height_ratios=(3, 2))
    spare.remove()
    for (context, table), colour in zip(decode.groupby("context"), _CONTEXTS, strict=False):
        look: dict[str, Any] = {"color": COLOURS[colour], "label": f"{context:g} tokens of context"}
        left.plot(table["batch"], table["share_of_copy"], "o-", **look)
    left.set(xlabel="batch (requests)", ylabel="decode, of a copy's bytes (share)", ylim=(0, None))
    style.slo_line(left, 0.75, "goal 0.75")
    middle.plot(prefill["tokens"], prefill["share_of_gemm"], "o-", color=COLOURS["here"])
    middle.set(xlabel="prompt (tokens)", ylabel="prefill, of a product's FLOPs (share)", ylim=(0, None))
    style.slo_line(middle, 0.65, "goal 0.65")
    right.plot(peers["ratio"], range(len(peers)), "o", color=COLOURS["here"])
    right.set_yticks(range(len(peers)), peers["peer"])
    right.set(xlabel="their time over ours (ratio)", ylabel="transformers (way)", xlim=(0, None))
    right.set_ylim(len(peers) - 0.5, -0.5)
    style.slo_line(right, 2, "goal 2", vertical=True)
    for panel in (left, middle):
        _log(panel)
    return style.finished(figure, source)


@style.styled
def chunks(cut: pd.DataFrame, tiles: pd.DataFrame, source: str) -> style.BookFigure:
    """What chunking a prompt costs, and the time of widths around multiples of a tile (SARATHI Figs. 13 and 7).

    Args:
        cut: prompt, chunk, over_whole.
        tiles: tokens, seconds.
        source: who measured, for the footer.
    """
    figure, (left, right) = style.new_figure(1, 2, height=4.2)
    left.plot(cut["chunk"], cut["over_whole"], "o-", color=COLOURS["here"])
    left.set(xlabel="chunk (tokens)", ylabel="time over the whole prompt's (ratio)")
    style.panel_title(left, f"a prompt of {cut['prompt'].iloc[0]:,} tokens")
    _log(left)
    right.plot(tiles["tokens"], 1e3 * tiles["seconds"], "o", color=COLOURS["here"])
    right.set(xlabel="tokens of an iteration (tokens)", ylabel="time (ms)", ylim=(0, None))
    return style.finished(figure, source, legend=False)


@style.styled
def riders(hybrid: pd.DataFrame, bursts: pd.DataFrame, source: str) -> style.BookFigure:
    """A decode alone, by SARATHI's account and by a fair one (Table 2), and the gain over P:D (Fig. 9).

    Args:
        hybrid: chunk, decodes, decode_token_alone_s, decode_token_marginal_s, decode_token_fair_s.
        bursts: ratio, gain, chunk, batch.
        source: who measured, for the footer.
    """
    figure, (left, right) = style.new_figure(1, 2, height=4.4)
    accounts = (("alone", "straw_man"), ("marginal", "vllm_chunked"), ("fair", "by_tokens"))
    keys = [Line2D([], [], color=COLOURS[colour], marker="o", label=account) for account, colour in accounts]
    for (chunk, table), line in zip(hybrid.groupby("chunk"), _LINES, strict=False):
        keys.append(Line2D([], [], color=COLOURS["slo"], linestyle=line, label=f"chunk {chunk:g}"))
        for account, colour in accounts:
            time_ms = 1e3 * table[f"decode_token_{account}_s"]
            left.plot(table["decodes"], time_ms, "o", linestyle=line, color=COLOURS[colour])
    left.set_yscale("symlog", linthresh=0.1)  # what an iteration grew by may be nothing, or less
    left.yaxis.set_major_formatter(style.plain_number)
    left.set(xlabel="decodes in the iteration (requests)", ylabel="a decode's token (ms)")
    right.plot(bursts["ratio"], bursts["gain"], "o-", color=COLOURS["here"])
    chunk, batch = int(bursts["chunk"].iloc[0]), int(bursts["batch"].iloc[0])
    look: dict[str, Any] = {"color": COLOURS["optimum"], "linestyle": ":", "label": "P:D = (C-(B-1))/(B-1)"}
    right.axvline(balanced_ratio(chunk, batch), **look)
    right.axhline(1, color=COLOURS["slo"], linestyle=(0, (4, 3)), linewidth=1.2)
    right.set(xlabel="P:D ratio (ratio)", ylabel="gain over separate batches (ratio)")
    style.panel_title(right, f"chunks of {chunk}, {batch} at once")
    for panel in (left, right):
        _log(panel)
    return style.finished(figure, source, legend=[*keys, *right.get_legend_handles_labels()[0]])


@style.styled
def copies(moved: pd.DataFrame, hidden: pd.DataFrame, source: str) -> style.BookFigure:
    """Copies between GPU and pinned DRAM over their peak, and how much of them prefill hides (arXiv Fig. 7).

    Args:
        moved: what, bytes, device_to_host_share, host_to_device_share.
        hidden: operation, moved_tokens, hidden_share.
        source: who measured, for the footer.
    """
    figure, (left, right) = style.new_figure(1, 2, height=4.2)
    for what, marker in (("arena", "o-"), ("cache", "s")):
        table = where(moved, what=what)
        for way, colour in (("device_to_host", "gpu"), ("host_to_device", "dram")):
            look: dict[str, Any] = {"color": COLOURS[colour], "label": f"{way.replace('_', ' ')}, {what}"}
            left.plot(table["bytes"] / 1e6, table[f"{way}_share"], marker, **look)
    left.set(xlabel="size of a piece (MB)", ylabel="rate over the peak (share)", ylim=(0, None))
    _log(left)
    for (operation, table), colour in zip(hidden.groupby("operation"), ("dram", "gpu"), strict=True):
        look = {"color": COLOURS[colour], "label": str(operation)}
        right.plot(table["moved_tokens"], table["hidden_share"], "o-", **look)
    right.set(xlabel="KVCache (tokens)", ylabel="hidden behind prefill (share)")
    right.set_ylim(min(0, *hidden["hidden_share"]) - 0.02, max(1.05, *hidden["hidden_share"]))
    right.set_xticks(sorted(set(hidden["moved_tokens"])))
    for panel in (left, right):
        style.slo_line(panel, 0.9, "goal 0.9")
    return style.finished(figure, source, columns=4)


def _log(panel: Axes) -> None:
    style.log_axes(panel, "x")
    panel.xaxis.set_minor_formatter(NullFormatter())
