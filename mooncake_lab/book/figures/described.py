"""The figure and the page of `mooncake-lab trace describe`: turns, prompts that grow, and gaps between uses."""

from html import escape
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS
from mooncake_lab.workload.description import TraceDescription

_MOST_POINTS = 400


@style.styled
def described(told: TraceDescription, source: str) -> style.BookFigure:
    """Three panels: requests of a session, prompts by turn, and the gaps between uses of a block.

    Args:
        told: what is drawn.
        source: of the trace, for the footer.
    """
    figure, (turns, prompts, gaps) = style.new_figure(1, 3, height=3.2)
    sizes, counts = np.unique(told.turn_counts, return_counts=True)
    share = counts[::-1].cumsum()[::-1] / len(told.turn_counts)
    turns.step(sizes, share, where="mid", color=COLOURS["size_4"])
    of_what = "a session" if told.sessions_known else "a session, inferred"
    turns.set(xlabel=f"requests of {of_what}", ylabel="share with at least as many")
    if sizes[-1] > 1:
        style.log_axes(turns)
    if told.prompts_by_turn:
        number, middle, high = np.array(told.prompts_by_turn).T
        prompts.plot(number, middle, color=COLOURS["size_4"], label="median")
        prompts.plot(number, high, "--", color=COLOURS["size_2"], label="90th percentile")
        prompts.set(ylim=(0, None))
    else:
        _said(prompts, "the file names\nno sessions")
    prompts.set(xlabel="turn of a session", ylabel="prompt (tokens)")
    positive = told.gaps_s[told.gaps_s > 0]
    if len(positive):
        places = np.unique(np.linspace(0, len(positive) - 1, _MOST_POINTS).astype(int))
        gaps.plot(positive[places], (places + 1) / len(positive), color=COLOURS["size_4"])
        gaps.set(ylim=(0, 1.05))
        style.log_axes(gaps, "x")
    else:
        text = "no block\nis used twice" if told.unique_blocks is not None else "the file has\nno block ids"
        _said(gaps, text)
    gaps.set(xlabel="time to the next use (s)", ylabel="share of reused blocks")
    rate = told.token_hit_rate_ceiling
    ceiling = "no hit rate follows" if rate is None else f"most that can be reused: {rate:.1%} of prompt tokens"
    return style.finished(figure, f"counted, not simulated; {ceiling}; {source}", columns=3)


def _said(axes: Axes, text: str) -> None:
    """Say in an empty panel why nothing is drawn."""
    axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])


def described_svg(told: TraceDescription, source: str) -> str:
    """The same as SVG."""
    return described(told, source)._repr_svg_()  # pyright: ignore[reportPrivateUsage]  # what a notebook calls


def described_page(name: str, numbers: dict[str, Any], svg: str) -> str:
    """A page that needs nothing else.

    Args:
        name: of the file.
        numbers: by their names, or by the names of spreads and percentiles.
        svg: the figure.
    """
    rows = [
        f"<tr><th>{escape(f'{row} {part}'.strip())}</th><td>{escape(_shown(value))}</td></tr>"
        for row, values in numbers.items()
        for part, value in (values.items() if isinstance(values, dict) else [("", values)])
    ]
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title>'
        "<style>body{font:16px system-ui;max-width:52rem;margin:2rem auto;padding:0 1rem}th{text-align:left;"
        "font-weight:normal;padding-right:2rem}td{text-align:right}svg{max-width:100%;height:auto}</style>"
        f"<h1>{escape(name)}</h1><figure>{svg[svg.index('<svg') :]}</figure>"
        f"<table>{''.join(rows)}</table></html>\n"
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
