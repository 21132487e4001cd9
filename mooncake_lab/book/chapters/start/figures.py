"""Figures of the front chapter: the parts, one request's timeline, and a burst with one row per request."""

from collections.abc import Mapping
from typing import Final

import pandas as pd
from matplotlib.patches import FancyBboxPatch, Patch

from mooncake_lab.book.experiments import where
from mooncake_lab.book.figures import style
from mooncake_lab.book.figures.colours import COLOURS

_LOOKS: Final = {
    "wait": ("straw_man_light", ""),
    "prefill": ("prefill", style.HATCHES["prefill"]),
    "hand over": ("transfer", ""),
    "decode": ("decode", style.HATCHES["decode"]),
}
_PARTS: Final = (
    # left, bottom, width, height, colour, what it is called, what it is here
    (0.0, 4.3, 1.9, 1.2, "straw_man_light", "client", "serving.openai_api"),
    (2.7, 4.3, 7.3, 1.2, "mooncake", "Conductor", "conductor: places and admits;\ntracks the blocks of each node"),
    (2.7, 2.6, 3.3, 1.1, "prefill", "prefill instance", "engine.PrefillEngine, own process"),
    (6.7, 2.6, 3.3, 1.1, "decode", "decode instance", "engine.DecodeEngine, own process"),
    (2.7, 1.2, 3.3, 1.0, "dram", "DRAM, SSD: KVCache blocks", "store.TieredStore, only DRAM"),
    (6.7, 1.2, 3.3, 1.0, "dram", "DRAM: KVCache that arrives", "serving.kv_transfer"),
    (2.7, 0.0, 7.3, 0.8, "transfer", "Messenger (Transfer Engine)", "serving.kv_transfer: layer by layer"),
)  # fmt: skip  # a drawing: its measures are its own
_WAYS: Final = (
    # corners, what goes there, where that is written
    (((1.9, 4.9), (1.9, 4.9), (2.7, 4.9)), "prompt", (2.3, 5.05)),
    (((10.0, 3.15), (10.3, 3.15), (10.3, 5.95), (0.95, 5.95), (0.95, 5.5)), "tokens", (5.6, 6.05)),
)
_ARROWS: Final = (
    # from, to, what goes there
    ((4.4, 4.3), (4.4, 3.7), "placement"),
    ((8.4, 4.3), (8.4, 3.7), "placement"),
    ((4.4, 2.2), (4.4, 2.6), "reuse"),
    ((4.4, 1.2), (4.4, 0.8), "stream"),
    ((8.4, 0.8), (8.4, 1.2), ""),
    ((8.4, 2.2), (8.4, 2.6), "load"),
)


@style.styled
def parts(processes: Mapping[str, int]) -> style.BookFigure:
    """The parts of Mooncake (FAST'25 Fig. 2), each with the piece of this package that it became.

    Args:
        processes: of the live cluster, by what runs in them.
    """
    figure, (axes,) = style.new_figure(height=5.4)
    arrow = {"arrowstyle": "-|>", "color": COLOURS["optimum"], "lw": 1.3}
    for left, bottom, width, height, colour, name, here in _PARTS:
        box = FancyBboxPatch(
            (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=COLOURS[colour], alpha=0.28, edgecolor=COLOURS[colour],
        )  # fmt: skip
        axes.add_patch(box)
        middle = left + width / 2
        axes.text(middle, bottom + 0.7 * height, name, ha="center", va="center", fontweight="bold")
        axes.text(middle, bottom + 0.3 * height, here, ha="center", va="center")
    for start, end, word in _ARROWS:
        axes.annotate("", end, start, arrowprops=arrow)
        axes.text((start[0] + end[0]) / 2 + 0.08, (start[1] + end[1]) / 2, word, va="center")
    for corners, word, at in _WAYS:
        *way, last = corners
        axes.plot(*zip(*way, strict=True), color=COLOURS["optimum"], linewidth=1.3)
        axes.annotate("", last, way[-1], arrowprops=arrow)
        axes.text(*at, word, ha="center")
    axes.set(xlim=(0, 10.5), ylim=(-0.15, 6.4))
    axes.set_axis_off()
    listed = ", ".join(f"{name} {pid}" for name, pid in processes.items())
    return style.finished(figure, f"drawn after FAST'25 Fig. 2; processes here: {listed}", legend=False)


@style.styled
def timeline(rows: pd.DataFrame, machine: str) -> style.BookFigure:
    """One request through the cluster: who did what when, and each layer's KVCache on its way.

    Args:
        rows: what `experiment.timeline` made.
        machine: which measured it.
    """
    layers = int(max(rows["layer"])) + 1
    prefill, decode = (where(rows, what=what)["where"].iloc[0] for what in ("prefill", "decode"))
    names = ["Conductor", prefill, *(f"move of layer {k}" for k in range(layers)), decode]
    figure, (axes,) = style.new_figure(height=0.27 * len(names) + 1.9)
    for row in rows.to_dict(orient="records"):
        what, start_ms, end_ms = str(row["what"]), row["start_ms"], row["end_ms"]
        if what == "decide":
            axes.plot(end_ms, names.index("Conductor"), "o", color=COLOURS["mooncake"], clip_on=False)
        elif what in {"FirstToken", "Finished"}:
            word = "first token" if what == "FirstToken" else "last token"
            axes.axvline(start_ms, color=COLOURS["slo"], linestyle=(0, (4, 3)), linewidth=1.1)
            axes.annotate(word, (start_ms, -0.9), xytext=(-4, 0), textcoords="offset points", ha="right")
        else:
            name = f"move of layer {row['layer']}" if what == "move" else row["where"]
            colour, hatch = _LOOKS["hand over" if what == "move" else what]
            axes.barh(
                names.index(name), end_ms - start_ms, left=start_ms, height=0.72, color=COLOURS[colour],
                hatch=hatch, edgecolor="white" if hatch else COLOURS[colour], linewidth=0.8,
            )  # fmt: skip
    style.rows_down(axes, names)
    axes.set(xlabel="time since arrival (ms)", ylim=(len(names) - 0.4, -1.6))
    return style.finished(figure, f"measured: log of a live cluster; {machine}", legend=False)


@style.styled
def burst(rows: pd.DataFrame, machine: str) -> style.BookFigure:
    """Several requests at once, one row per request: waiting, prefill, the hand-over, and every decode step.

    Args:
        rows: what `experiment.lanes` made.
        machine: which measured it.
    """
    requests = sorted(set(rows["request"]))
    figure, (axes,) = style.new_figure(height=0.42 * len(requests) + 1.7)
    for what, (colour, hatch) in _LOOKS.items():
        mine = where(rows, what=what)
        axes.barh(
            [requests.index(key) for key in mine["request"]], mine["end_ms"] - mine["start_ms"],
            left=mine["start_ms"], height=0.7, color=COLOURS[colour], hatch=hatch, edgecolor="white",
            linewidth=0.4,
        )  # fmt: skip
    style.rows_down(axes, [f"request {key}" for key in requests])
    axes.set(xlabel="time since the first arrival (ms)")
    keys = [
        Patch(facecolor=COLOURS[colour], hatch=hatch, edgecolor="white", label=what)
        for what, (colour, hatch) in _LOOKS.items()
    ]
    return style.finished(figure, f"measured: log of a live cluster; {machine}", legend=keys)
