"""Grading a notebook again, with a reason that stays beside the grades."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooncake_lab.core import complete_file
from mooncake_lab.course.grading.tables import read_csv, written_csv

REGRADES: Final = "regrades.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrade:
    """One row of the table: a notebook that was graded again."""

    day: str
    student: str
    assignment: str
    points_before: str
    why: str

    def told(self, points: int) -> str:
        """A sentence for the student."""
        return f"graded again on {self.day}: {self.why}; {self.points_before} points before, {points} now"


_COLUMNS: Final = tuple(field.name for field in dataclasses.fields(Regrade))


def read_regrades(out: Path) -> list[Regrade]:
    """All that were graded again, in order.

    Raises:
        ValueError: when the table cannot be used.
    """
    path = out / REGRADES
    rows = read_csv(path, _COLUMNS) if path.exists() else []
    return [Regrade(**{name: row[name] for name in _COLUMNS}) for row in rows]


def ask_again(out: Path, page: Path, graded: Mapping[tuple[str, str], int], one: Regrade) -> None:
    """Note a reason, and remove a feedback page, so that the next run grades its notebook anew.

    Args:
        out: the folder of grades.
        page: with the feedback.
        graded: points by student and assignment.
        one: what is to be graded again; its points are filled in.

    Raises:
        ValueError: when there is no such grade, or no reason.
    """
    key = one.student, one.assignment
    if not one.why.strip():
        raise ValueError("a notebook is graded again for a reason; --why may not be empty")
    if key not in graded:
        students = sorted({student for student, topic in graded if topic == one.assignment})
        raise ValueError(
            f"there is no grade of {one.student!r} for {one.assignment!r}; graded are"
            f" {', '.join(students) or 'none'}"
        )
    rows = [*read_regrades(out), dataclasses.replace(one, points_before=str(graded[key]))]
    with complete_file(out / REGRADES) as file:
        file.write(written_csv(_COLUMNS, [dataclasses.astuple(row) for row in rows]).encode())
    page.unlink(missing_ok=True)
