"""Why a direction is false: the values that decide it, as words for a reader who does not know the tables.

Of `a < b and c < d`, only the side that is false counts; of `all(... for row in rows)` and of columns, the first
row that disagrees. The words are those of the expression: columns, rows and what was looked up. A unit follows
from the end of a column's name (`ttft_s`), as everywhere in this package.
"""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.book.rendering.expressions import HELPERS, evaluate

Names = Mapping[str, Any]

MOST_CHARACTERS: Final = 160
"""A longer reason explains nothing."""

_SIDES: Final = {
    "Lt": "not below", "LtE": "above", "Gt": "not above", "GtE": "below",
    "Eq": "instead of", "NotEq": "also", "In": "not among", "NotIn": "among",
}  # fmt: skip
"""What is so of the left side where a comparison with the right side is false."""

_TURNED: Final = {"Lt": "not above", "LtE": "below", "Gt": "not below", "GtE": "above"}
"""The same of the right side."""

_SAY: Final = {
    "max": "largest", "idxmax": "largest", "min": "smallest", "idxmin": "smallest", "mean": "mean",
    "median": "median", "verdict": "the verdict is",
    "decided": "the verdict is", "paper": "the paper", "ours": "ours",
}  # fmt: skip
"""What a function or a method finds."""

_NAMES: Final = {
    "kvcache_centric": "KVCache-centric", "cache_aware": "local cache-aware", "load_balance": "load balancing",
    "after_prefill": "baseline", "early": "early rejection", "predictive": "prediction",
    "committed": "counting prefills", "mooncake": "Mooncake", "vllm": "vLLM", "vllm_chunked": "chunked prefill",
    "vllm_prefix": "vLLM with prefix caching", "vllm_today": "vLLM V1",
    "lru": "LRU", "lfu": "LFU", "arc": "ARC", "fifo": "FIFO", "s3fifo": "S3-FIFO",
    "sieve": "SIEVE", "length_aware": "LengthAware", "belady": "the optimum",
}  # fmt: skip
"""What the pages call a policy or a system that the tables name by its code."""

_UNITS: Final = {"_s": " s", "_ms": " ms"}
_SHARES: Final = ("_share", "_rate")
_SMALL: Final = 1e-4
_WHOLE: Final = 1000
_MOST_VALUES: Final = 6


def reason(expression: str, names: Names) -> str:
    """The values that make an expression false; empty where they cannot be said in a few words."""
    try:
        said = _why(ast.parse(expression, mode="eval").body, names)
    except (ValueError, TypeError, LookupError, AttributeError, StopIteration, OverflowError):
        return ""
    return said if len(said) <= MOST_CHARACTERS else ""


def _value(node: ast.AST, names: Names) -> Any:
    return evaluate(ast.unparse(node), names)


def _why(node: ast.expr, names: Names) -> str:  # noqa: C901, PLR0911, PLR0912 - a case for each form of a condition
    match node:
        case ast.BoolOp(op=ast.And(), values=parts):
            return next(_why(part, names) for part in parts if not _value(part, names))
        case ast.BoolOp(values=parts):
            return "; ".join(filter(None, (_why(part, names) for part in parts)))
        case ast.Call(func=ast.Name(id="all"), args=[ast.GeneratorExp() | ast.ListComp() as each]):
            return _why(each.elt, _first(each, names, so=False))
        case ast.UnaryOp(
            op=ast.Not(),
            operand=ast.Call(func=ast.Name(id="any"), args=[ast.GeneratorExp() | ast.ListComp() as each]),
        ):
            return _sides(each.elt, _first(each, names, so=True))
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return _sides(part, names)
        case ast.Call(func=ast.Name(id="released"), args=[ast.Constant(value=name)]):
            return f"the {name} trace is generated"
        case ast.Call(func=ast.Name(id="near"), args=[got, aim, _]):
            return _pair(got, aim, "near", names)
        case ast.Call(func=ast.Attribute(value=ast.Compare(comparators=[_]) as each, attr="all")):
            return _row(each, _value(each, names), names)
        case ast.Attribute(value=column, attr="is_monotonic_increasing" | "is_monotonic_decreasing" as how):
            return _disorder(column, _value(column, names), -1 if how.endswith("decreasing") else 1)
        case ast.Compare(left=left, ops=signs, comparators=sides):
            for sign, right in zip(signs, sides, strict=True):
                if not _value(ast.Compare(left, [sign], [right]), names):
                    return _pair(left, right, type(sign).__name__, names)
                left = right
            return ""
        case _:
            return ""


def _first(each: ast.GeneratorExp | ast.ListComp, names: Names, *, so: bool) -> Names:
    """The names in the first round of a comprehension whose element is, or is not, true."""
    bound = [name.id for loop in each.generators for name in ast.walk(loop.target) if isinstance(name, ast.Name)]
    kept = ast.Dict([ast.Constant(name) for name in bound], [ast.Name(name, ast.Load()) for name in bound])
    condition = each.elt if so else ast.UnaryOp(ast.Not(), each.elt)
    *outer, last = each.generators
    loops = [*outer, ast.comprehension(last.target, last.iter, [*last.ifs, condition], last.is_async)]
    return {**names, **_value(ast.ListComp(kept, loops), names)[0]}


def _sides(node: ast.expr, names: Names) -> str:
    """The values that a comparison which is true, but should not be, compares."""
    if not isinstance(node, ast.Compare):
        return ""
    return ", ".join(_said(side, names) for side in (node.left, *node.comparators))


def _pair(left: ast.expr, right: ast.expr, sign: str, names: Names) -> str:
    """Two values: both by name, or one as what the other misses."""
    if isinstance(left, ast.Constant) and sign in _TURNED:
        return _missed(right, left, _TURNED[sign], names)
    if isinstance(right, (ast.Constant, ast.Set, ast.List, ast.Tuple, ast.BinOp)) or not _label(right, names):
        return _missed(left, right, _SIDES.get(sign, "not about"), names)
    return f"{_said(left, names)}, {_said(right, names)}"


def _missed(one: ast.expr, other: ast.expr, relation: str, names: Names) -> str:
    value, aim = _said(one, names), _number(_value(other, names), one)
    if relation == "instead of":
        return f"{value} instead of {aim}"
    return f"{value}, {relation} {aim}" if _label(one, names) else f"{value} is {relation} {aim}"


def _row(each: ast.Compare, agrees: pd.Series, names: Names) -> str:
    """The values of two columns in the first row that disagrees."""
    left, right = each.left, each.comparators[0]
    row = agrees.index[[not so for so in agrees]][0]
    one, other = _value(left, names), _value(right, names)
    said = f"{_words(_label(left, names), _text(row))} {_number(one[row], left)}"
    if isinstance(other, pd.Series):
        return f"{said}, {_words(_label(right, names), _text(row))} {_number(other[row], right)}"
    return f"{said}, {_SIDES[type(each.ops[0]).__name__]} {_number(other, left)}"


def _disorder(node: ast.expr, column: pd.Series, sign: int) -> str:
    """The first two neighbours of a column that are in the wrong order."""
    wrong = next(i for i in range(1, len(column)) if sign * (column.iloc[i] - column.iloc[i - 1]) < 0)
    what = _spaced(str(column.name)) if column.name is not None else ""
    both = (
        f"{_text(column.index[i])} {_number(column.iloc[i], node, str(column.name))}" for i in (wrong - 1, wrong)
    )
    return f"{_words(what)}: {', '.join(both)}" if what else ", ".join(both)


def _said(node: ast.expr, names: Names) -> str:
    label = "" if isinstance(node, ast.Constant) else _label(node, names)
    number = _number(_value(node, names), node)
    return f"{label}{':' * label[-1:].isdigit()} {number}".strip()


def _label(node: ast.expr, names: Names) -> str:  # noqa: C901, PLR0911, PLR0912 - a case for each form of a term
    """What an expression is about, in its own words."""
    match node:
        case ast.Name(id=name):
            bound = names.get(name)
            return _SAY.get(name, _text(bound) if isinstance(bound, str) and name not in HELPERS else "")
        case ast.Constant(value=value):
            return "" if isinstance(value, bool) else _text(value)
        case ast.Attribute(value=of, attr=name):
            return _words(_label(of, names), _SAY.get(name, "" if hasattr(pd.DataFrame, name) else _spaced(name)))
        case ast.Subscript(value=of, slice=ast.Tuple(elts=keys)):
            return _words(_label(of, names), *(_label(key, names) for key in keys))
        case ast.Subscript(value=of, slice=key):
            return _words(_label(of, names), _label(key, names))
        case ast.Call(func=ast.Name(id="pick"), args=[_, ast.Constant(value=column)], keywords=where):
            return _words(_spaced(str(column)), *(_label(each.value, names) for each in where))
        case ast.Call(func=ast.Name(id="fact"), keywords=where):
            return _words("the paper", *(_label(each.value, names) for each in where))
        case ast.Call(
            func=ast.Name(id="set" | "list" | "sorted" | "len" | "round" | "abs" | "float"), args=[part, *_]
        ):
            return _label(part, names)
        case ast.Call(func=ast.Name(id=name)):
            return _SAY.get(name, "")
        case ast.Call(func=of):
            return _label(of, names)
        case ast.SetComp(elt=part) | ast.ListComp(elt=part) | ast.Set(elts=[part]):
            return _label(part, names)
        case ast.BinOp(left=ast.Constant(), right=part) | ast.BinOp(left=part, right=ast.Constant()):
            return _label(part, names)
        case _:
            return ""


def _number(value: Any, node: ast.expr, column: str = "") -> str:
    """A value as a page prints it, with the unit that its column's name ends with."""
    if isinstance(value, (set, frozenset, list, tuple, pd.Index)):
        return _several(sorted(value, key=str) if isinstance(value, (set, frozenset)) else list(value))
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return _text(value)
    column = column or next(filter(None, map(_column, ast.walk(node))), "")
    number = float(value)
    scaled = any(isinstance(part, ast.BinOp) for part in ast.walk(node))  # no longer in the column's unit
    if not scaled and column.endswith(_SHARES) and abs(number) <= 1:
        return f"{100 * number:.1f} %"
    unit = (
        ""
        if scaled or re.search(r"\d", column)
        else next((u for end, u in _UNITS.items() if column.endswith(end)), "")
    )
    if number.is_integer() or abs(number) >= _WHOLE:
        said = f"{number:,.0f}"
    else:
        said = (
            f"{number:.3g}"
            if abs(number) >= _SMALL
            else np.format_float_positional(number, precision=2, fractional=False)
        )
    return said.replace("-", "−") + unit


def _column(part: ast.AST) -> str:
    """The column that a part of an expression takes, where its name may have a unit."""
    match part:
        case (
            ast.Attribute(attr=name) | ast.Call(func=ast.Name(id="pick"), args=[_, ast.Constant(value=str(name))])
        ):
            return name if "_" in name else ""
        case _:
            return ""


def _several(values: Sequence[Any]) -> str:
    shown = [_text(value) for value in values[:_MOST_VALUES]]
    return ", ".join(shown) + (" and others" if len(values) > _MOST_VALUES else "")


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return _words(*map(_text, value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return _spaced(str(value))


def _spaced(name: str) -> str:
    """A name of a column or a policy as words, without its unit."""
    words = re.sub(r"_(?:ms|s)$", "", name).replace("_", " ")
    return _NAMES.get(name) or re.sub(r"\b(?:ttft|tbt|gpu|ssd|dram)\b", lambda found: found[0].upper(), words)


def _words(*parts: str) -> str:
    return " ".join(filter(None, _unique(parts)))


def _unique(parts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(parts))
