"""What a page's statements are computed from: the records of the chapters, the papers, and a few functions.

An expression is refused where some part of it selects nothing. Else "all rows agree" would hold of no rows, and a
mean of nothing, which is NaN, would be below nothing and above nothing.
"""

import ast
import importlib
import math
import operator
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
import pandas as pd

from mooncake_lab.book import paper
from mooncake_lab.book.paper.scorecard import TABLE
from mooncake_lab.book.rendering.chapters import tables
from mooncake_lab.book.rendering.prose import numerals
from mooncake_lab.book.rendering.provenance import read_provenance

WORDS: Final = tuple(
    "zero one two three four five six seven eight nine ten eleven twelve".split(),  # noqa: SIM905 - shorter so
)


def pick(table: pd.DataFrame, column: str, **where: Any) -> Any:
    """The one value of a column in the row where other columns have given values; None stands for missing.

    Raises:
        ValueError: when no row or several fit, with the values there are; or when there is no such column.
    """
    for name in (column, *where):
        if name not in table:
            raise ValueError(f"there is no column {name!r}; there are {', '.join(map(str, table.columns))}")
    fits = pd.Series(data=True, index=table.index)
    for name, value in where.items():
        fits &= table[name].isna() if value is None else table[name] == value
    if fits.sum() != 1:
        there = {name: sorted(set(table[name]), key=str)[:12] for name in where}
        raise ValueError(f"{fits.sum()} rows have {where}; exactly one must, and there are {there}")
    return table.loc[fits, column].item()


def words(number: float) -> str:
    """A whole number from 0 to 12 as a word."""
    if number != int(number) or not 0 <= number < len(WORDS):
        raise ValueError(f"{number!r} has no word here; whole numbers from 0 to {len(WORDS) - 1} have")
    return WORDS[int(number)]


def near(number: float, target: float, within: float) -> bool:
    """Whether a number is a target up to a share of the target: `near(ratio, 2, 0.1)` for "about twice"."""
    return abs(number - target) <= within * abs(target)


def significant(number: float, digits: int) -> float:
    """A number rounded to `digits` significant digits."""
    return round(number, digits - 1 - math.floor(math.log10(abs(number)))) if number else 0.0


def measured_file(path: str) -> Any:
    """A file of `data/`, for example `measured_file('measured/cpu_store.json')`: CSV as a table, JSON as it is."""
    file = paper.data_dir().parent / path
    return pd.read_csv(file) if file.suffix == ".csv" else msgspec.json.decode(file.read_bytes())


def code(path: str) -> Any:
    """An object of the package by its full name: `code('mooncake_lab.serving.LiveOptions')().spares`.

    Raises:
        ValueError: when the path leads to no object of the package.
    """
    module, _, name = path.rpartition(".")
    if module.split(".")[0] != "mooncake_lab":
        raise ValueError(f"{path!r} is not in mooncake_lab")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"there is no {path}: {error}") from error


def of_some(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the values of an iterable that refuses an iterable without values.

    Raises:
        ValueError: when there are none.
    """

    def computed(values: Any, *rest: Any, **options: Any) -> Any:
        if rest and function in {max, min}:  # of its arguments
            return function(values, *rest, **options)
        there = list(values)
        if not there:
            raise ValueError(f"{function.__name__}() of nothing")
        return function(there, *rest, **options)

    return computed


def _then(find: Callable[..., Any], attribute: str) -> Callable[..., Any]:
    """Find something and take this attribute of it."""

    def found(name: str, **point: Any) -> Any:
        return operator.attrgetter(attribute)(find(name, **point))

    return found


HELPERS: Final[Mapping[str, Callable[..., Any]]] = {
    **{each.__name__: each for each in (abs, bool, dict, enumerate, float, int, len, list)},
    **{each.__name__: of_some(each) for each in (all, any, max, min, sum)},
    **{each.__name__: each for each in (range, round, set, sorted, str, tuple)},
    "zip": partial(zip, strict=True),
    **{each.__name__: each for each in (pick, words, near, significant, measured_file, code)},
    "median": statistics.median,
    "mean": statistics.fmean,
    "log": math.log,
    "log2": math.log2,
    "isnan": math.isnan,
    "fact": _then(paper.fact, "value"),
    "curve": paper.curve,
    "points": paper.points,
    "constant": _then(paper.constant, "value"),
    "assumption": _then(paper.assumption, "value"),
    "paper": _then(paper.claim, "fact.value"),
    "claim": paper.claim,
    "claims": paper.claims,
    "scope": paper.scope,
    "assumptions": paper.assumptions,
}
"""The names of an expression besides the record: `pick(table, column, **where)` for one cell of a table,
`fact(curve, series=, x=)`, `paper('F41')` (a claim's number), `ours('F41')` and `verdict('F41')` (what a chapter
recorded for it), `released('conversation')` (whether the run had that trace, not its twin), `assumption('B46')`,
`constant(name)`, `words(3)`, `near(a, b, share)`, `significant(a, digits)`, `measured_file(path)`,
`code('mooncake_lab.core.MIB')` (an object of the package), `record(topic)`, median, mean and Python's own abs,
min, max, round and so on. Those that Python computes of nothing, such as all and sum, refuse it."""


class Records:
    """What the chapters put on record in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, SimpleNamespace] = {}

    def of(self, topic: str) -> SimpleNamespace:
        """The tables and plain values of a chapter as attributes.

        Raises:
            ValueError: when the chapter has no record.
        """
        if topic not in self._read:
            path = self.folder / f"{topic}.json"
            if not path.is_file():
                raise ValueError(f"there is no record {path}; execute the chapters first (`make notebooks`)")
            found: dict[str, Any] = dict(tables(path))
            values = found.pop("values", None)
            if values is not None:
                found |= dict(zip(values["name"], values["value"], strict=True))
            self._read[topic] = SimpleNamespace(**found)
        return self._read[topic]

    def topics(self) -> list[str]:
        """The chapters that have a record."""
        return sorted(path.stem for path in self.folder.glob("*.json") if path.stem != "provenance")

    def released(self, workload: str) -> bool:
        """Whether the run had the released trace of a workload.

        Raises:
            ValueError: when the run has left no word on its traces, or none on this one.
        """
        run = read_provenance(self.folder)
        if run is None or workload not in run.traces:
            raise ValueError(f"{self.folder} does not say which {workload} trace was there")
        return run.traces[workload] is not None

    def names(self, topic: str) -> dict[str, Any]:
        """The names of an expression on the page of a chapter (any other: of a page without a record)."""
        own = vars(self.of(topic)) if topic in self.topics() else {}
        searched = [topic] if TABLE in own else self.topics()

        def judged(claim: str) -> Any:
            rows = [row for each in searched for row in self._judged(each) if row["claim"] == claim]
            if len(rows) != 1:
                raise ValueError(f"claim {claim!r} has {len(rows)} rows on record; use pick({TABLE}, ...)")
            return rows[0]

        def ours(claim: str) -> Any:
            return judged(claim)["ours"]

        def verdict(claim: str) -> Any:
            return judged(claim)["verdict"]

        lookups = {"record": self.of, "ours": ours, "verdict": verdict, "released": self.released}
        return {"__builtins__": {}, **own, **HELPERS, **lookups}

    def _judged(self, topic: str) -> list[dict[str, Any]]:
        table = getattr(self.of(topic), TABLE, pd.DataFrame())
        return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression, no part of which selects nothing or compares with NaN.

    Raises:
        ValueError: with the expression and what is wrong with it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # such as numpy's, of the mean of nothing
            return eval(_compiled(expression), {**names, **_GUARDS})  # noqa: S307 - the authors' own, without builtins
    except Exception as error:
        raise ValueError(f"{expression!r} cannot be computed: {type(error).__name__}: {error}") from error


def _selected(value: Any, source: str) -> Any:
    """A part's value, unless it is an empty table, column or collection."""
    if isinstance(value, (pd.DataFrame, pd.Series, pd.Index)):
        nothing = value.empty
    elif isinstance(value, np.ndarray):
        nothing = not value.size
    else:
        nothing = isinstance(value, (list, tuple, set, frozenset, dict, range)) and not value
    if nothing:
        raise ValueError(f"{source} selects nothing")
    return value


def _several(value: Any, source: str) -> Any:
    """A column of two values at least: any other is in order."""
    if isinstance(value, (pd.Series, pd.Index)) and len(value) < 2:
        raise ValueError(f"{source} has {len(value)} values, which have no order")
    return value


def _comparable(value: Any, source: str) -> Any:
    """A side of a comparison, unless it is NaN, or a column of nothing else."""
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{source} is NaN")
    if isinstance(value, (pd.Series, pd.DataFrame)) and len(value) and bool(np.all(value.isna())):
        raise ValueError(f"{source} is NaN in each row")
    return value


_GUARDS: Final = {each.__name__: each for each in (_selected, _several, _comparable)}


@cache
def _compiled(expression: str) -> CodeType:
    tree: ast.Expression = _Guarded().visit(ast.parse(expression, mode="eval"))
    return compile(ast.fix_missing_locations(tree), "expression", "eval")


class _Guarded(ast.NodeTransformer):
    """Check the value of each part of an expression, but for what is compared with an empty literal: `x == []`."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            return node
        source = ast.unparse(node) if isinstance(node, ast.expr) else ""
        guarded = super().visit(node)
        return _guard("_selected", guarded, source) if isinstance(guarded, _SELECTING) else guarded

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        sides = [node.left, *node.comparators]
        sources = [ast.unparse(side) for side in sides]
        if _EMPTY.isdisjoint(sources):
            pairs = zip(sides, sources, strict=True)
            made: list[Any] = [_guard("_comparable", self.visit(side), source) for side, source in pairs]
        else:
            made = [self.generic_visit(side) for side in sides]
        return ast.Compare(made[0], node.ops, made[1:])

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        source = ast.unparse(node.value)
        of = self.visit(node.value)
        ordered = node.attr.startswith("is_monotonic")
        return ast.Attribute(_guard("_several", of, source) if ordered else of, node.attr, node.ctx)


_EMPTY: Final = frozenset({"[]", "()", "{}", "set()"})
_SELECTING: Final = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp, ast.ListComp, ast.SetComp, ast.DictComp
)  # fmt: skip


def _guard(check: str, part: Any, source: str) -> ast.Call:
    return ast.Call(ast.Name(check, ast.Load()), [part, ast.Constant(source)], [])


def holds(expression: str, names: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a direction holds, and what it compares where it does not: `0.31 < 0.22`.

    Raises:
        ValueError: when it cannot be computed, or is neither true nor false.
    """
    value = evaluate(expression, names)
    if not isinstance(value, bool) and type(value).__name__ not in {"bool", "bool_"}:
        raise ValueError(f"{expression!r} is {value!r}; a direction is true or false")
    tree = ast.parse(expression, mode="eval").body
    if value or not isinstance(tree, ast.Compare):
        return bool(value), expression
    shown = _brief(evaluate(ast.unparse(tree.left), names))
    for sign, side in zip(tree.ops, tree.comparators, strict=True):
        shown += f" {_SIGNS.get(type(sign).__name__, '?')} {_brief(evaluate(ast.unparse(side), names))}"
    return False, f"{shown}, from {expression}"


_SIGNS: Final = {
    "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!=", "In": "in", "NotIn": "not in"
}  # fmt: skip


def _brief(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:80]


def unknown_names(expression: str) -> set[str]:
    """The names of an expression that neither it nor `HELPERS` defines; none where it is no expression."""
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:  # `evaluate` says so
        return set()
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return {node.id for node in names} - defined - HELPERS.keys()


def numbers(expression: str) -> Iterator[float]:
    """The numbers that an expression names, also within its texts; none where it is no expression."""
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:  # `evaluate` says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and not isinstance(node.value, bool):
            if isinstance(node.value, str):
                yield from _numbers_in(node.value)
            elif isinstance(node.value, (int, float)):
                yield float(node.value)


def _numbers_in(text: str) -> Iterator[float]:
    for start, end in numerals(text):
        try:
            yield float(text[start:end].replace(",", ""))
        except ValueError:
            continue
