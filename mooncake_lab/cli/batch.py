"""`mooncake-lab batch`: execute some or all chapters, at any scale, for any grid of parameters."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console

from mooncake_lab.book.rendering import NotebookJob, Outcome, plan, run, write_provenance
from mooncake_lab.book.rendering.expressions import Records
from mooncake_lab.book.rendering.plan import Point, Value, executed_with, points, topic_of, values
from mooncake_lab.book.rendering.provenance import found_traces, surroundings_digest
from mooncake_lab.book.rendering.report import recorded, rows, verdicts, write_gallery, write_tables
from mooncake_lab.book.rendering.run import PROCESSES, check_executor
from mooncake_lab.book.rendering.statements import put_prose
from mooncake_lab.cli.options import Json, at_least, fail, failing
from mooncake_lab.core import check_scale

_TRACEBACK_LINES = 40

_OWN_OPTIONS: Final = {"scale": "--scale", "seed": "--seed", "out_dir": "--out"}
"""Parameters of the notebooks that have their own options, which check them; `--set` refuses these."""


def batch(
    topics: Annotated[str, typer.Option(help="Topics of the chapters, separated by commas; all by default.")] = "",
    scale: Annotated[
        str, typer.Option(help="smoke, classroom, full or gpu; several separated by commas.")
    ] = "classroom",
    seed: Annotated[str, typer.Option(help="Seed of everything random; several as 0,1,2 or 0..9.")] = "0",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUES",
            help="Another parameter of the notebooks; several values separated by commas.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for executed notebooks, numbers and an index; that of the book by default."),
    ] = None,
    jobs: Annotated[
        int | None,
        at_least(0, "Notebooks to execute in parallel on this machine; by default, or if 0, one per core."),
    ] = None,
    executor: Annotated[str, typer.Option(help="processes, or dask://HOST:PORT of a Dask scheduler.")] = PROCESSES,
    force: Annotated[bool, typer.Option("--force", help="Execute also notebooks that are up to date.")] = False,
    json_: Json = False,
) -> None:
    """Execute notebooks with papermill, in parallel; a notebook that is up to date is not executed again.

    If parameters have several values, every chapter runs with every combination of them, and each combination has
    its own folder.

    Example: mooncake-lab batch --topics traces,store --scale smoke --seed 0..9 --out results
    """
    root = Path.cwd()
    try:
        traces = found_traces()
        _check_place(executor, jobs)
        scales = tuple(check_scale(str(value)) for value in values(scale))
        grid = {"scale": scales, "seed": _seeds(seed), **_settings(set_ or [])}
        sweep = points(grid)
        planned = _planned(root, out, sweep, traces, topics)
    except ValueError as error:
        fail("batch", error, code=2)
    workers, threads = _share(executor, jobs, len(planned))
    with failing("batch"):
        (root / out if out else root).mkdir(parents=True, exist_ok=True)
    try:
        outcomes = run(
            planned,
            workers=workers,
            threads=threads,
            console=Console(stderr=True),
            force=force,
            executor=executor,
        )
    except OSError as error:
        fail("batch", f"{executor} cannot be used: {error}")
    for point in sweep:
        write_provenance(
            root / (out / point.name if out else "book/_generated"),
            scale=str(point.parameters["scale"]),
            seed=int(point.parameters["seed"]),
            traces=traces,
        )
    _put_prose(outcomes)
    summary = rows(outcomes)
    if json_:
        swept = any(len(choices) > 1 for choices in grid.values())
        told = {name: list(choices) if swept else choices[0] for name, choices in grid.items()}
        told["out_dir"] = (out or Path("book/_generated")).as_posix()
        content = {"parameters": told, "traces": traces, "notebooks": summary}
        typer.echo(msgspec.json.format(msgspec.json.encode(content), indent=1))
    _report(root, out, planned, summary, quiet=json_)
    if any(outcome.status == "failed" for outcome in outcomes):
        raise typer.Exit(1)


def _put_prose(outcomes: Sequence[Outcome]) -> None:
    """The words of the sources in the executed copies, with this run's numbers."""
    with failing("batch"):
        for job in (outcome.job for outcome in outcomes if outcome.status != "failed"):
            sidecar = job.root / "book" / "statements" / f"{job.source.stem}.toml"
            records = Records(job.root / job.record.parent)
            put_prose(job.root / job.source, job.root / job.output, sidecar, records)


def _planned(
    root: Path, out: Path | None, sweep: Sequence[Point], traces: Mapping[str, str | None], topics: str
) -> list[NotebookJob]:
    wanted = [topic for topic in topics.split(",") if topic]
    notebooks = sorted((root / "notebooks").glob("*.ipynb"))
    if not notebooks:
        raise ValueError(
            f"{root / 'notebooks'} contains no notebooks; run this command in the root of the repository"
        )
    surroundings = surroundings_digest(root, traces)
    if out is None:
        if len(sweep) > 1:
            raise ValueError(
                f"a sweep of {len(sweep)} points needs its own folder, --out; the book shows a single point"
            )
        _refuse_mixture(root / "book/chapters", notebooks, wanted, sweep[0].parameters)
    return [
        job
        for point in sweep
        for job in plan(
            notebooks,
            root=root,
            out=out / point.name if out else Path("book/chapters"),
            records=out / point.name if out else Path("book/_generated"),
            parameters=point.parameters,
            surroundings=surroundings,
            traces=traces,
            topics=wanted,
            point=point.name,
        )
    ]


def _refuse_mixture(
    folder: Path, notebooks: Sequence[Path], wanted: Sequence[str], parameters: Mapping[str, Value]
) -> None:
    """Refuse to execute some chapters of the book with other parameters than the rest: it has one banner."""
    for path in (folder / notebook.name for notebook in notebooks if wanted and topic_of(notebook) not in wanted):
        told = executed_with(path)
        for name in parameters.keys() & told.keys():
            if told[name] != parameters[name]:
                raise ValueError(
                    f"the book's {path.name} was executed with {name}={told[name]}, but {name}={parameters[name]}"
                    " was requested; name another folder with --out, or leave out --topics to execute them all"
                )


def _report(
    root: Path,
    out: Path | None,
    planned: Sequence[NotebookJob],
    summary: Sequence[Mapping[str, Any]],
    *,
    quiet: bool,
) -> None:
    """Tables and an index where the batch has a folder of its own; on stderr, where and how it failed."""
    if out is not None:
        judged, numbers = verdicts(planned), recorded(planned)
        write_tables(root / out, summary, judged, numbers)
        index = write_gallery(root / out, planned, summary, judged, tuple(numbers))
        if not quiet:
            typer.echo(f"Open {index.resolve()}")
    for row in summary:
        if row["traceback"]:
            lines = row["traceback"].splitlines()[-_TRACEBACK_LINES:]
            where = row["notebook"] if row["cell"] is None else f"{row['notebook']}, cell {row['cell']}"
            typer.echo(f"\n{where}:\n" + "\n".join(lines), err=True)


def _check_place(executor: str, jobs: int | None) -> None:
    """Refuse an executor that does not exist, and a number of notebooks that a cluster decides itself."""
    if check_executor(executor) != PROCESSES and jobs is not None:
        raise ValueError(
            f"--jobs {jobs} limits the notebooks on this machine, but {executor} executes one on each of its"
            " workers; leave out --jobs, and start one worker for each notebook that should run at a time"
        )


def _share(executor: str, jobs: int | None, notebooks: int) -> tuple[int, int]:
    """Notebooks at a time, and threads of each: the cores of this machine say nothing about those of a cluster."""
    if executor != PROCESSES:
        return notebooks, 1
    workers = jobs or _cores()
    return workers, max(1, _cores() // min(workers, notebooks))


def _cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _seeds(text: str) -> tuple[Value, ...]:
    found = values(text)
    if any(type(value) is not int or value < 0 for value in found):
        raise ValueError(f"--seed {text!r} is not a whole number from 0 or a list such as 0,1,2 or 0..9")
    return found


def _settings(pairs: list[str]) -> dict[str, Sequence[Value]]:
    settings: dict[str, Sequence[Value]] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--set {pair!r} is not of the form KEY=VALUE")
        if name in _OWN_OPTIONS:
            raise ValueError(f"--set {pair!r}: {name} has its own option, {_OWN_OPTIONS[name]}")
        if name in settings:
            raise ValueError(
                f"--set {pair!r}: {name} is given twice; put several values into one --set, separated by commas"
            )
        settings[name] = values(text)
    return settings
