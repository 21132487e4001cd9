"""What a file of statements holds: fragments of a page, and the expressions that their numbers come from.

How such a file is written: see `statements.py`.
"""

import re
import string
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mooncake_lab.book.rendering.expressions import numbers
from mooncake_lab.book.rendering.prose import NUMERAL

_OWN_KEYS: Final = frozenset({"text", "holds", "measured", "instead", "given"})
_WORDY: Final = r"[^\W\d][\w'’-]*(?: [^\W\d][\w'’-]*){0,3}?"
_SCALES: Final = (1.0, 1000.0, 1024.0, 1e6, 1e9)  # 128k tokens, 16 KB


def fields(text: str) -> Iterator[tuple[str, str | None, str]]:
    """The words before each name in braces, the name, and its format; behind the last there is no name."""
    for literal, name, spec, _ in string.Formatter().parse(text):
        yield literal, name, spec or ""


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
    given: tuple[str, ...] = ()
    """Numerals of the text that name what is compared, such as a length of prompts: they are no results."""
    instead: str = ""
    """What is so where it fails, with names in braces as in the text; empty where the deciding values say it."""

    def fields(self) -> Iterator[tuple[str, str | None, str]]:
        """The words before each name in braces, the name, and its format; behind the last there is no name."""
        return fields(self.text)

    def pattern(self, printed: Mapping[str, str]) -> re.Pattern[str]:
        """What to look for: any number in place of a number, any words in place of words."""
        made = ""
        for literal, name, _ in self.fields():
            made += r"\s+".join(re.escape(word) for word in re.split(r"\s+", literal))
            if name is not None:
                value = printed.get(name, "")
                kind = f"{NUMERAL}%?" if re.fullmatch(r"[-+−]?[\d.,]+%?", value) else _WORDY
                made += f"({kind})" if value else f"((?:{NUMERAL}%?)|{_WORDY})"
        start, end = self.text[:1], self.text[-1:]
        return re.compile((r"(?<!\w)" if start.isalnum() else "") + made + (r"(?!\w)" if end.isalnum() else ""))

    def may_print(self, numeral: str) -> bool:
        """Whether a numeral outside the braces is accounted for: it is a number of the expressions."""
        if self.fixed or numeral in self.given:
            return True
        try:
            number = abs(float(numeral.replace(",", "").replace("−", "-")))
        except ValueError:  # a number word is no number of an expression; some `holds` has to speak of it
            return bool(self.holds)
        named = {abs(each) for text in (*self.values.values(), *self.holds) for each in numbers(text)}
        return any(abs(number * scale - each) < 1e-9 * max(1, each) for scale in _SCALES for each in named)


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
    values = {name: value for name, value in entry.items() if name not in _OWN_KEYS}
    made = Statement(
        text=squeezed(text),
        values=values,
        holds=(needed,) if isinstance(needed, str) else tuple(needed),
        measured=entry.get("measured", False),
        given=tuple(entry.get("given", ())),
        instead=squeezed(entry.get("instead", "")),
    )
    try:
        named = {name for said in (made.text, made.instead) for _, name, _ in fields(said) if name is not None}
    except ValueError as error:
        raise ValueError(f"{path}: the text {text!r} is no format: {error}") from error
    if not text or named != values.keys():
        raise ValueError(
            f"{path}: {text!r} has {sorted(named)} in braces and expressions for {sorted(values)};"
            " they must be the same"
        )
    if not made.holds and all(name is None for _, name, _ in made.fields()):
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
    escaped = (squeezed(text).replace("{", "{{").replace("}", "}}") for text in texts)
    return [Statement(text=text, values={}, fixed=True) for text in escaped]


def squeezed(text: str) -> str:
    """One space between words."""
    return " ".join(text.split())
