"""The tables of the book's scope and assumptions pages, written into the pages between their marks.

`python -m mooncake_lab.paper.pages book` refreshes both pages. Their prose is written by hand.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mooncake_lab.paper.facts import Assumption, ScopeItem, assumptions, scope

_MARKED = re.compile(
    r"(?P<begin>^% table: (?P<name>[^\n]+)\n).*?(?P<end>^% end of table$)", re.MULTILINE | re.DOTALL
)


def scope_table(edition: str) -> str:
    """The scope of one edition as a Markdown table."""
    rows = [_scope_row(item) for item in scope() if item.edition == edition]
    return _table(("in the paper", "shows", "in this book"), rows)


def assumptions_table(_: str = "assumptions") -> str:
    """All assumptions as a Markdown table with a class, by which `book.css` lays it out on a phone."""
    head = ("", "the papers leave open", "we assume", "how much it matters")
    return "{.assumptions}\n" + _table(head, [_assumption_row(each) for each in assumptions()])


TABLES: Final[Mapping[str, Callable[[str], str]]] = MappingProxyType(
    {
        "FAST'25": scope_table,
        "arXiv v3": scope_table,
        "SARATHI": scope_table,
        "Sarathi-Serve": scope_table,
        "Companions": scope_table,
        "assumptions": assumptions_table,
    }
)
"""What a mark may name, and how its table is made."""

PAGES: Final = ("scope.md", "assumptions.md")
"""The pages with such tables, in the book's folder."""


def refreshed(page: str) -> str:
    """A page with every table between its marks made anew; the rest as it is.

    Raises:
        ValueError: when a mark names a table that does not exist, or the page has no mark.
    """

    def made(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise ValueError(f"a page asks for table {name!r}; there are {', '.join(TABLES)}")
        return f"{match['begin']}\n{TABLES[name](name)}\n{match['end']}"

    text, count = _MARKED.subn(made, page)
    if count == 0:
        raise ValueError("the page has no line '% table: NAME' with a line '% end of table' after it")
    return text


def main(book: Path) -> None:
    """Refresh the tables of the pages in the book's folder."""
    for name in PAGES:
        path = book / name
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")


def _scope_row(item: ScopeItem) -> tuple[str, ...]:
    where = {
        "redrawn": f"redrawn in [{item.chapter}](chapters/{item.chapter}.ipynb)",
        "explained": "not redrawn",
        "not possible": "**not possible**",
    }[item.status]
    return item.item, item.shows, f"{where}; {item.remark}" if item.remark else where


def _assumption_row(each: Assumption) -> tuple[str, ...]:
    return f"{each.id} {each.topic}", each.missing, each.assumption, each.sensitivity


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "book"))
