"""The verdict table of the README, written between its marks from what the chapters put on record.

`python -m mooncake_lab.paper.readme README.md book/_generated` refreshes it after `make book`.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from mooncake_lab.paper.scorecard import NOT_EXECUTED, scorecard

_MARKED: Final = re.compile(r"(?P<begin><!-- verdicts: begin -->\n).*?(?P<end><!-- verdicts: end -->)", re.DOTALL)


class _Made(msgspec.Struct, frozen=True):
    """What the numbers were made from, as the batch wrote it beside them."""

    scale: str
    seed: int
    traces: dict[str, str | None]


def verdict_table(records: Path) -> str:
    """Judgements by edition and verdict as a Markdown table, and what they were computed from.

    Args:
        records: the folder with the chapters' `topic.json` and the batch's `provenance.json`.

    Raises:
        ValueError: when nothing was executed there.
    """
    path = records / "provenance.json"
    if not path.is_file():
        raise ValueError(f"{records} holds no numbers; run `make book` first")
    made = msgspec.json.decode(path.read_bytes(), type=_Made)
    totals = scorecard(records).totals()
    totals = totals.loc[:, totals.sum() > 0]
    head = ["claims of", *map(str, totals.columns)]
    rows = [
        [str(name), *(str(number) for number in row)]
        for name, row in zip(totals.index, totals.to_numpy(), strict=True)
    ]
    rows[-1] = [f"**{cell}**" for cell in rows[-1]]
    twins = sorted(name for name, sha256 in made.traces.items() if sha256 is None)
    traces = f"twins for {', '.join(twins)}" if twins else "the released traces"
    said = f"Scale {made.scale}, seed {made.seed}, {traces}."
    if NOT_EXECUTED in totals.columns:
        said += " Some chapters were not executed; `make book` runs them all."
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{said}\n"


def refreshed(readme: str, records: Path) -> str:
    """A README with the table between its marks made anew.

    Raises:
        ValueError: when there are no marks, or no numbers.
    """
    table = verdict_table(records)
    text, count = _MARKED.subn(lambda match: f"{match['begin']}{table}{match['end']}", readme)
    if count != 1:
        raise ValueError(f"a README has one pair of marks '<!-- verdicts: begin -->' and end; this has {count}")
    return text


def main(arguments: Sequence[str]) -> int:
    """The command line: a README and a folder of numbers."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m mooncake_lab.paper.readme README.md FOLDER_OF_NUMBERS\n")
        return 2
    path = Path(arguments[0])
    path.write_text(refreshed(path.read_text(encoding="utf-8"), Path(arguments[1])), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
