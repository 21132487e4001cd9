"""Every number and direction that a page states, held against the record; where they differ, no book is rendered.

    python -m mooncake_lab.batch.statements book [PAGE ...]      check (part of `make book`)
    python -m mooncake_lab.batch.statements book --update [PAGE ...]     write the numbers into the sources

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

    [[fixed]]
    why = "parameters of the hand example"
    text = ["Loading one takes 2, computing 3, storing 1"]

A fragment has to occur in the prose, a caption or an alternative text; line breaks do not count. It has to be long
enough to occur only where it is meant. Formats are those of `str.format`; literal braces are doubled.

*Expressions* are Python. Names: the tables of the chapter's record (DataFrames) and its plain values, those of
another chapter as `record('placement').NAME`, and `HELPERS` of `expressions.py`. A numeral inside a fragment that
is not in braces must be a number of its expressions (100 above); otherwise it is uncovered, and a numeral without
cover is an error.

*Runs.* The text of the sources is that of scale classroom and seed 0 with the traces conversation and synthetic.
In any other run the executed copies get the numbers of their own record, and a direction that is false there gets
a note on the page.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_lab.batch.expressions import Records, evaluate, holds, unknown_names
from mooncake_lab.batch.plan import topic_of
from mooncake_lab.batch.prose import Content, Passage, numerals, passages, read_page, rewrite, write_page
from mooncake_lab.batch.provenance import BOOK_TRACES, read_provenance
from mooncake_lab.batch.statement_files import Statement, read_statements, squeezed


@dataclass(frozen=True, slots=True)
class Site:
    """Where a statement occurs: the passage, its span, and the span and name of each number in braces."""

    passage: Passage
    span: tuple[int, int]
    fields: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """A statement in one run: what its numbers are printed as, where it occurs, and what is wrong with it."""

    statement: Statement
    printed: Mapping[str, str]
    sites: tuple[Site, ...]
    error: str
    """Why it cannot be computed; empty where it can."""
    false: tuple[str, ...]
    """The directions that do not hold."""

    @property
    def text(self) -> str:
        """The fragment with the numbers of the run; dots where a number is missing."""
        fields = self.statement.fields()
        return "".join(words + (self.printed.get(name, "…") if name else "") for words, name, _ in fields)

    @property
    def differing(self) -> Iterator[tuple[Passage, tuple[int, int], str]]:
        """Each number that the page prints otherwise: the passage, the span, and what it should be."""
        for site in self.sites:
            for start, end, name in site.fields:
                if name in self.printed and not _same(site.passage.text[start:end], self.printed[name]):
                    yield site.passage, (start, end), self.printed[name]


class Page:
    """A page, and its statements computed from the records of one run."""

    def __init__(self, path: Path, sidecar: Path, records: Records) -> None:
        self.path, self.name = path, path.stem
        self.content = read_page(path)
        self._said = list(passages(self.content))
        let, statements = read_statements(sidecar) if sidecar.is_file() else ({}, [])
        self._names = records.names(topic_of(path) if path.suffix == ".ipynb" else "")
        expressions = [
            *let.values(),
            *(text for each in statements for text in (*each.values.values(), *each.holds)),
        ]
        self.needs_record = any(unknown_names(each) - let.keys() for each in expressions)
        """Whether anything that it states follows from the record of a run, not from papers and package alone."""
        self._broken: list[str] = []
        for name, expression in let.items():
            try:
                self._names[name] = evaluate(expression, self._names)
            except ValueError as error:
                self._broken.append(f"{self.name}: in [let], {name} = {error}")
        self.checked = [self._check(statement) for statement in statements]

    def problems(self, *, compare: bool) -> list[str]:
        """What is wrong, one message each; `compare` where text and records are of the same run.

        Numbers that follow from no record are always compared.
        """
        found = [
            f"{self.name}: no prose, caption or alternative text has {each.statement.text!r} (any more)"
            for each in self.checked
            if not each.sites
        ]
        if compare or not self.needs_record:
            found += self._broken
            for each in self.checked:
                found += self._differences(each)
        return found + [
            f"{self.name}, {passage.spot(start)}: {passage.text[start:end]!r} has no statement, in"
            f" {squeezed(passage.text[slice(*passage.sentence(start))])!r}"
            for passage, (start, end) in self.uncovered()
        ]

    def uncovered(self) -> list[tuple[Passage, tuple[int, int]]]:
        """The numerals that no statement accounts for."""
        covered: dict[tuple[Passage, int], int] = {}
        for each in self.checked:
            for site in each.sites:
                spans = [(start, end) for start, end, _ in site.fields]
                for start, end in numerals(site.passage.text):
                    inside = site.span[0] <= start and end <= site.span[1]
                    if inside and each.statement.may_print(site.passage.text[start:end]):
                        spans.append((start, end))
                covered |= {(site.passage, at): 1 for start, end in spans for at in range(start, end)}
        return [
            (passage, (start, end))
            for passage in self._said
            for start, end in numerals(passage.text)
            if any((passage, at) not in covered for at in range(start, end))
        ]

    def say(self, passage: Passage, *, measured: bool) -> str:
        """A passage with the numbers of the record, with or without those that are measured at each execution."""
        changes = {
            span: text
            for each in self.checked
            if measured or not each.statement.measured
            for where, span, text in each.differing
            if where == passage
        }
        text = passage.text
        for (start, end), printed in sorted(changes.items(), reverse=True):
            signed = printed.replace("-", "−", 1) if "−" in text[start:end] else printed
            text = text[:start] + signed + text[end:]
        return text

    def notes(self, passage: Passage) -> list[str]:
        """What to say below a passage of the executed copy: the directions that are not so in this run."""
        below: list[str] = []
        for each in self.checked:
            if any(site.passage == passage for site in each.sites) and (each.false or each.error):
                what = "does not hold" if each.false else "cannot be checked"
                below.append(f"In this run {what}: “{each.text}”.")
        return below

    def _check(self, statement: Statement) -> Checked:
        printed: dict[str, str] = {}
        false: list[str] = []
        error = ""
        try:
            for _, name, spec in statement.fields():
                if name is not None:
                    printed[name] = _formatted(evaluate(statement.values[name], self._names), spec, name)
            outcomes = [holds(expression, self._names) for expression in statement.holds]
            false = [shown for so, shown in outcomes if not so]
        except ValueError as problem:
            error = str(problem)
        pattern = statement.pattern(printed)
        names = [name for _, name, _ in statement.fields() if name is not None]
        sites = tuple(
            Site(passage, found.span(), tuple((*found.span(i), name) for i, name in enumerate(names, 1)))
            for passage in self._said
            for found in pattern.finditer(passage.text)
        )
        return Checked(statement, printed, sites, error, tuple(false))

    def _differences(self, each: Checked) -> Iterator[str]:
        text = each.statement.text
        if each.error:
            yield f"{self.name}: the statement {text!r} cannot be checked: {each.error}"
        if each.statement.measured:
            return
        where = f"{self.name}, {each.sites[0].passage.spot(each.sites[0].span[0])}" if each.sites else self.name
        for false in each.false:
            yield f"{where}: {text!r} does not hold: {false}"
        for passage, (start, end), printed in each.differing:
            yield (
                f"{self.name}, {passage.spot(start)}: the page says {passage.text[start:end]}, the record gives"
                f" {printed}, in {text!r}"
            )


def _formatted(value: Any, spec: str, name: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; a page states finite numbers")
    try:
        return format(value, spec)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {value!r} and cannot be printed as {spec!r}: {error}") from error


def _same(one: str, other: str) -> bool:
    return squeezed(one).replace("−", "-") == squeezed(other).replace("−", "-")


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
    orphans = (
        [] if names else sorted(p for p in (book.folder / "statements").glob("*.toml") if p.stem not in pages)
    )
    found = [f"{path} belongs to no page; there are {', '.join(pages)}" for path in orphans]
    for name in names or pages:
        found += book.page(name).problems(compare=compare)
    return found


def put_prose(source: Path, copy: Path, sidecar: Path, records: Records) -> None:
    """Give an executed copy the words of its source, with the numbers of the records and notes on what is not so.

    Raises:
        ValueError: when the copy has not the cells of the source.
    """
    page = Page(source, sidecar, records)
    notes = {passage: " ".join(page.notes(passage)) for passage in passages(page.content)}

    def said(passage: Passage) -> str:
        text, note = page.say(passage, measured=True), notes[passage]
        if not note:
            return text
        return f"{text}\n\n:::{{warning}}\n{note}\n:::\n" if passage.part == "text" else f"{text} ({note})"

    rewrite(page.content, said)
    write_page(copy, _merged(page.content, read_page(copy), copy))


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
        prog="python -m mooncake_lab.batch.statements", description="Numbers in prose, against the record."
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
    found = {name for name, sha in run.traces.items() if sha is not None} if run else None
    compare = run is not None and (run.scale, run.seed, found) == ("classroom", 0, {*BOOK_TRACES})
    names = " and ".join(BOOK_TRACES)
    other_run = f"{book.records.folder} is not of scale classroom, seed 0 and the released traces {names} alone"
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
        sys.stderr.write(f"statements: {other_run}: of what follows from it, only the form is checked\n")
    problems = check(book, told.pages, compare=compare)
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    if problems:
        sys.stderr.write(
            f"\n{len(problems)} to mend. --update writes the record's numbers; {Path(__file__).name} says how.\n"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
