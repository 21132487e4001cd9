"""Figures of the engine: a Gantt chart of every policy, tokens not computed, and a race."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mooncake_lab.figures.style import (
    COLOURS,
    HATCHES,
    BookFigure,
    footer,
    legend_above,
    new_figure,
    panel_title,
    styled,
)

LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "request_level": "FasterTransformer",
        "orca": "Orca",
        "vllm": "vLLM",
        "tensorrt_llm": "TensorRT-LLM",
        "vllm_chunked": "vLLM, chunked prefill",
        "splitfuse": "FastGen (SplitFuse)",
        "sarathi": "SARATHI",
        "sarathi_serve": "Sarathi-Serve",
    }
)
"""What the systems behind the policies are called."""
_LOOKS: Final = MappingProxyType(
    {
        "P": ("prefill", "prefill"),
        "p": ("size_1", "prefill"),
        "d": ("decode", "decode"),
        ".": ("refused_late", "prefill"),
        "w": ("straw_man_light", "prefill"),
    }
)
_MEANING: Final = MappingProxyType(
    {
        "P": "prompt, or its last piece",
        "p": "piece of a prompt",
        "d": "decode",
        ".": "stalls",
        "w": "waits",
    }
)


@styled
def chart(rows: pd.DataFrame) -> BookFigure:
    """One panel a policy, one bar a request, one box an iteration (Sarathi-Serve, OSDI'24, Fig. 7).

    Args:
        rows: rows of `FourRequests`, several policies.
    """
    policies = list(rows.groupby("policy", sort=False))
    figure, axes = new_figure(
        -(-len(policies) // 2), 2, height=1.45 * -(-len(policies) // 2) + 1.1, sharex=True, sharey=True
    )
    for panel, (policy, table) in zip(axes, policies, strict=False):
        _boxes(panel, table)
        panel_title(panel, LABELS[str(policy)])
        arrival_ms = table[table["iteration"] == table["late_after"]]["start_ms"].tolist()[0]
        panel.axvline(arrival_ms, color=COLOURS["slo"], linestyle=(0, (4, 3)), linewidth=1.0)
        panel.grid(visible=False, axis="y")
    axes[0].invert_yaxis()
    for panel in axes[::2]:
        panel.set_ylabel("request (name)")
    for panel in axes[-2:]:
        panel.set_xlabel("time since A and B arrived (ms)")
    keys = [
        Patch(facecolor=COLOURS[colour], hatch=HATCHES[stage], edgecolor="white", label=_MEANING[letter])
        for letter, (colour, stage) in _LOOKS.items()
    ]
    legend_above(figure, keys)
    model = rows["model"].iloc[0]
    footer(figure, f"measured: iteration logs of {model}, random weights; {rows['machine'].iloc[0]}")
    return figure


def _boxes(panel: Axes, table: pd.DataFrame) -> None:
    names = sorted(set(table["request"]))
    for row in table.to_dict(orient="records"):
        if row["letter"] not in _LOOKS:
            continue
        colour, stage = _LOOKS[row["letter"]]
        thin = row["letter"] in ".w"
        panel.barh(
            names.index(row["request"]),
            row["end_ms"] - row["start_ms"],
            left=row["start_ms"],
            height=0.25 if thin else 0.75,
            color=COLOURS[colour],
            hatch=HATCHES[stage],
            edgecolor="none" if thin else "white",
            linewidth=0.6,
        )
    panel.set_yticks(range(len(names)), names)


@styled
def reuse(rows: pd.DataFrame) -> BookFigure:
    """Prompt tokens computed for each question, without and with prefix reuse: rows of `SharedPrefixQuestions`."""
    ways = list(dict.fromkeys(rows["arrive"]))
    figure, axes = new_figure(1, len(ways), height=3.0, sharey=True)
    for panel, arrive in zip(axes, ways, strict=True):
        for shift, on, colour in ((-0.2, False, "straw_man"), (0.2, True, "mooncake")):
            table = rows[(rows["arrive"] == arrive) & (rows["reuse"] == on)]
            label = "with prefix reuse" if on else "without"
            at = [question + shift for question in table["question"].tolist()]
            panel.bar(at, table["computed_tokens"], width=0.38, color=COLOURS[colour], label=label)
        panel_title(panel, f"arriving {arrive}")
        panel.set_xlabel("question (number)")
        panel.set_xticks(sorted(set(rows["question"])))
        panel.grid(visible=False, axis="x")
    axes[0].set_ylabel("prompt tokens computed (tokens)")
    legend_above(figure)
    footer(figure, f"counted: by the engine, {rows['model'].iloc[0]}, seed {rows['seed'].iloc[0]}")
    return figure


@styled
def race(rows: pd.DataFrame) -> BookFigure:
    """How much faster the engine is than transformers' `generate`: rows of `Race`, medians and extremes."""
    figure, (axes,) = new_figure(height=3.0)
    at = range(len(rows))
    axes.hlines(at, rows["least"], rows["most"], color=COLOURS["size_1"], linewidth=3)
    axes.plot(rows["ratio"], at, "o", color=COLOURS["here"])
    axes.axvline(1, color=COLOURS["slo"], linestyle=(0, (4, 3)), linewidth=1.2)
    axes.set(xlim=(0, 1.08 * max(rows["most"])), ylim=(len(rows) - 0.5, -0.5))
    axes.set(xlabel="their time over ours (ratio)", ylabel="case (name)")
    axes.set_yticks(list(at), list(rows["case"]))
    rounds = rows["rounds"].iloc[0]
    footer(
        figure, f"measured: {rows['model'].iloc[0]}, float32, {rounds} paired rounds; {rows['machine'].iloc[0]}"
    )
    return figure
