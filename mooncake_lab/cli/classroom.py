"""`mooncake-lab classroom`: hand assignments out, and grade what comes back."""

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.progress import track

app = typer.Typer(help="Assignments: build what students get, grade what they hand in.", no_args_is_help=True)

_SOURCES: Final = Path("notebooks/assignments")

Sources = Annotated[Path, typer.Option(help="The instructor's notebooks.", exists=True, file_okay=False)]


@app.command()
def build(
    out: Annotated[Path, typer.Option(help="Where the students' notebooks go.")] = Path("build/classroom"),
    sources: Sources = _SOURCES,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make the students' versions: without solutions and hidden tests, with nbgrader.

    Example: mooncake-lab classroom build --out build/classroom
    """
    notebooks = sorted(sources.glob("*.ipynb"))
    if not notebooks:
        typer.echo(f"mooncake-lab classroom build: {sources} holds no notebooks", err=True)
        raise typer.Exit(1)
    from mooncake_lab.exercises.grading.release import release

    written = [str(release(notebook, out)) for notebook in notebooks]
    typer.echo(msgspec.json.encode({"notebooks": written}) if json_ else "\n".join(written))


@app.command()
def grade(
    submissions: Annotated[
        Path,
        typer.Argument(help="A folder with one folder a student, notebooks inside.", exists=True, file_okay=False),
    ],
    out: Annotated[Path, typer.Option(help="Where grades and feedback go.")] = Path("build/grades"),
    sources: Sources = _SOURCES,
    seed: Annotated[int, typer.Option(help="Of the hidden workloads; choose your own, the same for a class.")] = 0,
    memory_gib: Annotated[float, typer.Option(min=0.5, help="Memory a submission may use.")] = 2.0,
    cpu_s: Annotated[int, typer.Option(min=1, help="Processor seconds a submission may use.")] = 60,
    reply_s: Annotated[float, typer.Option(min=0.1, help="Longest wait for one answer.")] = 20.0,
    wall_s: Annotated[float, typer.Option(min=1, help="Longest wait for all answers of a submission.")] = 600.0,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Grade a folder of submissions, each confined by the kernel and asked, never believed.

    Leaves grades.csv and one page of feedback a student and assignment. A bad submission is a grade.
    Anything else in the folder is named, and makes the exit code 1; a student of whom nothing can be graded has a
    row without points.

    Example: mooncake-lab classroom grade handed_in --seed 42 --out build/grades
    """
    from mooncake_lab.core import GIB
    from mooncake_lab.exercises.grading.collect import collect, printable
    from mooncake_lab.exercises.grading.confine import Allowance, UnconfinableError
    from mooncake_lab.exercises.grading.grade import grade as grade_one
    from mooncake_lab.exercises.grading.report import write_reports

    collected = collect(submissions, sources)
    for each in collected.ungraded:
        typer.echo(f"mooncake-lab classroom grade: not graded: {each}", err=True)
    if not collected.notebooks:
        typer.echo(
            f"mooncake-lab classroom grade: {submissions} holds no STUDENT/TOPIC.ipynb;"
            f" topics are {', '.join(path.stem for path in sorted(sources.glob('*.ipynb')))}",
            err=True,
        )
        raise typer.Exit(1)
    if seed == 0:
        typer.echo("mooncake-lab classroom grade: hidden seed 0 is everybody's; choose your own", err=True)
    allowance = Allowance(memory_bytes=int(memory_gib * GIB), cpu_s=cpu_s, reply_s=reply_s, wall_s=wall_s)
    grades: list[Any] = []
    try:
        for each in track(collected.notebooks, "grading", console=Console(stderr=True), transient=True):
            one = grade_one(each.path, each.teacher, student=each.student, seed=seed, allowance=allowance)
            grades.append(one)
    except UnconfinableError as error:
        typer.echo(f"mooncake-lab classroom grade: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        table = write_reports(grades, out, collected.without)  # of those who are done, whatever stopped the others
    if json_:
        skipped = [{"path": printable(each.path), "why": each.why} for each in collected.ungraded]
        plain = {"grades": [_plain(each) for each in grades], "table": str(table), "not_graded": skipped}
        typer.echo(msgspec.json.encode(plain))
    else:
        width = max(len(f"{each.student} {each.topic}") for each in grades)
        for each in grades:
            typer.echo(f"{f'{each.student} {each.topic}':{width}}  {each.earned:3} / {each.points}")
        typer.echo(f"{table}, and a page of feedback each beside it", err=True)
    if collected.ungraded:
        raise typer.Exit(1)


def _plain(grade: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(grade), "earned": grade.earned, "points": grade.points}
