"""Second turns of conversations in a live cluster: what loading a prefix takes, and how much of it is hidden."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd

from mooncake_lab.bench.machine import Machine
from mooncake_lab.core import carried_folder

_KEPT: Final = carried_folder("measured") / "second_turn.json"
_PREFIX_IN: Final[Mapping[str, str]] = MappingProxyType(
    {"dram": "DRAM", "ssd": "SSD", "worker": "other worker", "remote": "pool", "mooncake": "Mooncake pool"}
)
_SECOND_TURN: Final = [
    "prefix_in", "second_turn_ms", "least_ms", "most_ms", "recomputed_ms", "predicted_ms", "error_percent",
    "read_ms", "hidden_percent", "same_tokens",
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SecondTurns:
    """Second turns of conversations in a live cluster, kept from a run of `benchmarks/second_turn.py`."""

    table: pd.DataFrame
    """One row a place of the prefix: prefix_in, second_turn_ms, least_ms, most_ms, recomputed_ms, predicted_ms,
    error_percent (of the prediction), read_ms, hidden_percent and same_tokens. What was not measured is NaN."""
    tokens: int
    """Of the prefix."""
    new_tokens: int
    """Behind it."""
    made: str
    """Machine, date, commit and load average of the run."""

    def shown(self) -> pd.DataFrame:
        """Whole milliseconds and percent by place; a cell is empty where nothing was measured."""
        columns = ["recomputed_ms", "second_turn_ms", "predicted_ms", "read_ms", "hidden_percent"]
        cells = {name: [_whole(number) for number in self.table[name].to_list()] for name in columns}
        return pd.DataFrame(cells, index=pd.Index(self.table["prefix_in"]))


def second_turns(path: Path = _KEPT) -> SecondTurns:
    """TTFT of a second turn by the place of its prefix, beside recomputation and the model's prediction.

    Raises:
        ValueError: when the file has no row.
    """
    kept = json.loads(path.read_text("utf-8"))
    if not kept["rows"]:
        raise ValueError(f"{path} has no row; benchmarks/second_turn.py writes one for each place")
    rows = [
        {"prefix_in": _PREFIX_IN[row["place"]], **row, "hidden_percent": _percent(row["hidden_share"])}
        for row in kept["rows"]
    ]
    machine = Machine(**kept["machine"])
    made = (
        f"kept: {machine}, commit {kept['commit']}, load average {kept['load_average'][0]:.1f},"
        f" {kept['rounds']} round{'' if kept['rounds'] == 1 else 's'}"
    )
    return SecondTurns(pd.DataFrame(rows, columns=_SECOND_TURN), kept["tokens"], kept["new_tokens"], made)


def _percent(share: float | None) -> float:
    return np.nan if share is None else 100 * share


def _whole(number: float) -> str:
    return "" if np.isnan(number) else f"{number:.0f}"
