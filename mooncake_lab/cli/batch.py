"""`mooncake-lab batch`: execute the chapters, all or some, at any scale."""

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from mooncake_lab.batch import Job, Outcome, plan, run, write_provenance
from mooncake_lab.batch.digest import found_traces, surroundings_digest
from mooncake_lab.batch.display import Display
from mooncake_lab.batch.plan import Value
from mooncake_lab.core import check_scale


def batch(
    topics: Annotated[str, typer.Option(help="Chapters by topic, with commas; all when left out.")] = "",
    scale: Annotated[str, typer.Option(help="smoke, classroom, full or gpu.")] = "classroom",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another parameter of the notebooks.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for executed notebooks and numbers; the book's own when left out.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Notebooks at a time; 0: one a core.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Execute also what is up to date.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the outcomes as one JSON object.")] = False,
) -> None:
    """Execute notebooks with papermill, in parallel, each only when something it depends on changed.

    Example: mooncake-lab batch --topics traces,store --scale smoke --out results
    """
    root = Path.cwd()
    traces = found_traces()
    try:
        parameters: dict[str, Value] = {"scale": check_scale(scale), "seed": seed, **_settings(set_ or [])}
        planned = plan(
            _notebooks(root),
            root=root,
            out=out or Path("book/chapters"),
            records=out or Path("book/_generated"),
            parameters=parameters,
            surroundings=surroundings_digest(root, traces),
            topics=[topic for topic in topics.split(",") if topic],
        )
    except ValueError as error:
        typer.echo(f"mooncake-lab batch: {error}", err=True)
        raise typer.Exit(2) from error
    workers = jobs or _cores()
    threads = max(1, _cores() // min(workers, len(planned)))
    outcomes = run(planned, workers=workers, threads=threads, display=Display(Console(stderr=True)), force=force)
    write_provenance(root / (out or Path("book/_generated")), scale=scale, seed=seed, traces=traces)
    if json_:
        typer.echo(_as_json(planned, outcomes, traces))
    if any(outcome.status == "failed" for outcome in outcomes):
        raise typer.Exit(1)


def _cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _notebooks(root: Path) -> list[Path]:
    notebooks = sorted((root / "notebooks").glob("*.ipynb"))
    if not notebooks:
        raise ValueError(f"{root / 'notebooks'} holds no notebooks; run this in the root of the repository")
    return notebooks


def _settings(pairs: list[str]) -> dict[str, Value]:
    settings: dict[str, Value] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--set {pair!r} is not of the form KEY=VALUE")
        settings[name] = _value(text)
    return settings


def _value(text: str) -> Value:
    """A number or a truth value where the text is one, as JSON spells them; else the text."""
    try:
        return msgspec.json.decode(text, type=bool | int | float)
    except msgspec.MsgspecError:
        return text


def _as_json(planned: list[Job], outcomes: list[Outcome], traces: dict[str, str | None]) -> str:
    notebooks: list[dict[str, Any]] = [
        {
            "topic": outcome.topic,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 3),
            "notebook": outcome.notebook.as_posix(),
            "record": job.record.as_posix() if (job.root / job.record).is_file() else None,
            "error": outcome.error,
        }
        for job, outcome in zip(planned, outcomes, strict=True)
    ]
    content = {"parameters": planned[0].parameters, "traces": traces, "notebooks": notebooks}
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode()
