"""A page with its statements, computed from the records of one run: what is wrong, and what its reader gets.

How statements are written, and what becomes of those that fail: see `statements.py`.
"""

import html
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from mooncake_lab.book.rendering.expressions import Records, evaluate, holds, unknown_names
from mooncake_lab.book.rendering.fit import Filled, misfits
from mooncake_lab.book.rendering.plan import topic_of
from mooncake_lab.book.rendering.prose import Passage, end_of_sentence, headings, numerals, passages, read_page
from mooncake_lab.book.rendering.provenance import read_provenance
from mooncake_lab.book.rendering.reasons import reason
from mooncake_lab.book.rendering.statement_files import Statement, fields, read_statements, squeezed

SHARED: Final = "shared.toml"
"""The file of names for the statements of all pages."""

_UNIT: Final = re.compile(r" ?(?:%|percentage points|GB/s|Gbps|req/s|tokens|requests|times|ms|s)(?!\w)")
_FAILING_SECTION: Final = 3
"""One part in so many of a section's statements."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a statement occurs: the passage, its span, and the span and name of each number in braces."""

    passage: Passage
    span: tuple[int, int]
    fields: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """A statement in one run: what its numbers are printed as, where it occurs, and what is wrong with it."""

    statement: Statement
    printed: Mapping[str, str]
    sites: tuple[Site, ...]
    error: str
    """Why it cannot be computed; empty where it can."""
    false: tuple[tuple[str, str], ...]
    """The directions that do not hold: each expression, and what it compares."""
    misfits: tuple[str, ...]
    """How its numbers do not fit its words."""

    @property
    def fails(self) -> bool:
        """Whether the words are not those of this run."""
        return bool(self.false or self.error or self.misfits)

    @property
    def differing(self) -> Iterator[tuple[Passage, tuple[int, int], str]]:
        """Each number that the page prints otherwise: the passage, the span, and what it should be."""
        for site in self.sites:
            for start, end, name in site.fields:
                if name in self.printed and not _same(site.passage.text[start:end], self.printed[name]):
                    yield site.passage, (start, end), self.printed[name]

    def numbers(self) -> str:
        """The numbers of the run, each with its unit: `−1 %, 33 %`."""
        site = self.sites[0]
        units = [_UNIT.match(site.passage.text, end) for _, end, _ in site.fields]
        pairs = zip(site.fields, units, strict=True)
        return ", ".join(
            self.printed[name].replace("-", "−", 1) + (unit[0] if unit else "") for (*_, name), unit in pairs
        )


class Page:
    """A page, and its statements computed from the records of one run."""

    def __init__(self, path: Path, sidecar: Path, records: Records) -> None:
        self.path, self.name = path, path.stem
        self.content = read_page(path)
        self._said = list(passages(self.content))
        own, statements = read_statements(sidecar) if sidecar.is_file() else ({}, [])
        shared = read_statements(sidecar.with_name(SHARED))[0] if sidecar.with_name(SHARED).is_file() else {}
        let = _used(shared, _expressions(own, statements)) | own
        self._names = records.names(topic_of(path) if path.suffix == ".ipynb" else "")
        self._run = read_provenance(records.folder)
        self.needs_record = any(unknown_names(each) - let.keys() for each in _expressions(let, statements))
        """Whether anything that it states follows from the record of a run, not from papers and package alone."""
        self._broken: dict[str, str] = {}
        for name, expression in let.items():
            try:
                self._names[name] = evaluate(expression, self._names)
            except ValueError as error:
                self._names.pop(name, None)
                self._broken[name] = f"{self.name}: in [let], {name} = {error}"
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
            found += self._broken.values()
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
                    filled = any(first == start for first, _, _ in site.fields)  # as in "{ten} times"
                    if inside and (filled or each.statement.may_print(site.passage.text[start:end])):
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
        return _edited(
            passage.text, self._numbers(passage, [c for c in self.checked if measured or not c.statement.measured])
        )

    def tell(self, passage: Passage) -> str:
        """A passage as a reader of this run gets it: with its numbers, and marks on what is not so."""
        changes = self._numbers(passage, [each for each in self.checked if not each.fails])
        if passage.part == "alt":
            said = self._said_instead(each for _, each in self._failing(passage))
            return _edited(passage.text, changes) + (f" ({said})" if said else "")
        for at, said in self._section_marks(passage):
            end = "\n" if passage.text[at : at + 2].strip() else ""  # the heading's line is followed by words
            changes[at, at] = f"\n\n{_mark(said)}{end}"
        behind: dict[int, list[Checked]] = {}
        for site, each in self._failing(passage):
            behind.setdefault(end_of_sentence(passage.text, site.span[1]), []).append(each)
        changes |= {(at, at): " " + _mark(self._said_instead(failing)) for at, failing in behind.items()}
        return _edited(passage.text, changes)

    def _numbers(self, passage: Passage, checked: Sequence[Checked]) -> dict[tuple[int, int], str]:
        """The numbers of a passage that some statements print otherwise."""
        found = {span: text for each in checked for where, span, text in each.differing if where == passage}
        signed = {span for span in found if "−" in passage.text[slice(*span)]}
        return {span: text.replace("-", "−", 1) if span in signed else text for span, text in found.items()}

    def _failing(self, passage: Passage) -> list[tuple[Site, Checked]]:
        """The statements of a passage that fail, but for those in sections that have one sentence for all."""
        return [
            (site, each)
            for each in self.checked
            if each.fails
            for site in each.sites
            if site.passage == passage and self._section(passage, site.span[0]) not in self._failing_sections
        ]

    def _said_instead(self, failing: Iterable[Checked]) -> str:
        """What to say behind a sentence that fails; empty where none does."""
        told = list(dict.fromkeys(failing))
        if not told:
            return ""
        instead = "; ".join(dict.fromkeys(filter(None, map(self._instead, told))))
        unknown = all(each.error for each in told)
        where = f"{'Cannot be checked' if unknown else 'Not'} {self._here(told)}"
        return f"{where}: {instead}." if instead else f"{where}."

    def _here(self, told: Iterable[Checked]) -> str:
        """What sets this run apart, as part of a sentence; for what is timed, that is the machine."""
        if all(each.statement.measured for each in told):
            return "on this machine"
        special = self._run.special if self._run else ""
        return f"on this build, {special}" if special else "on this build"

    def _instead(self, each: Checked) -> str:
        """What is so in place of a statement that fails: in its author's words, or the values that decide it."""
        if each.statement.instead and (told := self._filled(each.statement)):
            return told
        if each.error:
            return ""
        reasons = [reason(expression, self._names) for expression, _ in each.false]
        return "; ".join(filter(None, reasons)) or (each.numbers() if each.misfits else "")

    def _filled(self, statement: Statement) -> str:
        """What an author wrote for this case, with the run's numbers; empty where these are missing or unfit."""
        said, numbers = "", list[Filled]()
        try:
            for words, name, spec in fields(statement.instead):
                said += words
                if name is not None:
                    printed = _formatted(evaluate(statement.values[name], self._names), spec, name)
                    numbers.append(Filled(len(said), len(said) + len(printed), printed))
                    said += f"−{printed[1:]}" if printed.startswith("-") else printed
        except ValueError:
            return ""
        return "" if any(misfits(said, numbers)) else said

    def _section(self, passage: Passage, at: int) -> int:
        """The number of the section that a character stands in; 0 above the first heading."""
        return bisect_right(self._headings, (self._place[passage], at))

    @cached_property
    def _place(self) -> dict[Passage, int]:
        return {passage: i for i, passage in enumerate(self._said)}

    @cached_property
    def _headings(self) -> list[tuple[int, int]]:
        """Where each section begins: the number of the passage, and the end of the heading's line."""
        return [(i, at) for i, said in enumerate(self._said) if said.part == "text" for at in headings(said.text)]

    @cached_property
    def _failing_sections(self) -> dict[int, list[Checked]]:
        """The statements of each section that has one sentence for all that fail."""
        there: dict[int, dict[Checked, None]] = {}
        for each in self.checked:
            for site in each.sites:
                if each.statement.fixed or site.passage.part == "alt":  # which no reader of the page sees
                    continue
                there.setdefault(self._section(site.passage, site.span[0]), {})[each] = None
        return {
            section: list(group)
            for section, group in there.items()
            if section
            and (failing := [each for each in group if each.fails])[1:]
            and _FAILING_SECTION * len(failing) >= len(group)
        }

    def _section_marks(self, passage: Passage) -> Iterator[tuple[int, str]]:
        """Where the sentence for a whole section goes, and the sentence."""
        for section, group in self._failing_sections.items():
            where, at = self._headings[section - 1]
            if self._said[where] == passage:
                failing = [each for each in group if each.fails]
                share = f"{len(failing)} of the {len(group)} statements" if failing != group else "The statements"
                fail = "cannot be checked" if all(each.error for each in failing) else "do not hold"
                yield at, f"{share} of this section {fail} {self._here(failing)}."

    def _check(self, statement: Statement) -> Checked:
        printed: dict[str, str] = {}
        false: list[tuple[str, str]] = []
        error = ""
        try:
            for _, name, spec in statement.fields():
                if name is not None:
                    printed[name] = _formatted(self._evaluated(statement.values[name]), spec, name)
            for expression in statement.holds:
                self._evaluated(expression)
                so, shown = holds(expression, self._names)
                if not so:
                    false.append((expression, shown))
        except ValueError as problem:
            error = str(problem)
        pattern = statement.pattern(printed)
        names = [name for _, name, _ in statement.fields() if name is not None]
        sites = tuple(
            Site(passage, found.span(), tuple((*found.span(i), name) for i, name in enumerate(names, 1)))
            for passage in self._said
            for found in pattern.finditer(passage.text)
        )
        return Checked(
            statement, printed, sites, error, tuple(false), () if error else _misfits(statement, printed, sites)
        )

    def _evaluated(self, expression: str) -> Any:
        for name in unknown_names(expression) & self._broken.keys():
            raise ValueError(self._broken[name])
        return evaluate(expression, self._names)

    def _differences(self, each: Checked) -> Iterator[str]:
        text = each.statement.text
        if each.error:
            yield f"{self.name}: the statement {text!r} cannot be checked: {each.error}"
        if each.statement.measured:
            return
        where = f"{self.name}, {each.sites[0].passage.spot(each.sites[0].span[0])}" if each.sites else self.name
        for _, false in each.false:
            yield f"{where}: {text!r} does not hold: {false}"
        for wrong in each.misfits:
            yield f"{where}: {text!r} makes no sense with the record's numbers: {wrong}"
        for passage, (start, end), printed in each.differing:
            yield (
                f"{self.name}, {passage.spot(start)}: the page says {passage.text[start:end]}, the record gives"
                f" {printed}, in {text!r}"
            )


def _formatted(value: Any, spec: str, name: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; a page states finite numbers")
    try:
        text = format(value, spec)
        return text.lstrip("-") if re.fullmatch(r"-[0.]+%?", text) else text
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {value!r} and cannot be printed as {spec!r}: {error}") from error


def _expressions(let: Mapping[str, str], statements: Sequence[Statement]) -> list[str]:
    own = (text for each in statements for text in (*each.values.values(), *each.holds))
    return [*let.values(), *own]


def _used(shared: Mapping[str, str], expressions: Iterable[str]) -> dict[str, str]:
    """The shared names that some expressions need, and those that these need, in the order of their file."""
    needed: set[str] = set()
    left = {name for text in expressions for name in unknown_names(text)} & shared.keys()
    while left:
        needed |= left
        left = ({name for each in left for name in unknown_names(shared[each])} & shared.keys()) - needed
    return {name: text for name, text in shared.items() if name in needed}


def _misfits(statement: Statement, printed: Mapping[str, str], sites: Sequence[Site]) -> tuple[str, ...]:
    signed = {name for _, name, spec in statement.fields() if spec.startswith("+")}
    return tuple(
        wrong
        for site in sites
        for wrong in misfits(
            site.passage.text,
            [Filled(start, end, printed[name], name in signed) for start, end, name in site.fields],
        )
    )


def _edited(text: str, changes: Mapping[tuple[int, int], str]) -> str:
    for (start, end), put in sorted(changes.items(), reverse=True):
        text = text[:start] + put + text[end:]
    return text


def _mark(said: str) -> str:
    """A mark as HTML, which notebooks and pages show alike; none of its characters means anything in Markdown."""
    plain = re.sub(r"[*_`|$\[\]\\{}~]", lambda found: f"&#{ord(found[0])};", html.escape(said, quote=False))
    return f'<span class="not-here">{plain}</span>'


def _same(one: str, other: str) -> bool:
    return squeezed(one).replace("−", "-") == squeezed(other).replace("−", "-")
