"""What a class reads: a table of points, and for each student a page with every task and what was said of it."""

import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mooncake_lab.exercises.grading.grade import Grade

_STYLE: Final = """
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif; }
body { max-width: 48rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .4rem .6rem; border-bottom: 1px solid #8886; vertical-align: top; }
td.points { white-space: nowrap; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid #8886; }
"""


_HEADS: Final = "".join(f'<th scope="col">{head}</th>' for head in ("task", "points", "remark"))
_NOBODY: Final[Mapping[str, str]] = MappingProxyType({})


def grades_csv(grades: Sequence[Grade], without: Mapping[str, str] = _NOBODY) -> str:
    """One row a task: student, assignment, task, points, out of, remark.

    Args:
        grades: of everything that was graded.
        without: students of whom nothing could be, and why; each has a row of no points, without an assignment.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("student", "assignment", "task", "points", "out_of", "remark"))
    for grade in grades:
        for mark in grade.marks:
            writer.writerow((grade.student, grade.topic, mark.task, mark.earned, mark.points, mark.said))
    for student, why in without.items():
        writer.writerow((student, "", "", 0, 0, why))
    return text.getvalue()


def feedback_html(grade: Grade) -> str:
    """A page for one student: nothing on it is executed or loaded from elsewhere."""
    rows = "".join(
        f'<tr><td>{escape(mark.task)}</td><td class="points">{mark.earned} / {mark.points}</td>'
        f"<td>{escape(mark.said)}</td></tr>"
        for mark in grade.marks
    )
    code = "".join(f"<pre>{escape(cell)}</pre>" for cell in grade.cells) or "<p>None was found.</p>"
    title = escape(f"{grade.topic}: {grade.student}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main><h1>{title}</h1>"
        f"<p><strong>{grade.earned} of {grade.points} points.</strong></p>"
        f"<table><thead><tr>{_HEADS}</tr></thead>"
        f"<tbody>{rows}</tbody></table><h2>What was graded</h2>{code}</main></body></html>\n"
    )


def write_reports(grades: Sequence[Grade], folder: Path, without: Mapping[str, str] = _NOBODY) -> Path:
    """Write `grades.csv` and `student/topic.html` below a folder; the path of the table.

    `without` names students of whom nothing could be graded, and why.
    """
    for grade in grades:
        page = folder / grade.student / f"{grade.topic}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(feedback_html(grade), encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "grades.csv"
    table.write_text(grades_csv(grades, without), encoding="utf-8")
    return table
