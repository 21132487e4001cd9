"""A draft of statements: sentences with uncovered numerals, and what on record or in the papers prints as them."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any, Final

import pandas as pd

from mooncake_lab import paper
from mooncake_lab.batch.chapters import tables
from mooncake_lab.batch.checked_page import Page
from mooncake_lab.batch.expressions import Records
from mooncake_lab.batch.plan import topic_of
from mooncake_lab.batch.prose import Passage
from mooncake_lab.paper.scorecard import TABLE

_SHOWN: Final = 6
_RATIO: Final = 4.0
_RATIO_ROWS: Final = 40
"""Ratios are looked for in columns of tables up to this length; a longer one has any ratio."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A number somewhere, the expression that finds it, and the words that go with it."""

    number: float
    expression: str
    words: frozenset[str]
    cost: float = 0.0
    """How far-fetched it is."""
    needs: int = 0
    """How many words the sentence must share with it."""


def suggested(page: Page, records: Records) -> Iterator[str]:
    """TOML, one draft a sentence; the candidates of each numeral, the likeliest first, as comments."""
    known = [*_recorded(records, topic_of(page.path)), *_of_papers()]
    sentences: dict[tuple[Passage, tuple[int, int]], list[tuple[int, int]]] = {}
    for passage, span in page.uncovered():
        sentences.setdefault((passage, passage.sentence(span[0])), []).append(span)
    unknown: list[str] = []
    for (passage, sentence), spans in sentences.items():
        text, drafts = _draft(passage, sentence, spans, known)
        if any("=" in draft.partition("#")[0] for draft in drafts):
            yield "\n".join(
                [f"# {passage.spot(spans[0][0])}", "[[statement]]", f"text = {_quoted(text)}", *drafts, ""]
            )
        else:
            unknown += [f"  # {passage.spot(spans[0][0])} {' '.join(drafts)}", f"  {_quoted(_unescaped(text))},"]
    if unknown:
        yield "\n".join(
            [
                "# nothing on record prints as these: parameters, directions (`holds`), or not recorded yet",
                "[[fixed]]",
                'why = ""',
                "text = [",
                *unknown,
                "]",
            ]
        )


def _draft(
    passage: Passage, sentence: tuple[int, int], spans: list[tuple[int, int]], known: list[_Value]
) -> tuple[str, list[str]]:
    """A sentence with braces, and for each numeral its expressions."""
    begin, end = sentence
    shared = _words(passage.text[begin:end])
    text, drafts = "", list[str]()
    for number, (left, right) in enumerate(spans):
        numeral, name = passage.text[left:right], chr(ord("a") + number % 26)
        found = _candidates(numeral, passage.text[right:], known, shared) if re.search(r"\d", numeral) else []
        text += _escaped(passage.text[begin:left]) + (f"{{{name}:{_spec(numeral)}}}" if found else numeral)
        begin = right
        drafts += (
            [f'{name} = "{found[0]}"', *(f"#   {each}" for each in found[1:])] if found else [f"# {numeral}?"]
        )
    return " ".join((text + _escaped(passage.text[begin:end])).split()), drafts


def _candidates(numeral: str, behind: str, known: Iterable[_Value], said: frozenset[str]) -> list[str]:
    target = float(numeral.replace(",", "").replace("−", "-"))
    places = len(numeral.partition(".")[2])
    digits = len(re.sub(r"\D", "", numeral).strip("0"))
    is_small = places == 0 and abs(target) < 100  # everything has such numbers
    is_ratio = bool(re.match(r"\s*(?:times|x\b|×|%|percent|fold|to one)", behind))
    found: dict[str, float] = {}
    for value in known:
        shared = len(value.words & said)
        if shared < (0 if digits > 2 else value.needs + is_small) or (value.cost >= _RATIO and not is_ratio):
            continue
        for number, wrap, cost in _forms(value.number, behind):
            if round(number, places) == target and (number != 0 or target == 0):
                rank = cost + value.cost - shared
                expression = wrap.format(value.expression)
                found[expression] = min(rank, found.get(expression, math.inf))
    best = min(found.values(), default=0.0)
    likely = [each for each in found if found[each] <= min(1.0, best + 2)]
    return sorted(likely, key=lambda each: (found[each], len(each)))[:_SHOWN]


def _forms(number: float, behind: str) -> Iterator[tuple[float, str, float]]:
    """The number itself, as a percentage, in thousands, in milliseconds, and what is left of one."""
    percent = bool(re.match(r"\s*(?:%|percent)", behind))
    yield number, "{}", 0.0
    yield 100 * number, "100 * {}", 0.0 if percent else 3.0
    yield 1000 * number, "1000 * {}", 0.5 if re.match(r"\s*ms", behind) else 3.0
    yield number / 1000, "{} / 1000", 0.5 if re.match(r"k|,000", behind) else 3.0
    if percent:
        yield 100 * (number - 1), "100 * ({} - 1)", 1.0
        yield 100 * (1 - number), "100 * (1 - {})", 1.0


def _recorded(records: Records, topic: str) -> Iterator[_Value]:
    path = records.folder / f"{topic}.json"
    if not path.is_file():
        return
    for name, table in tables(path).items():
        if name == "values":
            for key, number in zip(table["name"], table["value"], strict=True):
                if isinstance(number, (int, float)) and not isinstance(number, bool):
                    yield _Value(float(number), str(key), _words(str(key)))
        else:
            yield from _of_table(name, table) if name != TABLE else _judged(table)


def _judged(table: pd.DataFrame) -> Iterator[_Value]:
    for quantity, claim, number in table[["quantity", "claim", "ours"]].itertuples(index=False):
        if pd.notna(number):
            alone = (table["claim"] == claim).sum() == 1
            found = f"ours({claim!r})" if alone else f"pick({TABLE}, 'ours', quantity={quantity!r})"
            yield _Value(float(number), found, _words(f"ours {quantity}"))


def _of_table(name: str, table: pd.DataFrame) -> Iterator[_Value]:
    keys = [each for each in map(str, table.columns) if all(map(_is_key, table[each]))]
    for column in map(str, table.columns):
        if not pd.api.types.is_numeric_dtype(table[column]) or pd.api.types.is_bool_dtype(table[column]):
            continue
        cells = (_of_cell(name, table, column, row, keys) for row in range(len(table)))
        values = [cell for cell in cells if cell is not None and not math.isnan(cell.number)]
        yield from values
        for what in ("min", "max", "mean", "median", "sum"):
            number = float(getattr(table[column], what)())
            yield _Value(number, f"{name}[{column!r}].{what}()", _words(f"{name} {column} {what}"), 1.5)
        if len(values) <= _RATIO_ROWS:
            for one, other in permutations(values, 2):
                if other.number:
                    both = one.words | other.words
                    yield _Value(
                        one.number / other.number, f"({one.expression} / {other.expression})", both, _RATIO
                    )


def _of_cell(name: str, table: pd.DataFrame, column: str, row: int, keys: list[str]) -> _Value | None:
    """One cell, found by as few other columns as tell its row from the rest; None where none do."""
    here = table.iloc[row]
    others = [key for key in keys if key != column and key.isidentifier() and len(set(table[key])) > 1]
    others.sort(key=lambda key: not isinstance(here[key], str))
    told = _words(" ".join([name, column, *(f"{key} {here[key]}" for key in others)]))
    for size in range(1, min(4, len(others)) + 1):
        for chosen in combinations(others, size):
            if (table[[*chosen]] == here[[*chosen]]).all(axis=1).sum() == 1:
                where = ", ".join(f"{key}={_plain(here[key])!r}" for key in chosen)
                return _Value(float(here[column]), f"pick({name}, {column!r}, {where})", told)
    return None


def _is_key(cell: Any) -> bool:
    return isinstance(cell, (str, bool, int)) or (isinstance(cell, float) and cell.is_integer())


def _of_papers() -> Iterator[_Value]:
    for claim in paper.claims():
        yield _Value(
            claim.fact.value,
            f"paper({claim.id!r})",
            _words(f"paper {claim.sentence} {claim.fact.place}"),
            0.5,
            needs=1,
        )
    for assumption in paper.assumptions():
        if assumption.value is not None:
            yield _Value(
                assumption.value, f"assumption({assumption.id!r})", _words(assumption.topic), 0.5, needs=1
            )
    for name in map(str, paper.index().index):
        if "cdf" in name:  # points of a curve, which no statement cites
            continue
        table = paper.curve(name)
        for series, x, y in table[["series", "x", "y"]].itertuples(index=False):
            told = _words(f"paper {name} {series} {x}")
            yield _Value(float(y), f"fact({name!r}, series={series!r}, x={_plain(x)!r})", told, 0.5, needs=2)


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]{3,}|\d+(?:\.\d+)?", text.lower().replace("_", " ")))


def _spec(numeral: str) -> str:
    plus = "+" if numeral[0] == "+" else ""
    return f"{plus}{',' if ',' in numeral else ''}.{len(numeral.partition('.')[2])}f"


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _unescaped(text: str) -> str:
    return text.replace("{{", "{").replace("}}", "}")


def _quoted(text: str) -> str:
    if "\\" not in text and '"' not in text:
        return f'"{text}"'
    return f"'{text}'" if "'" not in text else f"'''{text}'''"
