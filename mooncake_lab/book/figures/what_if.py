"""A what-if without a server: a slider over results computed beforehand, and a plot that follows it.

Each quantity has a panel: lines over the knob, one for each side (a policy, say). The slider moves a cursor
through all panels, and beside the lines are the values there. Without scripts the plot stays at the start.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from mooncake_lab.book.figures.colours import COLOURS, css_property
from mooncake_lab.book.figures.embed import embedded
from mooncake_lab.core.extras import naming_extra

with naming_extra("figures"):
    import numpy as np
    import pandas as pd
    from matplotlib.ticker import LogLocator, MaxNLocator

_WIDTH, _HEIGHT = 360, 226
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 246, 30, 186
"""Edges of a panel's plot in CSS pixels; names and values are to the right of it."""
_APART: Final = 27
"""Between labels of two lines each."""
_LONGEST_NAME: Final = 17
"""Characters beside a line, on a phone too."""
_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")


@dataclass(frozen=True, slots=True)
class Panel:
    """A quantity's lines, in pixels."""

    head: str
    texts: tuple[tuple[str, ...], ...]
    """For each side, the value at each position of the slider."""
    ys: tuple[tuple[float, ...], ...]
    ticks: tuple[tuple[float, str], ...]
    reference: float | None = None
    """Where a horizontal line is drawn."""

    def labels(self) -> list[list[float]]:
        """Where each side's label is at each position: near its value, and apart from the others."""
        columns = [_apart(column, _APART, _TOP + 6, _BOTTOM - 6) for column in zip(*self.ys, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A slider over one knob and panels that follow it; needs no server, and without scripts shows the start."""

    name: str
    """Unique on its page."""
    label: str
    """Label of the slider."""
    caption: str
    values: tuple[str, ...]
    """What the knob is at each position."""
    sides: tuple[str, ...]
    colours: tuple[str, ...]
    """For each side, a name in `COLOURS`."""
    panels: tuple[Panel, ...]
    start: int = 0

    def _repr_html_(self) -> str:
        knob, value = f"{escape(self.name)}-knob", escape(self.values[self.start])
        panels = "".join(self._svg(panel) for panel in self.panels)
        return (
            f'<div class="what-if" id="{escape(self.name)}"><p class="what-if-knob">'
            f'<label for="{knob}">{escape(self.label)}: <output for="{knob}">{value}</output></label>'
            f'<input id="{knob}" type="range" min="0" max="{len(self.values) - 1}" step="1" value="{self.start}"'
            f' aria-valuetext="{value}" hidden></p>'
            "<noscript><p>The slider needs JavaScript; without it the plot stays at this value.</p></noscript>"
            f'<div class="what-if-panels">{panels}</div><p class="what-if-caption">{escape(self.caption)}</p>'
            f'<script type="application/json">{self._data()}</script></div>'
            + embedded("widgets.css", "what_if.js")
        )

    def _data(self) -> str:
        panels = [
            {
                "head": panel.head,
                "sides": [
                    {"texts": texts, "ys": ys, "labels": labels}
                    for texts, ys, labels in zip(panel.texts, panel.ys, panel.labels(), strict=True)
                ],
            }
            for panel in self.panels
        ]
        data = {"values": self.values, "sides": self.sides, "xs": self._xs(), "edge": _RIGHT, "panels": panels}
        return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")

    def _xs(self) -> list[float]:
        """The positions of the slider, evenly spaced whatever the knob's values."""
        step = (_RIGHT - _LEFT - 16) / max(1, len(self.values) - 1)
        return [round(_LEFT + 8 + i * step, 1) for i in range(len(self.values))]

    def _svg(self, panel: Panel) -> str:
        xs, labels = self._xs(), panel.labels()
        grid = "".join(
            f'<path class="grid" d="M{_LEFT} {y}H{_RIGHT}"/><text class="tick" x="{_LEFT - 5}" y="{y + 4}"'
            f' text-anchor="end">{text}</text>'
            for y, text in panel.ticks
        )
        stride = -(-sum(len(value) + 2 for value in self.values) * 7 // (_RIGHT - _LEFT))
        below = "".join(
            f'<text class="tick" x="{x}" y="{_BOTTOM + 15}" text-anchor="middle">{escape(value)}</text>'
            for x, value in list(zip(xs, self.values, strict=True))[::stride]
        )
        rule = "" if panel.reference is None else f'<path class="rule" d="M{_LEFT} {panel.reference}H{_RIGHT}"/>'
        sides = "".join(self._side(panel, i, xs, labels[i]) for i in range(len(self.sides)))
        x = xs[self.start]
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(self._described(panel))}">'
            f'<text class="head" x="2" y="14">{escape(panel.head)}</text>{grid}{rule}{below}'
            f'<text class="tick" x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 34}" text-anchor="middle">'
            f'{escape(self.label)}</text><line class="cursor" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_BOTTOM}"/>'
            f"{sides}</svg>"
        )

    def _side(self, panel: Panel, i: int, xs: Sequence[float], labels: Sequence[float]) -> str:
        ys, at = panel.ys[i], self.start
        line = "L".join(f"{x} {y}" for x, y in zip(xs, ys, strict=True))
        meaning = self.colours[i]
        colour = f"var({css_property(meaning)}, {COLOURS[meaning]})"
        return (
            f'<g class="side" style="--side: {colour}"><path class="line" d="M{line}"'
            f' stroke-dasharray="{_DASHES[i % len(_DASHES)]}"/>'
            f'<path class="leader" d="M{xs[at]} {ys[at]}L{_RIGHT} {labels[at]}"/>'
            f'<circle cx="{xs[at]}" cy="{ys[at]}" r="4"/>'
            f'<text y="{labels[at]}"><tspan x="{_RIGHT + 5}" dy="-1">{escape(self.sides[i])}</tspan>'
            f'<tspan class="value" x="{_RIGHT + 5}" dy="13">{escape(panel.texts[i][at])}</tspan></text></g>'
        )

    def _described(self, panel: Panel) -> str:
        ends = ", ".join(
            f"{side} from {texts[0]} to {texts[-1]}" for side, texts in zip(self.sides, panel.texts, strict=True)
        )
        return f"{panel.head} by {self.label}, from {self.values[0]} to {self.values[-1]}: {ends}."


def what_if(
    table: pd.DataFrame,
    knob: str,
    label: str,
    quantities: Mapping[str, tuple[str, str]],
    *,
    caption: str,
    side: str = "policy",
    names: Mapping[Any, str] | None = None,
    colours: Mapping[Any, str] | None = None,
    value: str = "{:g}",
    start: int = 0,
    reference: float | None = None,
) -> WhatIf:
    """A slider from results of a sweep.

    Args:
        table: one line for each value of the knob and of `side`.
        knob: the column that the slider moves through.
        label: of the slider, with its unit.
        quantities: column and format by the head of a panel, e.g. `{"rejected": ("rejected_share", ".0%")}`.
        caption: what the panels show.
        side: the column that names the lines.
        names: what to call a line, where the column's own value does not say it well.
        colours: the meaning of each line's colour, a name in `COLOURS`; grey where it is not given.
        value: the format of the knob's values.
        start: the position it begins with.
        reference: a ratio at which a horizontal line is drawn; the panels are then logarithmic.

    Raises:
        ValueError: when a value of the knob lacks a line, or has one twice, or a name is too long.
    """
    values: Sequence[Any] = sorted(set(table[knob]))
    sides: Sequence[Any] = tuple(dict.fromkeys(table[side]))
    found = {(line[knob], line[side]): line for line in table.to_dict(orient="records")}
    if not len(found) == len(table) == len(values) * len(sides):
        raise ValueError(f"{len(table)} rows; {knob} x {side} needs {len(values)} x {len(sides)}, each once")
    called = tuple((names or {}).get(row, str(row)).replace("\n", " ") for row in sides)
    for name in called:
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"the name {name!r} is too long; {_LONGEST_NAME} characters fit beside a line")
    grids = {
        head: [[float(found[at, row][column]) for at in values] for row in sides]
        for head, (column, _) in quantities.items()
    }
    return WhatIf(
        name=f"what-if-{knob.replace('_', '-')}",
        label=label,
        caption=caption,
        values=tuple(value.format(at) for at in values),
        sides=called,
        colours=tuple((colours or {}).get(row, "straw_man") for row in sides),
        panels=tuple(_panel(head, grids[head], spec, reference) for head, (_, spec) in quantities.items()),
        start=start,
    )


def _panel(head: str, grid: Sequence[Sequence[float]], spec: str, reference: float | None) -> Panel:
    """Place a quantity's values, on a linear scale from zero or, around a reference, on a logarithmic one."""
    flat = [number for row in grid for number in row]
    texts = tuple(tuple(format(number, spec) for number in row) for row in grid)
    if reference is None:
        at = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(min(0.0, *flat), max(1e-12, *flat))
        low, high, scale = float(at[0]), float(at[-1]), float
    else:
        low, high, scale = math.log10(min(*flat, reference)), math.log10(max(*flat, reference)), math.log10
        at = [tick for tick in LogLocator().tick_values(10**low, 10**high) if low <= math.log10(tick) <= high]

    def place(number: float) -> float:
        return round(_BOTTOM - (scale(number) - low) / max(high - low, 1e-12) * (_BOTTOM - _TOP), 1)

    percent = spec.endswith("%")
    ticks = tuple((place(float(tick)), f"{tick:.0%}" if percent else f"{tick:g}") for tick in np.asarray(at))
    ys = tuple(tuple(place(number) for number in row) for row in grid)
    return Panel(head, texts, ys, ticks, None if reference is None else place(reference))


def _apart(ys: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near these, in their order, at least `gap` apart, and between two edges where there is room."""
    order = sorted(range(len(ys)), key=lambda i: ys[i])
    placed = [0.0] * len(ys)
    top = low
    for i in order:
        placed[i] = max(ys[i], top)
        top = placed[i] + gap
    bottom = max(high, low + gap * (len(ys) - 1))
    for i in reversed(order):
        placed[i] = round(min(placed[i], bottom), 1)
        bottom = placed[i] - gap
    return placed
