"""`mooncake-lab classroom`: build the students' notebooks, and grade submissions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from mooncake_lab.cli import group
from mooncake_lab.cli.options import Json, at_least, fail, failing

if TYPE_CHECKING:
    from mooncake_lab.course.grading.collect import Ungraded
    from mooncake_lab.course.grading.grade import Grade

app = group("Build the notebooks that students get, and grade what they hand in.")

_SOURCES: Final = Path("notebooks/assignments")

_AGAIN: Final = "to grade it again, delete its page in feedback/"

Sources = Annotated[Path, typer.Option(help="The instructor's notebooks.", exists=True, file_okay=False)]


@app.command()
def build(
    out: Annotated[Path, typer.Option(help="Where the students' notebooks go.")] = Path("build/classroom"),
    sources: Sources = _SOURCES,
    json_: Json = False,
) -> None:
    """Write the students' versions of the notebooks, without solutions and hidden tests.

    Example: mooncake-lab classroom build --out build/classroom
    """
    notebooks = sorted(sources.glob("*.ipynb"))
    if not notebooks:
        fail("classroom build", f"{sources} contains no notebooks")
    from mooncake_lab.course.grading.collect import release

    with failing("classroom build"):
        written = [str(release(notebook, out)) for notebook in notebooks]
    typer.echo(msgspec.json.encode({"notebooks": written}) if json_ else "\n".join(written))


@app.command()
def grade(
    submissions: Annotated[
        Path,
        typer.Argument(
            help="A folder with one folder per student, notebooks inside.", exists=True, file_okay=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where grades and feedback go.")] = Path("build/grades"),
    sources: Sources = _SOURCES,
    seed: Annotated[str, typer.Option(help="Seed of the hidden workloads; any text.")] = "",
    jobs: Annotated[int, at_least(1, "Notebooks to grade in parallel, one core each.")] = 1,
    memory_gib: Annotated[float, at_least(0.5, "Memory that a submission may use (GiB).")] = 2.0,
    cpu_s: Annotated[int, at_least(1, "Processor time of a submission over all tasks (s).")] = 120,
    reply_s: Annotated[float, at_least(0.1, "Longest wait for one answer (s).")] = 20.0,
    wall_s: Annotated[float, at_least(1, "Longest time of a submission over all tasks (s).")] = 600.0,
    json_: Json = False,
) -> None:
    """Grade a folder of submissions; the kernel confines each of them, and the grader checks its answers.

    The command writes grades.csv, totals.csv and one feedback page per student and assignment. Every grade is on
    disk as soon as it is known; a second run grades only what is missing or has changed. A table that was edited
    is kept under another name. If the folder contains anything that cannot be graded, or the grader fails for a
    notebook, the command lists it and exits with code 1. A student without any notebook that can be graded gets
    a row without points.

    Example: mooncake-lab classroom grade handed_in --jobs 2 --out build/grades
    """
    from rich.console import Console
    from rich.progress import Progress

    from mooncake_lab.core import GIB
    from mooncake_lab.course.grading.collect import collect, in_short
    from mooncake_lab.course.grading.confine import Allowance, UnconfinableError, bounds, check_confinable
    from mooncake_lab.course.grading.whole_class import Rules, grade_class

    collected = collect(submissions, sources)
    for each in in_short(collected.ungraded, submissions):
        _say(f"not graded: {each}")
    if not collected.notebooks:
        topics = ", ".join(path.stem for path in sorted(sources.glob("*.ipynb")))
        fail("classroom grade", f"{submissions} contains no STUDENT/TOPIC.ipynb; topics are {topics}")
    rules = Rules(
        seed=seed,
        allowance=Allowance(memory_bytes=int(memory_gib * GIB), cpu_s=cpu_s, reply_s=reply_s, wall_s=wall_s),
        jobs=jobs,
    )
    with failing("classroom grade", UnconfinableError):
        check_confinable()
        _say(bounds())
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("grading", total=len(collected.notebooks))
            grades = grade_class(collected, out, rules, lambda done: bar.advance(task, done), _say)
    _print_grades(grades, collected.ungraded, out, json_=json_)
    failed = [each for each in grades if each.failed]
    for each in failed:
        _say(f"{each.student} {each.topic} has no points, because {each.marks[0].said}; {_AGAIN}")
    if collected.ungraded or failed:
        raise typer.Exit(1)


def _print_grades(grades: Sequence["Grade"], ungraded: Sequence["Ungraded"], out: Path, *, json_: bool) -> None:
    from mooncake_lab.course.grading.collect import printable

    if json_:
        plain = [{**msgspec.to_builtins(each), "earned": each.earned, "points": each.points} for each in grades]
        skipped = [{"path": printable(each.path), "why": each.why} for each in ungraded]
        typer.echo(msgspec.json.encode({"grades": plain, "table": str(out / "grades.csv"), "not_graded": skipped}))
        return
    width = max(len(f"{each.student} {each.topic}") for each in grades)
    for each in grades:
        typer.echo(f"{f'{each.student} {each.topic}':{width}}  {each.earned:3} / {each.points}")
    typer.echo(f"{out / 'grades.csv'}, totals.csv, and the feedback pages in feedback/", err=True)


def _say(text: str) -> None:
    typer.echo(f"mooncake-lab classroom grade: {text}", err=True)
