"""The results in the README, written between its marks from what the chapters put on record.

`python -m mooncake_lab.paper.readme README.md book/_generated` refreshes them after `make book`.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from mooncake_lab.paper.scorecard import NOT_EXECUTED, Scorecard, headlines, scorecard

_MARKED: Final = re.compile(r"(?P<begin><!-- results: begin -->\n).*?(?P<end><!-- results: end -->)", re.DOTALL)


class _Made(msgspec.Struct, frozen=True):
    """What the numbers were made from, as the batch wrote it beside them."""

    scale: str
    seed: int
    traces: dict[str, str | None]


def results(records: Path) -> str:
    """The headlines as a Markdown table, the number of claims by verdict, and what they were computed from.

    Args:
        records: the folder with the chapters' `topic.json` and the batch's `provenance.json`.

    Raises:
        ValueError: when nothing was executed there.
    """
    path = records / "provenance.json"
    if not path.is_file():
        raise ValueError(f"{records} holds no numbers; run `make book` first")
    made = msgspec.json.decode(path.read_bytes(), type=_Made)
    card = scorecard(records)
    twins = sorted(name for name, sha256 in made.traces.items() if sha256 is None)
    traces = f"generated twins of the traces {' and '.join(twins)}" if twins else "the released traces"
    top = headlines(card)
    return (
        f"{top.markdown()}\n{top.evidence()} {counted(card)}"
        f" The numbers are those of scale {made.scale}, seed {made.seed} and {traces}.\n"
    )


def counted(card: Scorecard) -> str:
    """The number of claims by verdict, in a sentence or two."""
    totals = card.totals().loc["all"]
    number = totals.pop("claims")
    verdicts = ", ".join(f"*{verdict}* ({count})" for verdict, count in totals.items() if count)
    missing = " Some chapters were not executed; `make book` runs them all." if NOT_EXECUTED in totals else ""
    return f"The book judges {number} claims: {verdicts}.{missing}"


def refreshed(readme: str, records: Path) -> str:
    """A README with the results between its marks made anew.

    Raises:
        ValueError: when there are no marks, or no numbers.
    """
    made = results(records)
    text, count = _MARKED.subn(lambda match: f"{match['begin']}{made}{match['end']}", readme)
    if count != 1:
        raise ValueError(f"a README has one pair of marks '<!-- results: begin -->' and end; this has {count}")
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
