"""From the points of the grader to those that count: what is taken off for lateness, and what a teacher changes.

Both are kept in tables beside the grades, and neither changes a grade: `extensions.csv` moves deadlines, and
`adjust.csv` adds or takes points, with a reason that the student reads.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from mooncake_lab.core import sum_in_order
from mooncake_lab.course.grading.grade import ASSIGNMENTS, Grade
from mooncake_lab.course.grading.inbox import UNKNOWN_DAYS, read_collected
from mooncake_lab.course.grading.tables import TableRow, number, number_in, read_csv

ADJUST: Final = "adjust.csv"
EXTENSIONS: Final = "extensions.csv"
_ANY: Final = "*"
_RULE: Final = re.compile(r"(?P<percent>\d+(?:\.\d+)?)\s*%\s*/\s*day")
_MOST_POINTS: Final = 1000.0
_MOST_DAYS: Final = 1000.0


@dataclass(frozen=True, slots=True)
class LateRule:
    """A share of an assignment's points for each day begun after its deadline."""

    percent_per_day: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """A rule as a teacher writes it, `10%/day`.

        Raises:
            ValueError: when it is written in another way, or takes more than all points for a day.
        """
        match = _RULE.fullmatch(text.strip())
        if not match or not 0 < float(match["percent"]) <= 100:
            raise ValueError(
                f"a rule for late work is {text!r}; allowed are 0.1%/day to 100%/day, such as 10%/day"
            )
        return cls(float(match["percent"]))


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Points that a teacher gives or takes, and why."""

    points: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalPoints:
    """What counts of one student's assignment, and how it came about."""

    graded: int
    late_days: float = 0.0
    deducted: float = 0.0
    adjustments: tuple[Adjustment, ...] = ()
    guessed: bool = False
    """Whether the platform did not tell by how many days it was late, so that one was taken."""

    @property
    def points(self) -> float:
        """At least 0; whole points are integers."""
        given = self.graded - self.deducted + sum(each.points for each in self.adjustments)
        found = round(max(given, 0.0), 2)
        return int(found) if found == int(found) else found

    @property
    def told(self) -> tuple[str, ...]:
        """Sentences for the student; none where the grader's points count as they are."""
        guessed = " (the true number is unknown)" if self.guessed else ""
        late = (f"{self.late_days:g} days late{guessed}: -{self.deducted:g} points",)
        changed = tuple(f"{each.points:+g} points: {each.why}" for each in self.adjustments)
        return (*(late if self.deducted else ()), *changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradebook:
    """What counts besides the grader's points; without any table, nothing does."""

    rule: LateRule | None = None
    days_late: Mapping[tuple[str, str], str] = field(default_factory=lambda: MappingProxyType({}))
    """Of a student's assignment, as the table of what was collected has it."""
    extensions: Sequence[TableRow] = ()
    adjustments: Sequence[TableRow] = ()

    def final(self, grade: Grade) -> FinalPoints:
        """The points that count for a grade."""
        return self._final(grade.student, grade.topic, grade.earned, grade.points)

    def _final(self, student: str, topic: str, graded: int, out_of: int) -> FinalPoints:
        told = self.days_late.get((student, topic), "")
        guessed = told == UNKNOWN_DAYS
        days = 1.0 if guessed else number(told or "0")
        days = max(
            days - sum_in_order(number(row["days"]) for row in self._about(self.extensions, student, topic)), 0.0
        )
        share = min(days * self.rule.percent_per_day / 100, 1.0) if self.rule else 0.0
        return FinalPoints(
            graded=graded,
            late_days=days,
            deducted=round(min(share * out_of, graded), 2),
            guessed=guessed,
            adjustments=tuple(
                Adjustment(number(row["points"]), row["why"])
                for row in self._about(self.adjustments, student, topic)
            ),
        )

    @staticmethod
    def _about(rows: Iterable[TableRow], student: str, topic: str) -> list[TableRow]:
        return [row for row in rows if row["student"] == student and row["assignment"] in (topic, _ANY)]

    def all_points(self, grades: Iterable[Grade], without: Iterable[str]) -> dict[tuple[str, str], FinalPoints]:
        """By student and assignment; also where a teacher gave points for what was not handed in as a notebook."""
        found = {(grade.student, grade.topic): self.final(grade) for grade in grades}
        known = {student for student, _ in found} | {*without}
        for row in self.adjustments:
            key = row["student"], row["assignment"]
            if key not in found and row["student"] in known and row["assignment"] != _ANY:
                found[key] = self._final(*key, 0, 0)
        return found

    def about_nobody(self, students: Iterable[str]) -> list[str]:
        """A sentence for each row that names a student who is not in this class."""
        known = {*students}
        rows = (*self.extensions, *self.adjustments)
        return [
            f"{row.where}: there is no student {row['student']!r}" for row in rows if row["student"] not in known
        ]


def open_book(out: Path, submissions: Path, rule: LateRule | None = None) -> Gradebook:
    """Read the tables of a folder of grades and the one of what was collected.

    Raises:
        ValueError: when a table cannot be used; it names the file and the row.
    """
    collected = read_collected(submissions)
    for each in collected:
        if each.days_late not in ("", UNKNOWN_DAYS):
            number_in(
                TableRow({"days_late": each.days_late}, f"{submissions.name}, {each.student}"),
                "days_late",
                0,
                _MOST_DAYS,
            )
    extensions = _rows(out / EXTENSIONS, ("student", "assignment", "days"))
    for row in extensions:
        number_in(row, "days", 0, _MOST_DAYS)
    adjustments = _rows(out / ADJUST, ("student", "assignment", "points", "why"))
    for row in adjustments:
        number_in(row, "points", -_MOST_POINTS, _MOST_POINTS)
        if not row.get("why"):
            raise ValueError(f"{row.where}: points are given or taken without a reason; why may not be empty")
    days = {(each.student, each.assignment): each.days_late for each in collected}
    return Gradebook(rule=rule, days_late=MappingProxyType(days), extensions=extensions, adjustments=adjustments)


def _rows(path: Path, columns: tuple[str, ...]) -> list[TableRow]:
    rows = read_csv(path, columns) if path.exists() else []
    for row in rows:
        if row.get("assignment") not in (*ASSIGNMENTS, _ANY):
            raise ValueError(
                f"{row.where}: there is no assignment {row.get('assignment', '')!r}; allowed are"
                f" {', '.join(ASSIGNMENTS)} and {_ANY}"
            )
    return rows
