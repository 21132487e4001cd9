"""`mooncake-lab classroom`: build the students' notebooks, and grade submissions."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import typer

from mooncake_lab.cli import group
from mooncake_lab.cli.options import Json, at_least, fail, failing, file_to_write

if TYPE_CHECKING:
    from mooncake_lab.course.grading.collect import Ungraded
    from mooncake_lab.course.grading.grade import Grade

app = group("Build the notebooks that students get, and grade what they hand in.")

_SOURCES: Final = Path("notebooks/assignments")

_GRADES: Final = Path("build/grades")
_HOME: Final = "https://github.com/mooncake-lab/mooncake-lab"
"""The repository, as CITATION.cff names it."""
_MOST_LISTED: Final = 100

_AGAIN: Final = "to grade it again, use classroom regrade"

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
    late: Annotated[
        str, typer.Option(metavar="PERCENT%/day", help="What each day late takes off, e.g. 10%/day.")
    ] = "",
    json_: Json = False,
) -> None:
    """Grade a folder of submissions; the kernel confines each of them, and the grader checks its answers.

    The command writes grades.csv, totals.csv and one feedback page per student and assignment. Every grade is on
    disk as soon as it is known; a second run grades only what is missing or has changed. A table that was edited
    is kept under another name.

    Points that are given or taken by hand stand in OUT/adjust.csv (student, assignment, points, why), and later
    deadlines in OUT/extensions.csv (student, assignment, days); `*` stands for all assignments.

    If the folder contains anything that cannot be graded, or the grader fails for a notebook, the command lists it
    and exits with code 1. A student without any notebook that can be graded gets a row without points.

    Example: mooncake-lab classroom grade handed_in --jobs 2 --out build/grades
    """
    from rich.console import Console
    from rich.progress import Progress

    from mooncake_lab.core import GIB
    from mooncake_lab.course.grading.collect import collect, in_short
    from mooncake_lab.course.grading.confine import Allowance, UnconfinableError, bounds, check_confinable
    from mooncake_lab.course.grading.final_points import LateRule, open_book
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
        book = open_book(out, submissions, LateRule.parse(late) if late else None)
        _say(bounds())
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("grading", total=len(collected.notebooks))
            grades = grade_class(collected, out, rules, lambda done: bar.advance(task, done), _say, book)
    _print_grades(grades, collected.ungraded, out, json_=json_)
    failed = [each for each in grades if each.failed]
    for each in failed:
        _say(f"{each.student} {each.topic} has no points, because {each.marks[0].said}; {_AGAIN}")
    nobody = book.about_nobody([*(each.student for each in grades), *collected.without])
    for sentence in nobody:
        _say(sentence)
    if collected.ungraded or failed or nobody:
        raise typer.Exit(1)


@app.command("collect")
def collect_(
    archive: Annotated[Path, typer.Argument(help="The zip file.", exists=True, dir_okay=False)],
    from_: Annotated[Literal["canvas", "moodle"], typer.Option("--from", help="Who made the zip file.")],
    roster: Annotated[
        Path | None, typer.Option(help="Gradebook or grading worksheet, as CSV.", exists=True, dir_okay=False)
    ] = None,
    topic: Annotated[str, typer.Option(help="The assignment, if students named their files as they liked.")] = "",
    due: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%dT%H:%M"], help="Deadline, in the time zone of the zip file (Moodle only)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the folders of students go.", file_okay=False)] = Path(
        "handed_in"
    ),
    sources: Sources = _SOURCES,
    json_: Json = False,
) -> None:
    """Put the notebooks of a zip file of Canvas or Moodle into one folder per student.

    Download the submissions of one assignment from the platform. The command writes OUT/STUDENT/TOPIC.ipynb, and
    OUT/collected.csv with what it knows of each student. Whatever is no notebook of an assignment stays in the zip
    file, and is listed; the exit code is then 1. A notebook that was collected before and has changed is kept in a
    hidden folder beside the new one.

    Example: mooncake-lab classroom collect submissions.zip --from canvas --roster gradebook.csv --out handed_in
    """
    from mooncake_lab.course.grading.collect import printable
    from mooncake_lab.course.grading.inbox import unpack
    from mooncake_lab.course.grading.roster import read_roster

    topics = [path.stem for path in sorted(sources.glob("*.ipynb"))]
    if topic and topic not in topics:
        fail("classroom collect", f"there is no assignment {topic!r}; there are {', '.join(topics)}")
    if due and from_ == "canvas":
        fail("classroom collect", "--due is for Moodle; Canvas marks what is late in the name of the file")
    with failing("classroom collect"):
        members = read_roster(roster) if roster else []
        out.mkdir(parents=True, exist_ok=True)
        found = unpack(archive, from_, out, topics, roster=members, only_topic=topic, due=due)
    for each in found.left[:_MOST_LISTED]:
        typer.echo(f"mooncake-lab classroom collect: {each}", err=True)
    if len(found.left) > _MOST_LISTED:
        more = len(found.left) - _MOST_LISTED
        typer.echo(f"mooncake-lab classroom collect: {more:,} more files stay in the zip file", err=True)
    if found.missing:
        names = ", ".join(printable(each.name or each.id) for each in found.missing)
        typer.echo(f"mooncake-lab classroom collect: nothing came from {names}", err=True)
    if json_:
        missing = [printable(each.name or each.id) for each in found.missing]
        left = [str(each) for each in found.left]
        collected = msgspec.to_builtins(found.collected)
        typer.echo(msgspec.json.encode({"collected": collected, "left": left, "missing": missing}))
    for each in () if json_ else found.collected:
        days = f", {each.days_late} days late" if each.days_late else ""
        typer.echo(f"{each.student} {each.assignment}{days}")
    if found.left:
        raise typer.Exit(1)


@app.command()
def regrade(
    student: Annotated[str, typer.Argument(help="As in grades.csv.")],
    topic: Annotated[str, typer.Argument(help="The assignment.")],
    why: Annotated[str, typer.Option(help="The reason, which the student reads.")],
    out: Annotated[Path, typer.Option(help="Where the grades are.", exists=True, file_okay=False)] = _GRADES,
    json_: Json = False,
) -> None:
    """Let the next `classroom grade` grade a notebook again; OUT/regrades.csv keeps the reason and the old points.

    Example: mooncake-lab classroom regrade ada keys --why "the machine was too busy"
    """
    from mooncake_lab.course.grading.regrade import Regrade, ask_again
    from mooncake_lab.course.grading.tables import number, read_csv
    from mooncake_lab.course.grading.whole_class import GRADES, page_of

    with failing("classroom regrade"):
        graded = Counter[tuple[str, str]]()
        for row in read_csv(out / GRADES, ("student", "assignment", "points")):
            graded[row["student"], row["assignment"]] += int(number(row["points"]))
        day = datetime.now(UTC).date().isoformat()
        one = Regrade(day=day, student=student, assignment=topic, points_before="", why=why)
        ask_again(out, page_of(student, topic, out), graded, one)
    if json_:
        typer.echo(msgspec.json.encode(one))
    typer.echo(f"{student} {topic} is graded again by the next run of classroom grade", err=True)


@app.command()
def export(
    to: Annotated[Literal["canvas", "moodle", "gradescope"], typer.Option(help="Who is to import it.")],
    file: Annotated[Path, file_to_write("What to write: a CSV table, or the zip file of an autograder.")],
    roster: Annotated[
        Path | None,
        typer.Option(help="What the platform exported about the class, as CSV.", exists=True, dir_okay=False),
    ] = None,
    submissions: Annotated[Path, typer.Option(help="The folder that classroom collect wrote.")] = Path(
        "handed_in"
    ),
    topic: Annotated[str, typer.Option(help="The assignment of a Gradescope autograder.")] = "",
    package: Annotated[
        str, typer.Option(help="What pip installs on Gradescope; by default this repository.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Where the grades are.", file_okay=False)] = _GRADES,
    sources: Sources = _SOURCES,
    json_: Json = False,
) -> None:
    """Write points as Canvas or Moodle imports them, or an autograder for Gradescope.

    Points are those of OUT/totals.csv. Students who are not in the roster are listed, and the exit code is then 1.

    Example: mooncake-lab classroom export --to canvas --roster gradebook.csv --file import.csv
    """
    from mooncake_lab.course.grading.export import autograder_zip, canvas_csv, moodle_csv
    from mooncake_lab.course.grading.inbox import read_collected
    from mooncake_lab.course.grading.roster import read_roster
    from mooncake_lab.course.grading.tables import read_csv
    from mooncake_lab.course.grading.whole_class import TOTALS, class_secret

    if to == "gradescope":
        notebook = sources / f"{topic}.ipynb"
        if not notebook.is_file():
            topics = ", ".join(path.stem for path in sorted(sources.glob("*.ipynb")))
            fail("classroom export", f"an autograder needs --topic; there are {topics}")
        with failing("classroom export"):
            content = autograder_zip(
                notebook, class_secret(out), package or f"mooncake-lab[classroom] @ git+{_HOME}"
            )
            file.write_bytes(content)
        _print_file(file, json_=json_)
        return
    if roster is None:
        fail("classroom export", f"--roster is needed: the table that {to.capitalize()} exports of this class")
    with failing("classroom export"):
        totals, members = read_csv(out / TOTALS, ("student", "total")), read_roster(roster)
        made = (canvas_csv if to == "canvas" else moodle_csv)(totals, members, read_collected(submissions))
        file.write_text(made.text, encoding="utf-8")
    _print_file(file, json_=json_, unmatched=list(made.unmatched))
    for student in made.unmatched:
        typer.echo(f"mooncake-lab classroom export: {student} is not in {roster}, or not only once", err=True)
    if made.unmatched:
        raise typer.Exit(1)


@app.command()
def gradescope(
    folder: Annotated[Path, typer.Argument(help="The folder with one submission.", exists=True, file_okay=False)],
    topic: Annotated[str, typer.Option(help="The assignment.")],
    secret: Annotated[Path, typer.Option(help="The file with the hidden seed.", exists=True, dir_okay=False)],
    out: Annotated[Path, file_to_write("The results.json to write.")],
    sources: Sources = _SOURCES,
    json_: Json = False,
) -> None:
    """Grade one submission and write the results.json of Gradescope; the autograder of `export` calls this.

    Example: mooncake-lab classroom gradescope in --topic keys --secret build/grades/secret --out results.json
    """
    from mooncake_lab.course.grading.confine import UnconfinableError
    from mooncake_lab.course.grading.export import as_json, gradescope_results, ungraded_results
    from mooncake_lab.course.grading.grade import grade as grade_one

    notebooks = sorted(path for path in folder.glob("*.ipynb") if path.is_file() and not path.is_symlink())
    chosen = [path for path in notebooks if path.stem == topic] or notebooks
    if len(chosen) != 1:
        results = ungraded_results(f"hand in one notebook, {topic}.ipynb; there are {len(notebooks)} notebooks")
    else:
        with failing("classroom gradescope"):
            try:
                seed = f"/{secret.read_text(encoding='ascii').strip()}"
                found = grade_one(chosen[0], sources / f"{topic}.ipynb", student="submission", seed=seed)
                results = gradescope_results(found)
            except UnconfinableError as error:
                results = ungraded_results(f"nothing was graded, because this machine cannot confine it: {error}")
    out.write_text(as_json(results), encoding="utf-8")
    if json_:
        typer.echo(as_json(results))


@app.command()
def leaderboard(
    out: Annotated[Path, typer.Option(help="Where the grades are.", exists=True, file_okay=False)] = _GRADES,
    sources: Sources = _SOURCES,
    seed: Annotated[str, typer.Option(help="As for classroom grade.")] = "",
    json_: Json = False,
) -> None:
    """Write OUT/leaderboard.html: the scores of open tasks under pseudonyms, the teacher's and the optimum's.

    Students may choose pseudonyms: OUT/pseudonyms.csv (student, pseudonym). The others get one that is made of the
    secret of the class. OUT/pseudonyms_given.csv says whose is whose.

    Example: mooncake-lab classroom leaderboard --out build/grades
    """
    from mooncake_lab.core import complete_file
    from mooncake_lab.course.grading.collect import HandedIn
    from mooncake_lab.course.grading.confine import Allowance, UnconfinableError, check_confinable
    from mooncake_lab.course.grading.grade import ASSIGNMENTS
    from mooncake_lab.course.grading.grade import grade as grade_one
    from mooncake_lab.course.grading.leaderboard import TEACHER, board_of, page, pseudonym, read_pseudonyms
    from mooncake_lab.course.grading.tables import read_csv, written_csv
    from mooncake_lab.course.grading.whole_class import GRADES, Journal, Rules, class_secret, grade_key

    with failing("classroom leaderboard", UnconfinableError):
        check_confinable()
        rows = read_csv(out / GRADES, ("student", "assignment", "task", "score"))
        secret, chosen = class_secret(out), read_pseudonyms(out)
        names = {
            student: chosen.get(student) or pseudonym(student, secret) for student in {r["student"] for r in rows}
        }
        rules, whole = Rules(seed=seed, allowance=Allowance()), f"{seed}/{secret}"
        journal, boards = Journal(out / "teacher"), {}
        for topic in sorted({row["assignment"] for row in rows if row["score"]} & set(ASSIGNMENTS)):
            teacher = sources / f"{topic}.ipynb"
            key = grade_key(HandedIn(TEACHER, teacher, teacher), whole, rules)
            if key not in journal.grades:
                journal.add(key, grade_one(teacher, teacher, student=TEACHER, seed=whole))
            boards[topic] = board_of(topic, rows, journal.grades[key], names)
        for name, text in (
            ("leaderboard.html", page(boards)),
            ("pseudonyms_given.csv", written_csv(("student", "pseudonym"), sorted(names.items()))),
        ):
            with complete_file(out / name) as written:
                written.write(text.encode())
    _print_file(out / "leaderboard.html", json_=json_)


def _print_file(file: Path, *, json_: bool, **more: list[str]) -> None:
    typer.echo(msgspec.json.encode({"file": str(file), **more}) if json_ else file)


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
    for topic in sorted({each.topic for each in grades}):
        seconds = [each.cpu_s for each in grades if each.topic == topic]
        typer.echo(f"{topic}: {fmean(seconds):.1f} s of processor time for a notebook", err=True)
    typer.echo(f"{out / 'grades.csv'}, totals.csv, and the feedback pages in feedback/", err=True)


def _say(text: str) -> None:
    typer.echo(f"mooncake-lab classroom grade: {text}", err=True)
