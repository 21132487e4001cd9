"""Grading a class: notebook by notebook, several at a time, each grade kept before the next is waited for.

Grades go to disk as they are given: if the grader ends, what it had graded stays. Beside them is what a class
reads: tables of points, and for each student a page with every task and what was said of it.
"""

import codecs
import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

import mooncake_lab
from mooncake_lab.book.experiments.cache import tree_digest
from mooncake_lab.core import complete_file, sum_in_order
from mooncake_lab.course.grading.collect import Collection, HandedIn
from mooncake_lab.course.grading.confine import Allowance, UnconfinableError
from mooncake_lab.course.grading.final_points import FinalPoints, Gradebook
from mooncake_lab.course.grading.grade import Grade, failed_grade, grade
from mooncake_lab.course.grading.own_files import OwnFiles
from mooncake_lab.course.grading.regrade import Regrade, read_regrades
from mooncake_lab.course.grading.remarks import one_line
from mooncake_lab.course.grading.tables import written_csv
from mooncake_lab.course.grading.workers import work_through

TOTALS: Final = "totals.csv"
GRADES: Final = "grades.csv"
_NAME: Final = "grades.jsonl"
_UNREADABLE: Final = "grades.unreadable.jsonl"
_SECRET: Final = "secret"  # noqa: S105  # the name of a file
_SECRET_BYTES: Final = 16
_ENDED_TWICE: Final = "the grader's process ended while it graded this notebook, twice"
_LONGEST_NOTE: Final = 2000
"""Letters about a notebook in each of its rows; the page has all of them."""


def class_secret(folder: Path) -> str:
    """The random part of a class's hidden seed, which is made and kept in the folder of its grades.

    A seed that a teacher chooses may be short, and a submission that knows this code can try a million of them.
    With this part, no submission can. To draw the same workloads in another folder, copy the file.

    Raises:
        ValueError: when the file holds something else.
    """
    path = folder / _SECRET
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with complete_file(path, mode=0o600) as file:
            file.write(f"{secrets.token_hex(_SECRET_BYTES)}\n".encode())
    raw, needed = path.read_bytes(), f"{2 * _SECRET_BYTES} hexadecimal digits are needed"
    if raw.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path} begins with a byte order mark (BOM); {needed}, saved as UTF-8 without one")
    found = raw.decode("ascii", "backslashreplace").strip()
    if len(found) != 2 * _SECRET_BYTES or not set(found) <= set("0123456789abcdef"):
        raise ValueError(f"{path} holds {found[:40]!r}; {needed}")
    return found


class JournalEntry(msgspec.Struct, frozen=True):
    """A grade, and the name of what it was given for."""

    key: str
    grade: Grade


class Journal:
    """One line per grade in a file, each on disk before the next is begun; mutable because it grows.

    A last line that was cut, because the grader or the machine ended while it was written, is dropped. Any other
    line that cannot be read is moved to a file beside the journal, and only its own grade is given again.

    Args:
        folder: where the grades are.
        say: told, in a sentence, of each line that cannot be read.
    """

    def __init__(self, folder: Path, say: Callable[[str], object] = lambda _: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _NAME
        self.grades: dict[str, Grade] = {}
        raw = self._path.read_bytes() if self._path.exists() else b""
        good, bad = bytearray(), bytearray()
        for number, line in enumerate(raw.split(b"\n"), start=1):
            try:
                entry = msgspec.json.decode(line, type=JournalEntry)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                if line.strip() and number <= raw.count(b"\n"):
                    bad += line + b"\n"
                    say(
                        f"line {number} of {_NAME} cannot be read ({error}); it is now in {_UNREADABLE}, and its"
                        " notebook is graded again"
                    )
                continue
            good += line + b"\n"
            self.grades[entry.key] = entry.grade
        if bad:
            with (folder / _UNREADABLE).open("ab") as file:
                file.write(bad)
        if bytes(good) != raw:
            with complete_file(self._path) as file:
                file.write(good)

    def add(self, key: str, grade: Grade) -> None:
        """Keep a grade, on disk when this returns."""
        self.grades[key] = grade
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(JournalEntry(key, grade)) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def grade_key(handed: HandedIn, seed: str, rules: "Rules") -> str:
    """One name for everything that a grade depends on: both notebooks, the seed, the limits, this package."""
    whole = hashlib.sha256()
    parts = (handed.student, handed.teacher.stem, seed, repr(rules.allowance))
    for part in (
        *map(str.encode, (*parts, _package_digest())),
        handed.path.read_bytes(),
        handed.teacher.read_bytes(),
    ):
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


@cache
def _package_digest() -> str:
    package = Path(mooncake_lab.__file__).parent
    version = f"{mooncake_lab.__version__}, Python {sys.version_info[:2]}"
    return f"{version}, {tree_digest(package, package.rglob('*.py'))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a class is graded."""

    seed: str
    """Chosen by the teacher. The hidden workloads also depend on the secret stored beside the grades."""
    allowance: Allowance
    jobs: int = 1
    """Notebooks graded at a time."""


def grade_class(
    collected: Collection,
    folder: Path,
    rules: Rules,
    report: Callable[[int], object] = lambda _: None,
    say: Callable[[str], object] = lambda _: None,
    book: Gradebook | None = None,
) -> list[Grade]:
    """Grade everything, and keep each grade, its page and both tables as soon as it is given.

    What has a grade from an earlier run is graded again only when something has changed that it depends on.

    Args:
        collected: what was handed in.
        folder: where the grades go.
        rules: how to grade.
        report: told how many more notebooks have a grade.
        say: told, in a sentence, of what is wrong in the folder of grades.
        book: what counts besides the points of the grader.

    Raises:
        UnconfinableError: when this machine cannot confine a submission; what was graded before stays.
        ChildProcessError: when no process that grades comes up.
    """
    seed = f"{rules.seed}/{class_secret(folder)}"
    journal, files, book = Journal(folder, say), OwnFiles(folder, say), book or Gradebook()
    regrades = read_regrades(folder)
    orders = {grade_key(each, seed, rules): _Order(each, seed, rules.allowance) for each in collected.notebooks}
    found = {key: grade for key in orders if (grade := journal.grades.get(key)) is not None}
    todo = [
        (key, order)
        for key, order in orders.items()
        if key not in found or not page_of(order.handed.student, order.handed.teacher.stem, folder).exists()
    ]
    report(len(orders) - len(todo))

    def given() -> list[Grade]:
        return [found[key] for key in orders if key in found]

    def write_page(one: Grade) -> None:
        again = [each for each in regrades if (each.student, each.assignment) == (one.student, one.topic)]
        page = feedback_html(one, book.final(one), again).encode()
        path = page_of(one.student, one.topic, folder)
        if not path.exists() or not files.wrote(page):  # a teacher's edit stays where nothing new is to be said
            files.write(path, page)

    for each in given():
        if page_of(each.student, each.topic, folder).exists():
            write_page(each)
    write_tables(given(), files, folder, collected.without, book)
    for (key, order), result in work_through(todo, _grade, rules.jobs):
        one = result or failed_grade(order.handed.student, order.handed.teacher.stem, _ENDED_TWICE)
        write_page(one)
        journal.add(key, one)
        found[key] = one
        write_tables(given(), files, folder, collected.without, book)
        report(1)
    return given()


class _Order(NamedTuple):
    """What a worker needs to grade one notebook."""

    handed: HandedIn
    seed: str
    allowance: Allowance


def _grade(task: tuple[str, _Order]) -> Grade:
    """Grade one notebook, in a worker."""
    handed, seed, allowance = task[1]
    try:
        return grade(handed.path, handed.teacher, student=handed.student, seed=seed, allowance=allowance)
    except UnconfinableError:
        raise
    except Exception as error:  # noqa: BLE001  # a fault of the grader must not cost the class its grades
        why = f"the grader failed while it graded this notebook: {type(error).__name__}: {error}"
        return failed_grade(handed.student, handed.teacher.stem, why)


_STYLE: Final = """
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif; }
body { max-width: 48rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .4rem .6rem; border-bottom: 1px solid #8886; vertical-align: top; }
td.points { white-space: nowrap; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid #8886; }
"""


_HEADS: Final = "".join(f'<th scope="col">{head}</th>' for head in ("task", "points", "remark"))


def grades_csv(grades: Sequence[Grade], without: Mapping[str, str]) -> str:
    """One row per task: student, assignment, task, points, out of, score of an open task, remark, notebook.

    A spreadsheet reads each cell as text: what would be a formula begins with an apostrophe.

    Args:
        grades: of everything that was graded.
        without: students without gradable work, and why; each has a row of no points, without an assignment.
    """
    rows = [
        (
            grade.student,
            grade.topic,
            mark.task,
            mark.earned,
            mark.points,
            _shown(mark.score),
            mark.said,
            _note(grade),
        )
        for grade in grades
        for mark in grade.marks
    ]
    rows += [(student, "", "", 0, 0, "", one_line(why), "") for student, why in without.items()]
    return written_csv(("student", "assignment", "task", "points", "out_of", "score", "remark", "notebook"), rows)


def _shown(score: float | None) -> float | str:
    return "" if score is None else round(score, 6)


def _note(grade: Grade) -> str:
    note = "; ".join(grade.remarks)
    return note if len(note) <= _LONGEST_NOTE else f"{note[: _LONGEST_NOTE - 1]}…"


def totals_csv(grades: Sequence[Grade], without: Mapping[str, str], book: Gradebook | None = None) -> str:
    """One row per student: points that count of each assignment, empty where there are none, and their sum.

    `classroom export` makes of it what a learning platform imports.
    """
    final = (book or Gradebook()).all_points(grades, without)
    topics = sorted({topic for _, topic in final})
    students = sorted({student for student, _ in final} | set(without))
    rows = list[tuple[object, ...]]()
    for student in students:
        points = [final[student, topic].points if (student, topic) in final else "" for topic in topics]
        rows.append((student, *points, _whole(sum_in_order(each for each in points if not isinstance(each, str)))))
    return written_csv(("student", *topics, "total"), rows)


def _whole(points: float) -> float:
    found = round(points, 2)
    return int(found) if found == int(found) else found


def feedback_html(grade: Grade, final: FinalPoints | None = None, regrades: Sequence[Regrade] = ()) -> str:
    """A page for one student: nothing on it is executed or loaded from elsewhere."""
    rows = "".join(
        f'<tr><td>{escape(mark.task)}</td><td class="points">{mark.earned} / {mark.points}</td>'
        f"<td>{escape(mark.said)}</td></tr>"
        for mark in grade.marks
    )
    final = final or FinalPoints(graded=grade.earned)
    told = [*final.told, *(each.told(grade.earned) for each in regrades)]
    changes = "".join(f"<li>{escape(one_line(each))}</li>" for each in told)
    counts = f"<p><strong>{final.points} points count:</strong></p>" if final.told else ""
    notes = "".join(f"<li>{escape(each)}</li>" for each in grade.remarks)
    code = "".join(f"<pre>{escape(cell)}</pre>" for cell in grade.cells) or "<p>None was found.</p>"
    title = escape(f"{grade.topic}: {grade.student}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main><h1>{title}</h1>"
        f"<p><strong>{grade.earned} of {grade.points} points.</strong></p>"
        f"{f'{counts}<ul>{changes}</ul>' if changes else ''}"
        f"<table><thead><tr>{_HEADS}</tr></thead><tbody>{rows}</tbody></table>"
        f"{f'<ul>{notes}</ul>' if notes else ''}<h2>What was graded</h2>{code}</main></body></html>\n"
    )


def page_of(student: str, topic: str, folder: Path) -> Path:
    """Where the feedback on an assignment is; in a folder of its own, so that no student is named like a table."""
    return folder / "feedback" / student / f"{topic}.html"


def write_tables(
    grades: Sequence[Grade],
    files: OwnFiles,
    folder: Path,
    without: Mapping[str, str],
    book: Gradebook | None = None,
) -> None:
    """Write `grades.csv` and `totals.csv`; `without` names students without a gradable submission, and why."""
    files.write(folder / TOTALS, totals_csv(grades, without, book).encode())
    files.write(folder / GRADES, grades_csv(grades, without).encode())
