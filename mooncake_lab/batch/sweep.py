"""Chapters x parameters: the points of a sweep, each a batch in a folder of its own.

A parameter with one value is told to every notebook; those with several span the sweep. With a single point the
folder holds the executed notebooks themselves; with more, one folder a point, named after what varies in it:
`results/scale=smoke,seed=3/07_store.ipynb`.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from mooncake_lab.batch.plan import Job, Value, plan

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


@dataclass(frozen=True, slots=True)
class Point:
    """One choice of parameters in a sweep."""

    name: str
    """What varies here, such as `scale=smoke,seed=3`, fit for a folder; empty where nothing does."""
    parameters: Mapping[str, Value]


def values(text: str) -> tuple[Value, ...]:
    """The values of one option: `3`, `0..9` (both ends included), `0,1,2`, `smoke,classroom`, `true`.

    Raises:
        ValueError: when there is no value, or a value comes twice.
    """
    found = tuple(value for part in text.split(",") for value in _range_or_value(part.strip()))
    if not found or "" in found or len(set(found)) < len(found):
        raise ValueError(f"{text!r} is not a list of different values, such as 3 or 0,1,2 or 0..9")
    return found


def points(grid: Mapping[str, Sequence[Value]]) -> list[Point]:
    """The product of all parameters' values, the last varying fastest.

    Raises:
        ValueError: when two points would share a folder.
    """
    varied = [name for name, choices in grid.items() if len(choices) > 1]
    found: dict[str, Point] = {}
    for choice in itertools.product(*grid.values()):
        parameters = dict(zip(grid, choice, strict=True))
        name = ",".join(f"{key}={_for_a_folder(parameters[key])}" for key in varied)
        if name in found:
            raise ValueError(f"two points of the sweep would both be called {name!r}; run them one by one")
        found[name] = Point(name, parameters)
    return list(found.values())


def plan_sweep(
    notebooks: Iterable[Path],
    *,
    root: Path,
    out: Path,
    sweep: Sequence[Point],
    surroundings: str,
    traces: Mapping[str, str | None] | None = None,
    topics: Sequence[str] = (),
) -> list[Job]:
    """The jobs of all points, each point with its own folder under `out` for copies and numbers.

    Raises:
        ValueError: as `plan`.
    """
    sources = list(notebooks)
    return [
        replace(job, point=point.name)
        for point in sweep
        for job in plan(
            sources,
            root=root,
            out=out / point.name,
            records=out / point.name,
            parameters=point.parameters,
            surroundings=surroundings,
            traces=traces,
            topics=topics,
        )
    ]


def _range_or_value(text: str) -> Iterable[Value]:
    if match := _RANGE.fullmatch(text):
        return range(int(match[1]), int(match[2]) + 1)
    try:
        return (msgspec.json.decode(text, type=bool | int | float),)
    except msgspec.MsgspecError:
        return (text,)


def _for_a_folder(value: Value) -> str:
    return re.sub(r"[^\w.+-]", "_", str(value))
