"""A page of the book and its statements: which fragments state a number or a direction, and which are wrong.

`statements.py` says how statements are written, and checks all pages of a book.
"""

import math
import re
import string
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mooncake_lab.batch.expressions import Records, evaluate, holds, numbers
from mooncake_lab.batch.plan import topic_of
from mooncake_lab.batch.prose import NUMERAL, Passage, numerals, passages, read_page

_WORDY: Final = r"[^\W\d][\w'’-]*(?: [^\W\d][\w'’-]*){0,3}?"
_SCALES: Final = (1.0, 1000.0, 1024.0, 1e6, 1e9)  # 128k tokens, 16 KB


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A fragment of a page, and what its numbers or its direction are computed from."""

    text: str
    values: Mapping[str, str]
    """An expression for each name in braces."""
    holds: tuple[str, ...] = ()
    """Expressions that must be true."""
    measured: bool = False
    """Whether it is another number at each execution, so that no source can be right."""
    fixed: bool = False
    """Whether its numerals are parameters, definitions or arithmetic."""

    def fields(self) -> Iterator[tuple[str, str | None, str]]:
        """The words before each name in braces, the name, and its format; behind the last there is no name."""
        for literal, name, spec, _ in string.Formatter().parse(self.text):
            yield literal, name, spec or ""

    def pattern(self, printed: Mapping[str, str]) -> re.Pattern[str]:
        """What to look for: any number in place of a number, any words in place of words."""
        made = ""
        for literal, name, _ in self.fields():
            made += r"\s+".join(re.escape(word) for word in re.split(r"\s+", literal))
            if name is not None:
                value = printed.get(name, "")
                made += f"((?:{NUMERAL}%?)|{_WORDY})" if not value else f"({_kind(value)})"
        start, end = self.text[:1], self.text[-1:]
        return re.compile((r"(?<!\w)" if start.isalnum() else "") + made + (r"(?!\w)" if end.isalnum() else ""))

    def may_print(self, numeral: str) -> bool:
        """Whether a numeral outside the braces is accounted for: it is a number of the expressions."""
        if self.fixed:
            return True
        try:
            number = abs(float(numeral.replace(",", "").replace("−", "-")))
        except ValueError:  # a number word is no number of an expression; some `holds` has to speak of it
            return bool(self.holds)
        named = {abs(each) for text in (*self.values.values(), *self.holds) for each in numbers(text)}
        return any(abs(number * scale - each) < 1e-9 * max(1, each) for scale in _SCALES for each in named)


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
        self._broken: list[str] = []
        for name, expression in let.items():
            try:
                self._names[name] = evaluate(expression, self._names)
            except ValueError as error:
                self._broken.append(f"{self.name}: in [let], {name} = {error}")
        self.checked = [self._check(statement) for statement in statements]

    def problems(self, *, compare: bool) -> list[str]:
        """What is wrong, one message each.

        Args:
            compare: whether text and records are of the same run.
        """
        found = [
            f"{self.name}: no prose, caption or alternative text has {each.statement.text!r} (any more)"
            for each in self.checked
            if not each.sites
        ]
        if compare:
            found += self._broken
            for each in self.checked:
                found += self._differences(each)
        return found + [
            f"{self.name}, {passage.spot(start)}: {passage.text[start:end]!r} has no statement, in"
            f" {_squeezed(passage.text[slice(*passage.sentence(start))])!r}"
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


def read_statements(path: Path) -> tuple[dict[str, str], list[Statement]]:
    """The names of `[let]` and the statements of a page's file.

    Raises:
        ValueError: naming the file, the entry, and what it lacks.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    if unknown := content.keys() - {"let", "statement", "fixed"}:
        raise ValueError(f"{path} has {', '.join(sorted(unknown))}; allowed are let, statement and fixed")
    statements = [_statement(entry, path) for entry in content.get("statement", [])]
    for entry in content.get("fixed", []):
        statements += _fixed(entry, path)
    return content.get("let", {}), statements


def _statement(entry: Mapping[str, Any], path: Path) -> Statement:
    text, needed = entry.get("text", ""), entry.get("holds", [])
    values = {name: value for name, value in entry.items() if name not in {"text", "holds", "measured"}}
    made = Statement(
        text=_squeezed(text),
        values=values,
        holds=(needed,) if isinstance(needed, str) else tuple(needed),
        measured=entry.get("measured", False),
    )
    try:
        named = {name for _, name, _ in made.fields() if name is not None}
    except ValueError as error:
        raise ValueError(f"{path}: the text {text!r} is no format: {error}") from error
    if not text or named != values.keys():
        raise ValueError(
            f"{path}: {text!r} has {sorted(named)} in braces and expressions for {sorted(values)};"
            " they must be the same"
        )
    if not values and not made.holds:
        raise ValueError(f"{path}: {text!r} states nothing; it needs a number in braces, or `holds`")
    return made


def _fixed(entry: Mapping[str, Any], path: Path) -> list[Statement]:
    texts = entry.get("text", [])
    if set(entry) != {"text", "why"} or not entry["why"].strip() or not isinstance(texts, list):
        raise ValueError(
            f"{path}: [[fixed]] {texts!r} needs `text`, a list, and `why`, a sentence; and nothing else"
        )
    for text in texts:
        if not re.search(r"[^\W\d]", text):
            raise ValueError(f"{path}: the fixed text {text!r} would cover each such number; give it words")
    escaped = (_squeezed(text).replace("{", "{{").replace("}", "}}") for text in texts)
    return [Statement(text=text, values={}, fixed=True) for text in escaped]


def _formatted(value: Any, spec: str, name: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; a page states finite numbers")
    try:
        return format(value, spec)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {value!r} and cannot be printed as {spec!r}: {error}") from error


def _kind(printed: str) -> str:
    return f"{NUMERAL}%?" if re.fullmatch(r"[-+−]?[\d.,]+%?", printed) else _WORDY


def _same(one: str, other: str) -> bool:
    return _squeezed(one).replace("−", "-") == _squeezed(other).replace("−", "-")


def _squeezed(text: str) -> str:
    return " ".join(text.split())
