"""The engine's speed in `benchmarks/README.md` (tables) and `README.md` (one sentence), made from measurements.

`python -m mooncake_lab.bench.speed_table data/measured/cpu_engine.json benchmarks/README.md [MARK]` makes one.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final

PEERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hf": "`generate`",
        "hf-continuous": "transformers' continuous batching",
        "whole": "ours, prompt not cut at 512",
    }
)
"""What peers are called that go by another name than their own."""
MEASURED: Final = ("cpu_engine.json", "cpu_engine_peers.json")
"""Files of `data/measured` that the README's sentence comes from."""
_HEAD = ("model", "threads", "case", "tokens/s", "peer", "times the peer", "rounds", "times the floor", "bound by")


def speed_table(found: Mapping[str, Any]) -> str:
    """A measurement of `engine_suite` as Markdown: a sentence on where and when, and a row a case."""
    machine = found["machine"]
    lines = [
        "| " + " | ".join(cells) + " |" for cells in (_HEAD, ("---",) * len(_HEAD), *map(_row, found["rows"]))
    ]
    skipped = f" Not measured for lack of time: {'; '.join(found['skipped'])}." if found["skipped"] else ""
    beside = "".join(f", {version}" for version in found.get("peers", {}).values())
    where = (
        f"Measured on {machine['processor']}, {machine['cores']} cores, {machine['date']}, torch"
        f" {machine['torch_version']}, transformers {found['transformers']}{beside}, commit {found['commit']},"
        f" load average {found['load_average'][0]:.1f}, by the {found['clock']} clock.{skipped}"
    )
    floors = f" Floors: {found['floors']}." if "floors" in found else ""
    return where + floors + "\n\n" + "\n".join(lines) + "\n"


def refreshed(page: str, found: Mapping[str, Any], *, mark: str = "speed") -> str:
    """A page with the table between its marks, `<!-- speed: begin -->` and `end`, made anew; the rest as it is.

    Raises:
        ValueError: when the page has not exactly one pair of marks.
    """
    return _between_marks(page, mark, speed_table(found))


def speed_sentence(*measurements: Mapping[str, Any]) -> str:
    """How fast the engine is, in one sentence: median and range of the ratios beside each other program."""
    names: Mapping[str, str] = {**PEERS, "hf": "transformers' `generate`"}
    ratios: dict[str, list[float]] = {}
    for found in measurements:
        for row in found["rows"]:
            if row["peer"] != "whole":  # our own engine, set otherwise
                ratios.setdefault(names.get(row["peer"], str(row["peer"])), []).append(row["ratio"])
    beside = "; ".join(f"{peer} {_spread(each)}" for peer, each in ratios.items())
    machine = measurements[0]["machine"]
    return (
        "Our engine's tokens per second over those of other programs, with the same weights on"
        f" {machine['cores']} CPU cores (median and range over the cases, {machine['date']}): {beside}.\n"
    )


def _spread(ratios: Sequence[float]) -> str:
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} (one case)"
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def refresh_readme(root: Path) -> None:
    """Write the sentence into the README of a checkout, from the measurements that it holds."""
    page = root / "README.md"
    text = _between_marks(page.read_text(encoding="utf-8"), "speed", speed_sentence(*measurements(root)))
    page.write_text(text, encoding="utf-8")


def measurements(root: Path) -> list[dict[str, Any]]:
    """What `benchmarks/engine.py` and `benchmarks/engine_peers.py` measured last."""
    folder = root / "data" / "measured"
    return [json.loads((folder / name).read_text(encoding="utf-8")) for name in MEASURED]


def _between_marks(page: str, mark: str, content: str) -> str:
    marked = re.compile(rf"(?P<begin><!-- {mark}: begin -->\n).*?(?P<end><!-- {mark}: end -->)", re.DOTALL)
    text, count = marked.subn(lambda match: f"{match['begin']}{content}{match['end']}", page)
    if count != 1:
        raise ValueError(f"the page has {count} pairs of marks '<!-- {mark}: begin -->' and 'end'; one is needed")
    return text


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['model']} {row['dtype']}",
        str(row["threads"]),
        row["case"],
        f"{row['tokens_per_s']:,.0f}",
        PEERS.get(row["peer"], row["peer"]),
        f"**{row['ratio']:.2f}**",
        f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}" if row["rounds"] > 1 else "1 round",
        f"{row['seconds'] / row['floor_seconds']:.1f}",
        row["bound_by"],
    )


def main(measured: Path, page: Path, mark: str = "speed") -> None:
    """Refresh the table of a page."""
    found = json.loads(measured.read_text(encoding="utf-8"))
    page.write_text(refreshed(page.read_text(encoding="utf-8"), found, mark=mark), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
