"""Figures of the real store: TTFT by tier over a conversation, and the bandwidth from which on reuse pays."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import pandas as pd

from mooncake_lab.figures.style import COLOURS, BookFigure, footer, legend_above, new_figure, plain_number, styled

_TIERS: Final[Mapping[str, tuple[str, str, str]]] = MappingProxyType(
    {
        "none": ("computed anew", COLOURS["straw_man"], "-"),
        "dram": ("from DRAM", COLOURS["dram"], "-"),
        "ssd": ("from SSD", COLOURS["ssd"], "-"),
        "tcp": ("from another process, TCP", COLOURS["remote"], "--"),
    }
)
_LINES: Final = (":", "-.", "--")


@styled
def tiers(
    turns: pd.DataFrame, tried: pd.DataFrame, crossing: float | None, asked: Mapping[str, str]
) -> BookFigure:
    """TTFT of each turn by tier, and recompute over reuse by the bandwidth of the tier.

    Args:
        turns: rows of `Conversation`.
        tried: rows of `BreakEven`.
        crossing: the measured break-even (MB/s), if there is one.
        asked: what Eq. 2 asks for: columns of `tried` and their names.
    """
    figure, (left, right) = new_figure(1, 2, height=3.6)
    for tier, rows in turns.groupby("tier", sort=False):
        label, colour, style = _TIERS[str(tier)]
        left.fill_between(rows["prompt_tokens"], rows["least_ms"], rows["most_ms"], color=colour, alpha=0.15, lw=0)
        left.plot(rows["prompt_tokens"], rows["ttft_ms"], "o", linestyle=style, color=colour, label=label)
    left.set(xlabel="prompt of the turn (tokens)", ylabel="TTFT (ms)")
    left.set_ylim(bottom=0)
    right.plot(tried["mb_per_s"], tried["ratio"], "o-", color=COLOURS["here"], label="time ratio, measured")
    right.axhline(1, color=COLOURS["slo"], linewidth=1)
    for (column, label), style in zip(asked.items(), _LINES, strict=False):
        right.axvline(tried[column].to_list()[0], color=COLOURS["optimum"], linestyle=style, lw=1.4, label=label)
    if crossing is not None:
        right.plot([crossing], [1], "o", color=COLOURS["latency"], markersize=8, label="measured break-even")
    right.set(
        xscale="log",
        yscale="log",
        xlabel="bandwidth of the tier (MB/s)",
        ylabel="time of computing\nover reusing (ratio)",
    )
    right.set_yticks([0.2, 0.5, 1, 2, 5])
    right.minorticks_off()
    right.xaxis.set_major_formatter(plain_number)
    right.yaxis.set_major_formatter(plain_number)
    legend_above(figure, columns=3)
    footer(
        figure, f"measured: medians of few rounds, shaded from fastest to slowest; {turns['machine'].to_list()[0]}"
    )
    return figure
