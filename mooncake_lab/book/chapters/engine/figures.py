"""Figures of the engine: a Gantt chart of every policy, tokens not computed, and a race."""

from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS

LABELS: Final = {
    "request_level": "FasterTransformer",
    "orca": "Orca",
    "vllm": "vLLM",
    "tensorrt_llm": "TensorRT-LLM",
    "vllm_chunked": "vLLM, chunked prefill",
    "splitfuse": "FastGen (SplitFuse)",
    "sarathi": "SARATHI",
    "sarathi_serve": "Sarathi-Serve",
}
"""What the systems behind the policies are called."""
_LOOKS: Final = {
    "P": ("prefill", "", "prompt, or its last piece"),
    "p": ("size_1", "", "piece of a prompt"),
    "d": ("decode", "///", "decode"),
    ".": ("refused_late", "", "stalls"),
    "w": ("straw_man_light", "", "waits"),
}
"""Colour, hatch and meaning of the letters of `batching.gantt`."""


@style.styled
def chart(rows: pd.DataFrame) -> style.BookFigure:
    """One panel a policy, one bar a request, one box an iteration (Sarathi-Serve, OSDI'24, Fig. 7).

    Args:
        rows: rows of `FourRequests`, several policies.
    """
    policies = list(rows.groupby("policy", sort=False))
    lines = -(-len(policies) // 2)
    figure, axes = style.new_figure(lines, 2, height=1.45 * lines + 1.1, sharex=True, sharey=True)
    for panel, (policy, table) in zip(axes, policies, strict=False):
        _boxes(panel, table)
        style.panel_title(panel, LABELS[str(policy)])
        arrival_ms = table.loc[table["iteration"] == table["late_after"], "start_ms"].min()
        panel.axvline(arrival_ms, color=COLOURS["slo"], linestyle=(0, (4, 3)), linewidth=1.0)
        panel.grid(visible=False, axis="y")
    axes[0].invert_yaxis()
    for panel in axes[::2]:
        panel.set_ylabel("request (name)")
    for panel in axes[-2:]:
        panel.set_xlabel("time since A and B arrived (ms)")
    keys = [
        Patch(facecolor=COLOURS[colour], hatch=hatch, edgecolor="white", label=meaning)
        for colour, hatch, meaning in _LOOKS.values()
    ]
    source = f"measured: iteration logs of {rows['model'].iloc[0]}, random weights; {rows['machine'].iloc[0]}"
    return style.finished(figure, source, legend=keys)


def _boxes(panel: Axes, table: pd.DataFrame) -> None:
    names = sorted(set(table["request"]))
    for letter, (colour, hatch, _) in _LOOKS.items():
        mine, thin = where(table, letter=letter), letter in ".w"
        panel.barh(
            [names.index(name) for name in mine["request"]], mine["end_ms"] - mine["start_ms"],
            left=mine["start_ms"], height=0.25 if thin else 0.75, color=COLOURS[colour], hatch=hatch,
            edgecolor="none" if thin else "white", linewidth=0.6,
        )  # fmt: skip
    panel.set_yticks(range(len(names)), names)


@style.styled
def reuse(rows: pd.DataFrame) -> style.BookFigure:
    """Prompt tokens computed for each question, without and with prefix reuse: rows of `SharedPrefixQuestions`."""
    ways = list(dict.fromkeys(rows["arrive"]))
    figure, axes = style.new_figure(1, len(ways), height=3.0, sharey=True)
    for panel, arrive in zip(axes, ways, strict=True):
        for shift, on, colour in ((-0.2, False, "straw_man"), (0.2, True, "mooncake")):
            table, label = where(rows, arrive=arrive, reuse=on), "with prefix reuse" if on else "without"
            look: dict[str, Any] = {"width": 0.38, "color": COLOURS[colour], "label": label}
            panel.bar(table["question"] + shift, table["computed_tokens"], **look)
        style.panel_title(panel, f"arriving {arrive}")
        panel.set_xlabel("question (number)")
        panel.set_xticks(sorted(set(rows["question"])))
        panel.grid(visible=False, axis="x")
    axes[0].set_ylabel("prompt tokens computed (tokens)")
    source = f"counted: by the engine, {rows['model'].iloc[0]}, seed {rows['seed'].iloc[0]}"
    return style.finished(figure, source)


@style.styled
def race(rows: pd.DataFrame) -> style.BookFigure:
    """How much faster the engine is than transformers' `generate`: rows of `Race`, medians and extremes."""
    figure, (axes,) = style.new_figure(height=3.0)
    at = range(len(rows))
    axes.hlines(at, rows["least"], rows["most"], color=COLOURS["size_1"], linewidth=3)
    axes.plot(rows["ratio"], at, "o", color=COLOURS["here"])
    axes.axvline(1, color=COLOURS["slo"], linestyle=(0, (4, 3)), linewidth=1.2)
    axes.set(xlim=(0, 1.08 * max(rows["most"])), ylim=(len(rows) - 0.5, -0.5))
    axes.set(xlabel="their time over ours (ratio)", ylabel="case (name)")
    axes.set_yticks(list(at), list(rows["case"]))
    first = rows.iloc[0]
    source = f"measured: {first['model']}, float32, {first['rounds']} paired rounds; {first['machine']}"
    return style.finished(figure, source, legend=False)
