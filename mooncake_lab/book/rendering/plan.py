"""Which notebooks there are, what they will be told, and which of them are still up to date.

A sweep executes chapters at several points. A parameter with one value is told to every notebook; those with
several span the sweep. With one point the folder holds the executed notebooks; with more, it holds a
folder per point, named after what varies in it: `results/scale=smoke,seed=3/07_store.ipynb`.
"""

import ast
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from mooncake_lab.book.experiments.cache import code_digest, named_files
from mooncake_lab.book.rendering import provenance
from mooncake_lab.book.rendering.notebook import Notebook, read_notebook

Value: TypeAlias = str | int | float | bool
"""What a parameter may be."""

MARK: Final = "mooncake_lab"
"""The key under which an executed notebook's metadata says what it was computed from."""

_EXECUTES: Final = "import mooncake_lab.book.rendering.run"
"""Whose code runs with every notebook's."""

GATHERS: Final = "gathers"
"""The cell tag of a notebook that reads what the other chapters put on record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookJob:
    """One notebook to execute with given parameters."""

    topic: str
    """The stem without its number: `store` for `07_store.ipynb`."""
    source: Path
    output: Path
    """Where the executed copy goes."""
    record: Path
    """The numbers that the chapter may write: `out_dir/topic.json`."""
    parameters: Mapping[str, Value]
    digest: str
    """A name for everything the result depends on; the notebook's prose is not part of it."""
    root: Path
    """The folder in which the kernel works; the paths above are relative to it."""
    traces: Mapping[str, str | None] = field(default_factory=dict)
    """The SHA-256 of each released trace that the digest counts, by workload; None where it is missing."""
    gathers: bool = False
    """Whether it reads what the other chapters put on record, and so runs after them."""
    point: str = ""
    """Which point of a sweep, such as `seed=3`; empty where there is only one."""

    @property
    def name(self) -> str:
        """The topic, and the point of a sweep: what a person and the batch call this job by."""
        return f"{self.topic} {self.point}".strip()

    @property
    def told(self) -> dict[str, Value]:
        """The parameters, but for the folder of the records."""
        return {name: value for name, value in self.parameters.items() if name != "out_dir"}

    def seconds(self) -> float:
        """How long the execution took that wrote the copy; 0 where the copy does not say it."""
        metadata = read_notebook(self.root / self.output).metadata
        return metadata.get(MARK, {}).get("seconds") or metadata.get("papermill", {}).get("duration") or 0.0

    def is_done(self) -> bool:
        """Whether the executed copy, and the numbers it wrote, are there and were made from the same."""
        executed = self.root / self.output
        if not executed.is_file():
            return False
        try:
            mark = read_notebook(executed).metadata.get(MARK)
        except ValueError:  # cut off by a crash or an interrupt: no longer worth anything
            return False
        if not mark or mark.get("digest") != self.digest:
            return False
        return (self.root / self.record).is_file() or not mark.get("recorded")


def after_the_others(job: NotebookJob) -> NotebookJob:
    """A gathering job, once the others are done: its result depends on what they put on record, too."""
    records = sorted((job.root / job.record).parent.glob("*.json"))
    others = [path for path in records if path != job.root / job.record and path.name != provenance.FILE]
    parts = (job.digest.encode(), *(path.name.encode() + b"\0" + path.read_bytes() for path in others))
    return replace(job, digest=hashlib.sha256(b"\0".join(parts)).hexdigest())


def plan(
    notebooks: Iterable[Path],
    *,
    root: Path,
    out: Path,
    records: Path,
    parameters: Mapping[str, Value],
    surroundings: str,
    traces: Mapping[str, str | None] | None = None,
    topics: Sequence[str] = (),
    point: str = "",
) -> list[NotebookJob]:
    """The jobs for some notebooks, in the order of their names.

    Args:
        notebooks: files named `NN_topic.ipynb`, under `root`.
        root: the folder in which the kernels work.
        out: where the executed copies go, relative to `root`.
        records: the notebooks' `out_dir`, relative to `root`.
        parameters: for every notebook, besides `out_dir`.
        surroundings: what `surroundings_digest` returned.
        traces: what `found_traces` returned, which the executing process has to find too; None lets them find any.
        topics: only these; all when empty.
        point: which point of a sweep it is.

    Raises:
        ValueError: when a topic has no notebook, or a notebook does not know a parameter.
    """
    by_topic = {topic_of(path): path for path in sorted(notebooks)}
    for topic in topics:
        if topic not in by_topic:
            raise ValueError(f"there is no notebook for the topic {topic!r}; there are {', '.join(by_topic)}")
    told = {**parameters, "out_dir": records.as_posix()}
    jobs: list[NotebookJob] = []
    for topic, source in by_topic.items():
        if topics and topic not in topics:
            continue
        notebook = read_notebook(source)
        _refuse_unknown(told, source.name, notebook)
        plain = msgspec.json.encode([told, named_files(told.values())], order="sorted")
        parts = (
            notebook.computed(),
            plain,
            surroundings.encode(),
            code_digest(_EXECUTES, notebook.code()).encode(),
        )
        jobs.append(
            NotebookJob(
                topic=topic,
                source=source.relative_to(root),
                output=out / source.name,
                record=records / f"{topic}.json",
                parameters=told,
                digest=hashlib.sha256(b"\0".join(parts)).hexdigest(),
                root=root,
                traces=dict(traces or {}),
                gathers=bool(notebook.tagged(GATHERS)),
                point=point,
            )
        )
    return jobs


def executed_with(copy: Path) -> Mapping[str, Any]:
    """The parameters of an executed copy; none where there is no such copy."""
    try:
        return read_notebook(copy).metadata.get("papermill", {}).get("parameters", {})
    except (OSError, ValueError):
        return {}


def topic_of(path: Path) -> str:
    """The topic of a notebook: its stem without the number in front."""
    number, _, topic = path.stem.partition("_")
    return topic if number.isdigit() and topic else path.stem


def parameter_defaults(notebook: Notebook) -> dict[str, Any]:
    """The names set in the cell tagged `parameters`, with the values a reader sees there."""
    defaults: dict[str, Any] = {}
    for cell in notebook.tagged("parameters"):
        for statement in ast.parse(cell.text).body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    defaults[name] = _literal(value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    defaults[name] = _literal(value)
                case _:
                    continue
    return defaults


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:  # an expression, whose value only the kernel knows
        return None


def _refuse_unknown(told: Mapping[str, Value], name: str, notebook: Notebook) -> None:
    known = parameter_defaults(notebook)
    unknown = [key for key in told if key not in known]
    if unknown:
        raise ValueError(
            f"{name} has no parameter {', '.join(map(repr, unknown))};"
            f" its parameters are {', '.join(known) or 'none: no cell is tagged `parameters`'}"
        )


_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_MOST_VALUES = 10_000


@dataclass(frozen=True, slots=True)
class Point:
    """One choice of parameters in a sweep."""

    name: str
    """What varies here, such as `scale=smoke,seed=3`, fit for a folder; empty where nothing does."""
    parameters: Mapping[str, Value]


def values(text: str) -> tuple[Value, ...]:
    """The values of one option: `3`, `0..9` (both ends included), `0,1,2`, `smoke,classroom`, `true`.

    Raises:
        ValueError: when there is no value, a value comes twice, or a range has too many.
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


def _range_or_value(text: str) -> Iterable[Value]:
    if match := _RANGE.fullmatch(text):
        first, last = int(match[1]), int(match[2])
        if last - first >= _MOST_VALUES:
            raise ValueError(f"{text!r} has {last - first + 1} values; allowed are {_MOST_VALUES}")
        return range(first, last + 1)
    try:
        return (msgspec.json.decode(text, type=bool | int | float),)
    except msgspec.MsgspecError:
        return (text,)


def _for_a_folder(value: Value) -> str:
    return re.sub(r"[^\w.+-]", "_", str(value))
