"""The README's table of the engine's speed, made from a measurement and written between its marks.

`python -m mooncake_lab.engine.speed_table data/measured/cpu_engine.json README.md [MARK]` refreshes it.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
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
_HEAD = ("model", "threads", "case", "tokens/s", "peer", "times the peer", "rounds", "times the floor", "bound by")


def speed_table(found: Mapping[str, Any]) -> str:
    """A measurement of `bench_suite` as Markdown: a sentence on where and when, and a row a case."""
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
    return where + "\n\n" + "\n".join(lines) + "\n"


def refreshed(page: str, found: Mapping[str, Any], *, mark: str = "speed") -> str:
    """A page with the table between its marks, `<!-- speed: begin -->` and `end`, made anew; the rest as it is.

    Raises:
        ValueError: when the page has not exactly one pair of marks.
    """
    marked = re.compile(rf"(?P<begin><!-- {mark}: begin -->\n).*?(?P<end><!-- {mark}: end -->)", re.DOTALL)
    text, count = marked.subn(lambda match: f"{match['begin']}{speed_table(found)}{match['end']}", page)
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
