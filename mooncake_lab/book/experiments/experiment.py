"""Experiments: frozen plain values in, a table out, cached by everything the result depends on.

An experiment is a frozen dataclass whose fields are numbers, strings, booleans, None, or tuples of
these, and whose `rows()` does the work for one point. `vary` makes the product of several points;
`run` computes the points, in an executor if one is given, and puts the fields and the rows side by
side in one table.

`record` writes the numbers that a chapter puts on record, for the scorecard, tests and readers.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, as_completed
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar, cast

import msgspec
import pandas as pd
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from mooncake_lab.book.experiments.cache import cached_rows, digest_of, is_of_package, keep_rows, plain_rows
from mooncake_lab.core import check_scale, complete_file, rare_collections
from mooncake_lab.workload import Trace, load


class Experiment(Protocol):
    """What `run` needs to know of an experiment; any frozen dataclass with `rows` will do."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Compute this point: one mapping of plain values a row of the result."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OfTrace:
    """The fields of an experiment on the first requests of a trace."""

    workload: str = "conversation"
    first: int | None = None
    """Number of requests from the start of the trace; None takes all."""
    seed: int = 0
    """Seed of the twin, which is used where there is no released file."""

    def trace(self) -> Trace:
        """The requests."""
        whole = whole_trace(self.workload, self.seed)
        return whole if self.first is None else whole.head(self.first)


@cache
def whole_trace(workload: str, seed: int = 0) -> Trace:
    """A workload's trace, read or made once."""
    return load(workload, seed=seed)


E = TypeVar("E", bound=Experiment)
P = ParamSpec("P")


def vary(base: E, **axes: Sequence[Any]) -> tuple[E, ...]:
    """Every combination of the given fields' values on top of `base`, the last axis fastest.

    Raises:
        ValueError: when an axis is not a field of the experiment, or has no values.
    """
    fields = [field.name for field in dataclasses.fields(base)]
    for name, values in axes.items():
        if name not in fields:
            raise ValueError(f"{type(base).__name__} has no field {name!r}; its fields are {', '.join(fields)}")
        if not values:
            raise ValueError(f"the axis {name!r} has no values; at least one is needed")
    product = itertools.product(*axes.values())
    return tuple(dataclasses.replace(base, **dict(zip(axes, point, strict=True))) for point in product)


def run(experiment: E | Sequence[E], executor: Executor | None = None, *, cache: bool = True) -> pd.DataFrame:
    """Compute an experiment, or each point of a sweep, and return one table.

    Args:
        experiment: one experiment, or the tuple that `vary` made.
        executor: anything with `submit`; without one the points run here, one after the other.
        cache: whether rows kept earlier may be used and new ones kept. Measurements of time say False; an
            experiment defined outside the package, in a notebook say, is computed each time anyway.

    Returns:
        One line a row of each point, in the order of the points: the experiment's fields, then its row.

    Raises:
        ConnectionError: when the executor ended before all points were computed; rows of the others are kept.
    """
    points = [experiment] if dataclasses.is_dataclass(experiment) else list(experiment)
    digests = [digest_of(point) if cache and is_of_package(point) else None for point in points]
    found = [cached_rows(digest) if digest else None for digest in digests]
    missing = [index for index, rows in enumerate(found) if rows is None]
    for at, rows in _compute([points[i] for i in missing], executor):
        found[missing[at]] = rows
        digest = digests[missing[at]]
        if digest is not None:
            keep_rows(digest, rows)
    lines = [
        {**dataclasses.asdict(point), **row}
        for point, rows in zip(points, found, strict=True)
        for row in rows or ()
    ]
    return pd.DataFrame(lines)


def at_scale(base: E, scale: str, **changes: Mapping[str, Any]) -> E:
    """The experiment with what a scale changes of it, by the name of the scale.

    Raises:
        ValueError: when there is no such scale.
    """
    return dataclasses.replace(base, **changes.get(check_scale(scale), {}))


def tabulated(rows: Callable[P, Iterable[Mapping[str, Any]]]) -> Callable[P, pd.DataFrame]:
    """Let a function that yields rows return them as a table."""

    @wraps(rows)
    def table(*args: P.args, **kwargs: P.kwargs) -> pd.DataFrame:
        return pd.DataFrame(list(rows(*args, **kwargs)))

    return table


def where(table: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """The rows of a table whose columns have these values."""
    for name, wanted in values.items():
        table = cast("pd.DataFrame", table[table[name] == wanted])
    return table


def records(table: pd.DataFrame, **values: Any) -> list[dict[Any, Any]]:
    """The rows whose columns have these values, each as a mapping by column."""
    return where(table, **values).to_dict(orient="records")


def value(table: pd.DataFrame, column: str, **values: Any) -> Any:
    """What a column says in the one row whose other columns have these values.

    Raises:
        ValueError: when no row or several have them.
    """
    (found,) = where(table, **values)[column].tolist()
    return found


def _compute(
    points: Sequence[Experiment], executor: Executor | None
) -> Iterable[tuple[int, list[dict[str, Any]]]]:
    """The rows of each point with its place, as soon as they are there."""
    with _bar(len(points)) as advance:
        if executor is None:
            for at, point in enumerate(points):
                yield at, _rows_of(point)
                advance()
            return
        places: dict[Future[list[dict[str, Any]]], int] = {}
        for at, point in enumerate(points):
            places[executor.submit(_rows_of, point)] = at
        lost = 0
        for future in as_completed(places):
            advance()
            try:
                yield places[future], future.result()
            except CancelledError:  # its scheduler ended
                lost += 1
        if lost:
            raise ConnectionError(
                f"the executor ended before {lost} of {len(points)} points were computed; start it again, and run"
                " them again: unless cache is False, those that were computed are kept"
            )


@contextmanager
def _bar(points: int) -> Generator[Callable[[], None]]:
    """A function to call after each point; with several points, a terminal shows how many are computed."""
    if points < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("points", total=points)
        yield lambda: bar.advance(task)


def _rows_of(point: Experiment) -> list[dict[str, Any]]:
    with rare_collections():
        return plain_rows(point.rows())


def record(out_dir: str | Path, topic: str, numbers: Mapping[str, Any], *, sources: Iterable[str] = ()) -> Path:
    """Write a chapter's numbers to `out_dir/topic.json` and return its path.

    Args:
        out_dir: made if needed.
        topic: the chapter's stem.
        numbers: plain values, or tables (pandas), by name. A table's index, where it has a name, is a column.
        sources: where the data came from, e.g. `trace.source`; a source that begins with "twin" marks the
            whole record as computed on generated data.
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    origins = sorted(set(sources))
    plain = {name: _rows(value) if isinstance(value, pd.DataFrame) else value for name, value in numbers.items()}
    content = {
        "topic": topic,
        "twin": any(origin.startswith("twin") for origin in origins),
        "sources": origins,
        "numbers": plain_rows([plain])[0],
    }
    path = folder / f"{topic}.json"
    with complete_file(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    return path


def _rows(table: pd.DataFrame) -> list[dict[Any, Any]]:
    named = any(name is not None for name in table.index.names)
    return (table.reset_index() if named else table).to_dict(orient="records")
