"""A what-if without a server: bars over a slider, from results that are computed beforehand."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Any, Final

import pandas as pd

from mooncake_lab.figures.overload import LABELS

_PAGE: Final = Template("""<div class="what-if" id="$id">
<p><label for="$id-knob">$label: <output id="$id-value"></output></label><br>
<input id="$id-knob" type="range" min="0" max="$last" step="1" value="$start"
 style="width:100%;max-width:32rem"></p>
<table><caption>$caption</caption><thead><tr><th scope="col">policy</th>$heads</tr></thead>
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
      at("body").rows[i].cells[j + 1].textContent = cell;
    }));
  };
  knob.addEventListener("input", show);
  show();
})();
</script></div>""")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A slider over one knob and a table that follows it; needs no server, and without scripts shows the start."""

    name: str
    """Unique on its page."""
    label: str
    """Of the slider."""
    caption: str
    heads: tuple[str, ...]
    policies: tuple[str, ...]
    points: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    """For each position of the slider, what the knob is there, and a row of texts for each policy."""
    start: int = 0

    def _repr_html_(self) -> str:
        cells = self.points[self.start][1]
        body = "".join(
            f'<tr><th scope="row">{escape(policy)}</th>' + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>"
            for policy, row in zip(self.policies, cells, strict=True)
        )
        data = json.dumps({"points": [{"value": value, "cells": rows} for value, rows in self.points]})
        return _PAGE.substitute(
            id=escape(self.name),
            label=escape(self.label),
            caption=escape(self.caption),
            last=len(self.points) - 1,
            start=self.start,
            heads="".join(f'<th scope="col">{escape(head)}</th>' for head in self.heads),
            body=body,
            data=data.replace("<", "\\u003c"),
        )


def what_if(
    rows: pd.DataFrame, knob: str, label: str, quantities: Mapping[str, tuple[str, str]], *, start: int = 0
) -> WhatIf:
    """A slider from rows of `Overload`.

    Args:
        rows: a policy and value of the knob each.
        knob: its column.
        label: of the slider, with its unit.
        quantities: column and format by the head of a column, e.g. `{"rejected": ("rejected_share", ".0%")}`.
        start: the position it begins with.
    """
    values: Sequence[Any] = sorted(set(rows[knob]))
    policies = tuple(dict.fromkeys(str(policy) for policy in rows["policy"]))
    table = {(row[knob], row["policy"]): row for row in rows.to_dict(orient="records")}
    points = tuple(
        (
            f"{value:g}",
            tuple(
                tuple(format(table[value, policy][column], spec) for column, spec in quantities.values())
                for policy in policies
            ),
        )
        for value in values
    )
    return WhatIf(
        name=f"what-if-{knob.replace('_', '-')}",
        label=label,
        caption="What each policy rejects, wastes and serves at this value.",
        heads=tuple(quantities),
        policies=tuple(LABELS[policy].replace("\n", " ") for policy in policies),
        points=points,
        start=start,
    )
