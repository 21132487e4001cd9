"""A what-if without a server: a slider over results computed beforehand, and a table that follows it."""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Any, Final

import pandas as pd

_PAGE: Final = Template("""<div class="what-if" id="$id">
<p><label for="$id-knob">$label: <output id="$id-value" for="$id-knob">$value</output></label><br>
<input id="$id-knob" type="range" min="0" max="$last" step="1" value="$start" aria-valuetext="$value" hidden
 style="width:100%;max-width:32rem"></p>
<noscript><p>The slider needs JavaScript; without it the table stays at this value.</p></noscript>
<table><caption>$caption</caption><thead><tr><th scope="col">$side</th>$heads</tr></thead>
<tbody id="$id-body">$body</tbody></table>
<script type="application/json" id="$id-data">$data</script>
<script>
(() => {
  const at = (name) => document.getElementById("$id-" + name);
  const data = JSON.parse(at("data").textContent), knob = at("knob");
  const show = () => {
    const point = data.points[knob.value];
    at("value").textContent = point.value;
    knob.setAttribute("aria-valuetext", point.value);
    point.cells.forEach((row, i) => row.forEach((cell, j) => {
      at("body").rows[i].cells[j + 1].lastElementChild.textContent = cell;
    }));
    at("body").querySelectorAll("i").forEach((bar, i) => { bar.style.width = point.bars[i] + "rem"; });
  };
  knob.addEventListener("input", show);
  knob.hidden = false;
  show();
})();
</script></div>""")
_BAR: Final = (
    '<i aria-hidden="true" style="display:inline-block;height:0.7em;margin-right:0.4em;background:currentColor;'
    'opacity:0.55;width:{width}rem"></i>'
)
_LONGEST_BAR_REM: Final = 6.0


@dataclass(frozen=True, slots=True)
class Point:
    """One position of the slider."""

    value: str
    """What the knob is there."""
    cells: tuple[tuple[str, ...], ...]
    """A row of texts for each row of the table."""
    bars: tuple[float, ...] = ()
    """The length in rem of each row's bar, before its first text; none where empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A slider over one knob and a table that follows it; needs no server, and without scripts shows the start."""

    name: str
    """Unique on its page."""
    label: str
    """Of the slider."""
    caption: str
    side: str
    """The head of the rows' names."""
    heads: tuple[str, ...]
    rows: tuple[str, ...]
    points: tuple[Point, ...]
    start: int = 0

    def _repr_html_(self) -> str:
        point = self.points[self.start]
        data = [{"value": each.value, "cells": each.cells, "bars": each.bars} for each in self.points]
        return _PAGE.substitute(
            id=escape(self.name),
            label=escape(self.label),
            value=escape(point.value),
            caption=escape(self.caption),
            side=escape(self.side),
            last=len(self.points) - 1,
            start=self.start,
            heads="".join(f'<th scope="col">{escape(head)}</th>' for head in self.heads),
            body="".join(self._row(point, i) for i in range(len(self.rows))),
            data=json.dumps({"points": data}).replace("<", "\\u003c"),
        )

    def _row(self, point: Point, i: int) -> str:
        bar = _BAR.format(width=point.bars[i]) if point.bars else ""
        cells = [f"<span>{escape(cell)}</span>" for cell in point.cells[i]]
        inner = "".join(f'<td style="white-space:nowrap">{cell}</td>' for cell in [bar + cells[0], *cells[1:]])
        return f'<tr><th scope="row">{escape(self.rows[i])}</th>{inner}</tr>'


def what_if(
    table: pd.DataFrame,
    knob: str,
    label: str,
    quantities: Mapping[str, tuple[str, str]],
    *,
    caption: str,
    side: str = "policy",
    names: Mapping[Any, str] | None = None,
    value: str = "{:g}",
    start: int = 0,
    bars: bool = False,
) -> WhatIf:
    """A slider from results of a sweep.

    Args:
        table: one line for each value of the knob and of `side`.
        knob: the column that the slider moves through.
        label: of the slider, with its unit.
        quantities: column and format by the head of a column, e.g. `{"rejected": ("rejected_share", ".0%")}`.
        caption: what the table shows.
        side: the column that names the rows, and their head.
        names: what to call a row, where the column's own value does not say it well.
        value: the format of the knob's values.
        start: the position it begins with.
        bars: whether the first quantity has a bar beside it, on one scale for all positions.

    Raises:
        ValueError: when a value of the knob lacks a row, or has one twice.
    """
    lines = table.to_dict(orient="records")
    values: Sequence[Any] = sorted(set(table[knob]))
    sides: Sequence[Hashable] = tuple(dict.fromkeys(table[side]))
    found = {(line[knob], line[side]): line for line in lines}
    if not len(found) == len(lines) == len(values) * len(sides):
        raise ValueError(f"{len(lines)} rows; {knob} x {side} needs {len(values)} x {len(sides)}, each once")
    barred = next(iter(quantities.values()))[0]
    scale = _LONGEST_BAR_REM / max([1e-12, *(float(line[barred]) for line in lines)]) if bars else 0.0
    points = tuple(
        Point(
            value.format(at),
            tuple(tuple(format(found[at, row][c], spec) for c, spec in quantities.values()) for row in sides),
            tuple(round(scale * float(found[at, row][barred]), 2) for row in sides) if bars else (),
        )
        for at in values
    )
    return WhatIf(
        name=f"what-if-{knob.replace('_', '-')}",
        label=label,
        caption=caption,
        side=side.replace("_", " "),
        heads=tuple(quantities),
        rows=tuple((names or {}).get(row, str(row)).replace("\n", " ") for row in sides),
        points=points,
        start=start,
    )
