"""What a class reads: tables of points, and for each student a page with every task and what was said of it."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from mooncake_lab.course.grading.grade import Grade, one_line


def replace_file(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file so that each reader finds the complete old file or the complete new one.

    Args:
        path: of the file.
        text: all of it.
        mode: who may read and write a new file, before the umask.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.touch(mode=mode)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


_STYLE: Final = """
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif; }
body { max-width: 48rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .4rem .6rem; border-bottom: 1px solid #8886; vertical-align: top; }
td.points { white-space: nowrap; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid #8886; }
"""


_HEADS: Final = "".join(f'<th scope="col">{head}</th>' for head in ("task", "points", "remark"))
_FORMULA: Final = ("=", "+", "-", "@", "|", "%")
"""With these a cell begins that a spreadsheet computes."""


def grades_csv(grades: Sequence[Grade], without: Mapping[str, str]) -> str:
    """One row per task: student, assignment, task, points, out of, remark, flag.

    A spreadsheet reads each cell as text: what would be a formula begins with an apostrophe.

    Args:
        grades: of everything that was graded.
        without: students without gradable work, and why; each has a row of no points, without an assignment.
    """
    rows = [
        (grade.student, grade.topic, mark.task, mark.earned, mark.points, mark.said, "; ".join(grade.remarks))
        for grade in grades
        for mark in grade.marks
    ]
    rows += [(student, "", "", 0, 0, one_line(why), "") for student, why in without.items()]
    return _csv(("student", "assignment", "task", "points", "out_of", "remark", "notebook"), rows)


def totals_csv(grades: Sequence[Grade], without: Mapping[str, str]) -> str:
    """One row per student: points of each assignment, empty where nothing was graded, and their sum.

    Learning platforms (Canvas, Moodle) import such a table after a column of theirs has been added.
    """
    topics = sorted({grade.topic for grade in grades})
    earned = {(grade.student, grade.topic): grade.earned for grade in grades}
    students = sorted({grade.student for grade in grades} | set(without))
    table = [[earned.get((student, topic), "") for topic in topics] for student in students]
    rows = [(who, *row, sum(map(int, filter(None, row)))) for who, row in zip(students, table, strict=True)]
    return _csv(("student", *topics, "total"), rows)


def feedback_html(grade: Grade) -> str:
    """A page for one student: nothing on it is executed or loaded from elsewhere."""
    rows = "".join(
        f'<tr><td>{escape(mark.task)}</td><td class="points">{mark.earned} / {mark.points}</td>'
        f"<td>{escape(mark.said)}</td></tr>"
        for mark in grade.marks
    )
    notes = "".join(f"<li>{escape(each)}</li>" for each in grade.remarks)
    code = "".join(f"<pre>{escape(cell)}</pre>" for cell in grade.cells) or "<p>None was found.</p>"
    title = escape(f"{grade.topic}: {grade.student}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main><h1>{title}</h1>"
        f"<p><strong>{grade.earned} of {grade.points} points.</strong></p>"
        f"<table><thead><tr>{_HEADS}</tr></thead><tbody>{rows}</tbody></table>"
        f"{f'<ul>{notes}</ul>' if notes else ''}<h2>What was graded</h2>{code}</main></body></html>\n"
    )


def write_page(grade: Grade, folder: Path) -> None:
    """Write the feedback of one grade."""
    page = page_of(grade.student, grade.topic, folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(page, feedback_html(grade))


def page_of(student: str, topic: str, folder: Path) -> Path:
    """Where the feedback on an assignment is; in a folder of its own, so that no student is named like a table."""
    return folder / "feedback" / student / f"{topic}.html"


def write_tables(grades: Sequence[Grade], folder: Path, without: Mapping[str, str]) -> None:
    """Write `grades.csv` and `totals.csv`; `without` names students without a gradable submission, and why."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "totals.csv", totals_csv(grades, without))
    replace_file(folder / "grades.csv", grades_csv(grades, without))


def _csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([head, *([_as_text(cell) for cell in row] for row in rows)])
    return text.getvalue()


def _as_text(cell: object) -> object:
    """A cell that no spreadsheet takes for a formula, without control characters."""
    if not isinstance(cell, str):
        return cell
    shown = "".join(letter if letter.isprintable() else "?" for letter in cell)
    return f"'{shown}" if shown.lstrip().startswith(_FORMULA) else shown
