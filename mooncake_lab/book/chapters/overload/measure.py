"""The whole-trace replays of chapter 11: `data/measured/overload_replays.csv`, one row each.

`python -m mooncake_lab.book.chapters.overload.measure` computes what the file does not hold yet, and adds each row
as soon as it is computed, so it can be stopped at any time. A replay takes four seconds of a processor, and there
are about 800; `--only` names parts. Of the map only rejections and wasted prefill are recorded.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import track

from mooncake_lab.bench.commits import commit
from mooncake_lab.book.chapters.overload.experiment import Overload
from mooncake_lab.book.chapters.overload.recorded import HELD_BACK_TWINS, JUDGED_TWINS, points
from mooncake_lab.book.chapters.overload.replays import (
    DECODE_FACTORS,
    JUDGED_THRESHOLD,
    POINT_A,
    POINT_B,
    POLICIES,
    PREFILL_FACTORS,
    REPLAY,
    TTFT_LIMITS_S,
    fitted_points,
    key_of,
    only_decode_scarce,
    with_policies,
)
from mooncake_lab.book.experiments import vary
from mooncake_lab.core import carried_folder, rare_collections

_SETTING: Final = (
    "workload",
    "twin",
    "decode_nodes",
    "tbt_limit_s",
    "prefill_factor",
    "decode_factor",
    "decode_constant_s",
    "ttft_limit_s",
    "policy",
    "arrival_threshold",
)
_COUNTED: Final = ("requests", "rejected", "rejected_late")
_MEASURED: Final = (
    "wasted_prefill_s",
    "prefill_gpu_s",
    "goodput",
    "prefill_load",
    "decode_load",
    "prefill_swing",
    "decode_swing",
    "correlation",
    "peak_lag_s",
    "arrival_rejected_tokens",
    "late_rejected_tokens",
    "kept_tokens",
)
COLUMNS: Final = (*_SETTING, *_COUNTED, *_MEASURED, "origin", "commit", "date")


def _on(
    twins: Sequence[int], points: Iterable[Overload], threshold: float = JUDGED_THRESHOLD
) -> Iterator[Overload]:
    for point in points:
        for each in vary(point, twin=tuple(twins)):
            yield from with_policies(each, POLICIES, (threshold,))


def _map(twin: int, threshold: float = JUDGED_THRESHOLD) -> Iterator[Overload]:
    """Every second cell first, as on a chess board: half of the map shows its shape."""
    cells = list(product(enumerate(PREFILL_FACTORS), enumerate(DECODE_FACTORS)))
    cells.sort(key=lambda cell: (cell[0][0] + cell[1][0]) % 2)
    for (_, prefill), (_, decode) in cells:
        cell = replace(REPLAY, twin=twin, prefill_factor=prefill, decode_factor=decode)
        for each in vary(cell, ttft_limit_s=TTFT_LIMITS_S):
            yield from with_policies(each, POLICIES[:3], (threshold,))


PARTS: Final[Mapping[str, Callable[[], Iterable[Overload]]]] = {
    "A": lambda: _on(JUDGED_TWINS, [POINT_A]),
    "B": lambda: _on(JUDGED_TWINS, [POINT_B]),
    "fitted": lambda: _on(JUDGED_TWINS, fitted_points()),
    "map": lambda: _map(JUDGED_TWINS[0]),
    "only_decode": lambda: only_decode_scarce(JUDGED_TWINS),
    "held_back": lambda: _on(HELD_BACK_TWINS, points().values()),
    "held_back_map": lambda: _map(HELD_BACK_TWINS[0]),
    "threshold_1": lambda: _on(JUDGED_TWINS, points().values(), 1.0),
    "map_1": lambda: _map(JUDGED_TWINS[0], 1.0),
    "map_0.95": lambda: _map(JUDGED_TWINS[0], 0.95),
}
"""What is replayed, by the name of the part, in order."""


def main(arguments: list[str] | None = None) -> int:
    """Compute the parts that are asked for, one replay after the other."""
    default = carried_folder("measured") / "overload_replays.csv"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=default, help="the CSV file, %(default)s by default")
    parser.add_argument("--only", help="parts, separated by commas; all by default: " + ", ".join(PARTS))
    asked = parser.parse_args(arguments)
    names = asked.only.split(",") if asked.only else list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: no such part; the parts are {', '.join(PARTS)}")
    held = _held(asked.out)
    missing: dict[tuple[str, ...], tuple[Overload, bool]] = {}
    for name in names:
        for each in PARTS[name]():
            if (key := key_of(vars_of(each))) not in held:
                missing.setdefault(key, (each, "map" in name))
    if not asked.out.exists():
        asked.out.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    source, fields = commit() or "unknown", list[str](COLUMNS)
    with asked.out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore", lineterminator="\n")
        for each, of_map in track(list(missing.values()), "replays", console=Console(stderr=True)):
            with rare_collections():
                row = each.rejected() if of_map else next(iter(each.rows()))
            date = datetime.now(UTC).date().isoformat()
            writer.writerow(_as_text({**vars_of(each), **row, "commit": source, "date": date}))
            file.flush()
    return 0


def vars_of(replay: Overload) -> dict[str, Any]:
    """The settings by which a row is found."""
    return {name: getattr(replay, name) for name in _SETTING}


def _held(path: Path) -> set[tuple[str, ...]]:
    if not path.exists():
        return set()
    with path.open(encoding="utf-8", newline="") as file:
        return {key_of(row) for row in csv.DictReader(file)}


def _as_text(row: Mapping[str, Any]) -> dict[str, str]:
    """Six digits are enough for a share, and nothing for what is not there."""
    rounded = {name: f"{row[name]:.6g}" for name in _MEASURED if name in row}
    return {**{name: "" if value is None else str(value) for name, value in row.items()}, **rounded}


if __name__ == "__main__":
    sys.exit(main())
