"""Every number and direction that a page states, held against the record; where they differ, no book is rendered.

    python -m mooncake_lab.book.rendering.statements book [PAGE ...]     check (part of `make book`)
    python -m mooncake_lab.book.rendering.statements book --update [PAGE ...]    write the numbers

**For authors.** The statements of a page are in `book/statements/PAGE.toml`; PAGE is the stem of a notebook or of
a page of the book, or README. The page keeps its plain text; the file says where each number comes from:

    [let]                                   # names for what several statements use
    sent = "demand[~demand.streams_layers & demand.reuses].set_index('gbps')"

    [[statement]]                           # a fragment of the page, with braces in place of its numbers
    text = "{ours:.2f} s at 100 Gbps where the paper has {theirs:.2f}"
    ours = "sent.mean_ttft_s[100]"
    theirs = "fact('fast_fig13_bandwidth', series='TTFT', x=100)"

    [[statement]]                           # a direction, also one that number words state
    text = "layer-wise storing does not"
    holds = "storing.layerwise_s.max() < 0.2 * storing.serialized_s.max()"      # or a list of such

    [[statement]]
    measured = true                         # timed on this machine: another number each time
    text = "{copy:.1f} GB/s through a socket"
    copy = "pick(ways_measured, 'gb_per_s', way='socket', megabytes=64)"

    [[statement]]                           # numerals that only name what is compared
    text = "The share at 128k tokens is {share:.0f} %"
    given = ["128"]
    share = "100 * shares.iloc[-1]"

    [[fixed]]
    why = "parameters of the hand example"
    text = ["Loading one takes 2, computing 3, storing 1"]

    [[statement]]                           # `instead` is said where it fails; else, the values that decide it
    text = "*Random* placement reuses fewer tokens than *load balancing*"
    holds = "reused['random'] < reused['load_balance']"
    instead = "load balancing {balanced:.1f} %, random {random:.1f} %"
    balanced = "100 * reused['load_balance']"
    random = "100 * reused['random']"

A fragment has to occur in the prose, a caption or an alternative text; line breaks do not count. It has to be long
enough to occur only where it is meant. Formats are those of `str.format`; literal braces are doubled.

*Expressions* are Python. Names: the tables of the chapter's record (DataFrames) and its plain values, those of
another chapter as `record('placement').NAME`, `HELPERS` of `expressions.py`, and the names of `shared.toml`: what
two pages state has one condition, there. No part of an expression may be empty, so no condition holds of no rows;
where "none" is meant, write `[...] == []`. A numeral inside a fragment that is not in braces must be a number of
its expressions (100 above); otherwise it is uncovered, and a numeral without cover is an error.

*Runs.* The text of the sources is that of scale classroom and seed 0 with the traces conversation and synthetic.
In any other run the pages get the numbers of its record. A sentence fails where a direction is false, where it
cannot be computed, or where the numbers do not fit the words (`fit.py`). It then keeps the words and numbers of
the source, and behind it stands what is so in this run. Where a third of a section's statements fail, and two at
least, one sentence below its heading says so instead.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mooncake_lab.book.rendering.expressions import Records
from mooncake_lab.book.rendering.prose import Content, read_page, rewrite, write_page
from mooncake_lab.book.rendering.provenance import BOOK_SCALE, BOOK_SEED, BOOK_TRACES, read_provenance
from mooncake_lab.book.rendering.stated_page import SHARED, Page


@dataclass(frozen=True, slots=True)
class Book:
    """Where pages, statements and records are."""

    folder: Path
    records: Records

    def pages(self) -> dict[str, Path]:
        """The pages by name: chapters, the other pages of the book, and the README."""
        root = self.folder.parent
        paths = [
            *sorted((root / "notebooks").glob("*.ipynb")),
            *sorted(self.folder.glob("*.md")),
            root / "README.md",
        ]
        return {path.stem: path for path in paths if path.is_file()}

    def page(self, name: str) -> Page:
        """A page with its statements.

        Raises:
            ValueError: listing the pages there are, when the name is unknown.
        """
        found = self.pages()
        if name not in found:
            raise ValueError(f"there is no page {name!r}; there are {', '.join(found)}")
        return Page(found[name], self.statements(name), self.records)

    def statements(self, name: str) -> Path:
        """The file of a page's statements."""
        return self.folder / "statements" / f"{name}.toml"


def check(book: Book, names: Sequence[str], *, compare: bool) -> list[str]:
    """What is wrong on some pages; on all, and with files that belong to none, when no name is given."""
    pages = book.pages()
    known = {*pages, Path(SHARED).stem}
    files = () if names else sorted((book.folder / "statements").glob("*.toml"))
    orphans = [path for path in files if path.stem not in known]
    found = [f"{path} belongs to no page; there are {', '.join(pages)}" for path in orphans]
    for name in names or pages:
        found += book.page(name).problems(compare=compare)
    return found


def put_prose(source: Path, copy: Path, sidecar: Path, records: Records) -> None:
    """Give an executed copy the words of its source, with the numbers of the records and marks on what is not so.

    Raises:
        ValueError: when the copy has not the cells of the source.
    """
    page = Page(source, sidecar, records)
    rewrite(page.content, page.tell)
    write_page(copy, _merged(page.content, read_page(copy), copy))


def told_page(path: Path, sidecar: Path, records: Records) -> str:
    """A Markdown page as a reader of this run gets it: with its numbers, and marks on what is not so."""
    page = Page(path, sidecar, records)
    rewrite(page.content, page.tell)
    return page.content["cells"][0]["source"]


def _merged(source: Content, executed: Content, copy: Path) -> Content:
    """The executed notebook with the source's Markdown cells and captions."""
    made = {cell["id"]: cell for cell in executed["cells"]}
    cells: list[Content] = []
    for cell in source["cells"]:
        if cell["cell_type"] == "code":
            if cell["id"] not in made:
                raise ValueError(f"{copy} has no cell {cell['id']!r} as its source has; execute it again")
            old = made[cell["id"]]
            described = {"mystnb": cell["metadata"]["mystnb"]} if "mystnb" in cell["metadata"] else {}
            cells.append(old | {"metadata": old["metadata"] | described})
        else:
            cells.append(cell)
        if "parameters" in cell["metadata"].get("tags", []):
            cells += [
                each for each in executed["cells"] if "injected-parameters" in each["metadata"].get("tags", [])
            ]
    return executed | {"cells": cells}


def main(arguments: Sequence[str]) -> int:
    """The command line: check, update, or draft statements."""
    parser = argparse.ArgumentParser(
        prog="python -m mooncake_lab.book.rendering.statements",
        description="Numbers in prose, against the record.",
    )
    parser.add_argument("book", type=Path, help="the book's folder")
    parser.add_argument("pages", nargs="*", help="pages by name; all when left out")
    parser.add_argument("--records", type=Path, help="the chapters' records; BOOK/_generated when left out")
    parser.add_argument(
        "--require-record", action="store_true", help="fail if the record is of another run than the sources"
    )
    parser.add_argument("--update", action="store_true", help="write the record's numbers into the sources")
    told = parser.parse_intermixed_args(arguments)
    records = Records(told.records or told.book / "_generated")
    try:
        return _act(Book(told.book, records), told)
    except ValueError as error:
        sys.stderr.write(f"statements: {error}\n")
        return 2


def _act(book: Book, told: argparse.Namespace) -> int:
    run = read_provenance(book.records.folder)
    compare = run is not None and not run.special
    meant = f"scale {BOOK_SCALE}, seed {BOOK_SEED} and the released traces {' and '.join(BOOK_TRACES)} alone"
    other_run = f"{book.records.folder} is not of {meant}"
    if told.require_record and not compare:
        raise ValueError(f"{other_run}; nothing can be compared with it")
    if told.update:
        pages = [book.page(name) for name in told.pages or book.pages()]
        need = [page.name for page in pages if page.needs_record]
        if need and not compare:
            raise ValueError(f"{other_run}; the sources of {', '.join(need)} state the numbers of such a run")
        for page in pages:
            rewrite(page.content, lambda passage, page=page: page.say(passage, measured=False))
            if write_page(page.path, page.content):
                sys.stderr.write(f"{page.path} was changed\n")
    if not compare:
        sys.stderr.write(f"statements: {other_run}: what follows from it is not compared with the pages\n")
    problems = check(book, told.pages, compare=compare)
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    if problems:
        sys.stderr.write(
            f"\n{len(problems)} to mend. --update writes the record's numbers; {Path(__file__).name} says how.\n"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
