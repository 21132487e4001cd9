"""What stands between marks in pages written by hand: the results in the README, tables of scope and assumptions.

`python -m mooncake_lab.book.paper.pages README.md book/_generated` writes into the README what the chapters put on
record, and `python -m mooncake_lab.book.paper.pages book` writes the tables into both pages of the book.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from mooncake_lab.book.paper.claims import Verdict
from mooncake_lab.book.paper.facts import ScopeItem, assumptions, scope
from mooncake_lab.book.paper.scorecard import NOT_EXECUTED, Scorecard, headlines, rule_rows, scorecard

_RESULTS: Final = re.compile(r"(<!-- results: begin -->\n).*?(<!-- results: end -->)", re.DOTALL)
_TABLE: Final = re.compile(
    r"(^(?:% |<!-- )table: ([^\n]+?)(?: -->)?\n).*?(^(?:% |<!-- )end of table(?: -->)?$)", re.MULTILINE | re.DOTALL
)

EDITIONS: Final = ("FAST'25", "arXiv v3", "SARATHI", "Sarathi-Serve", "Companions")
"""A mark names one of these for a table of its scope, or one of `TABLES`."""

PAGES: Final = ("scope.md", "assumptions.md", "intro.md", "../data/paper/README.md")
"""The pages with such tables, seen from the book's folder."""


def with_tables(page: str) -> str:
    """A page with every table between its marks made anew; the rest as it is.

    Raises:
        ValueError: when a mark names a table that does not exist, or the page has no mark.
    """

    def made(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in (*EDITIONS, *TABLES):
            raise ValueError(f"a page asks for table {name!r}; there are {', '.join((*EDITIONS, *TABLES))}")
        return f"{begin}\n{TABLES[name]() if name in TABLES else scope_table(name)}\n{end}"

    text, count = _TABLE.subn(made, page)
    if count == 0:
        raise ValueError("the page has no line '% table: NAME' with a line '% end of table' after it")
    return text


def scope_table(edition: str) -> str:
    """The scope of one edition as a Markdown table."""
    rows = [(item.item, item.shows, _here(item)) for item in scope() if item.edition == edition]
    return _table([("in the paper", "shows", "in this book"), *rows])


def _here(item: ScopeItem) -> str:
    where = {
        "redrawn": f"redrawn in [{item.chapter}](chapters/{item.chapter}.ipynb)",
        "explained": "not redrawn",
        "not possible": "**not possible**",
    }[item.status]
    return f"{where}; {item.remark}" if item.remark else where


def _assumptions() -> str:
    """All assumptions as a Markdown table with a class, by which `book.css` lays it out on a phone."""
    rows = [(f"{each.id} {each.topic}", each.missing, each.assumption, each.sensitivity) for each in assumptions()]
    return "{.assumptions}\n" + _table([("", "the papers leave open", "we assume", "how much it matters"), *rows])


def _rules() -> str:
    """How agreement is called, as a Markdown table."""
    rows = rule_rows()
    return _table([tuple(rows[0]), *(tuple(row.values()) for row in rows)])


TABLES: Final = MappingProxyType({"assumptions": _assumptions, "kinds of agreement": _rules})
"""The tables that are not the scope of an edition."""


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


class _Made(msgspec.Struct, frozen=True):
    """What the numbers were made from, as the batch wrote it beside them."""

    scale: str
    seed: int
    traces: dict[str, str | None]


def with_results(readme: str, records: Path) -> str:
    """A README with the results between its marks made anew.

    They are the headlines as a Markdown table, the number of claims by verdict, and what they were computed from.

    Raises:
        ValueError: when there are no marks, or no numbers.
    """
    path = records / "provenance.json"
    if not path.is_file():
        raise ValueError(f"{records} holds no numbers; run `make book` first")
    made = msgspec.json.decode(path.read_bytes(), type=_Made)
    card = scorecard(records)
    twins = sorted(name for name, sha256 in made.traces.items() if sha256 is None)
    traces = f"generated twins of the traces {' and '.join(twins)}" if twins else "the released traces"
    top = headlines(card)
    results = (
        f"{top.markdown()}\n{top.evidence()} {counted(card)}"
        f" The numbers are those of scale {made.scale}, seed {made.seed} and {traces}.\n"
    )
    text, count = _RESULTS.subn(lambda match: f"{match[1]}{results}{match[2]}", readme)
    if count != 1:
        raise ValueError(f"a README has one pair of marks '<!-- results: begin -->' and end; this has {count}")
    return text


_GROUPS: Final = (
    ("Predictions that agree", (Verdict.REPRODUCED,)),
    ("Agreement under a named condition", (Verdict.CONDITIONAL,)),
    ("Numbers that do not agree", (Verdict.DIRECTION_ONLY, Verdict.NOT_REPRODUCED)),
    ("Agreement that predicts nothing", (Verdict.BY_CONSTRUCTION, Verdict.CALIBRATED, Verdict.ARITHMETIC)),
)
"""Verdicts that are counted together, the predictions first; all others are not decided."""


def counted(card: Scorecard) -> str:
    """The number of claims by verdict, predictions first, in a few sentences."""
    totals = card.totals().loc["all"]
    number = totals.pop("claims")
    counts = {str(verdict): int(count) for verdict, count in totals.items() if count}
    groups = [(words, [each.value for each in verdicts]) for words, verdicts in _GROUPS]
    decided = {name for _, names in groups for name in names}
    groups.append(("Not decided", [name for name in counts if name not in decided]))
    ours = sum(row.verdict == Verdict.REPRODUCED.value and row.claim.is_of_mooncake for row in card.rows)
    texts = {name: str(count) for name, count in counts.items()}
    texts[Verdict.REPRODUCED.value] = f"{counts.get(Verdict.REPRODUCED.value, 0)}, of which {ours} about Mooncake"
    said = [
        f"{words}: {', '.join(f'*{name}* ({texts[name]})' for name in names if name in counts)}."
        for words, names in groups
        if any(name in counts for name in names)
    ]
    missing = " Some chapters were not executed; `make book` runs them all." if NOT_EXECUTED in counts else ""
    return f"The book judges {number} claims. {' '.join(said)}{missing}"


def main(arguments: Sequence[str]) -> int:
    """The command line: the folder of the book, or a README and a folder of numbers."""

    def rewrite(path: Path, refreshed: Callable[[str], str]) -> None:
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")

    match arguments:
        case [book]:
            for name in PAGES:
                rewrite(Path(book, name), with_tables)
        case [readme, records]:
            rewrite(Path(readme), lambda text: with_results(text, Path(records)))
        case _:
            sys.stderr.write("usage: python -m mooncake_lab.book.paper.pages BOOK | README.md FOLDER_OF_NUMBERS\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
