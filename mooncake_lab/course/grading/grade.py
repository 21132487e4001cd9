"""Grading one submission: its solution cells between the given cells, with points and a sentence per task."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mooncake_lab.course.grading.cache_assignments import EVICTION, KEYS
from mooncake_lab.course.grading.cells import Handed, prepare
from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.remarks import one_line
from mooncake_lab.course.grading.remote import Budget, Submission, SubmissionError
from mooncake_lab.course.grading.scheduling_assignments import ADMISSION, CHUNKED, PLACEMENT
from mooncake_lab.course.grading.task import Assignment, OpenResult, Task
from mooncake_lab.store import NothingToEvictError

ASSIGNMENTS: Final[Mapping[str, Assignment]] = MappingProxyType(
    {each.topic: each for each in (KEYS, EVICTION, CHUNKED, PLACEMENT, ADMISSION)}
)
"""Every assignment by its topic."""
_MOST_REMARKS: Final = 100
_LONGEST_CODE: Final = 20_000
"""Letters of a cell that the feedback shows, of twenty cells at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The result of one task.

    Its remark is one line (`one_line`), whatever a submission answered.
    """

    task: str
    points: int
    earned: int
    said: str
    score: float | None = None
    """Of an open task: how good the submission is, whether or not it has the points."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "said", one_line(self.said))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """One student's assignment."""

    student: str
    topic: str
    marks: tuple[Mark, ...]
    remarks: tuple[str, ...] = ()
    """About the whole notebook: what was left out, and what was joined."""
    cells: tuple[str, ...] = ()
    """The code of the student, for the feedback."""
    failed: bool = False
    """Whether the grader could not grade it, through no answer of the submission."""
    cpu_s: float = field(default=0.0, compare=False)
    """Processor time that grading took, of the grader and of the submission."""

    @property
    def earned(self) -> int:
        """Points."""
        return sum(mark.earned for mark in self.marks)

    @property
    def points(self) -> int:
        """The most that can be earned."""
        return sum(mark.points for mark in self.marks)


def grade(
    path: Path,
    teacher: Path,
    *,
    student: str,
    seed: int | str,
    allowance: Allowance | None = None,
) -> Grade:
    """Grade one notebook; a bad one is a grade, not an exception.

    Each task runs in a new process and has its own hidden workload, so a submission cannot use in one task what it
    saw in another.

    Args:
        path: what was handed in.
        teacher: the source of the assignment, named after its topic.
        student: whose it is.
        seed: of hidden workloads; the same for a class.
        allowance: what the submission may use, over all tasks.

    Raises:
        ValueError: when the topic has no assignment.
        UnconfinableError: when this machine cannot confine a submission.
    """
    topic = teacher.stem
    if topic not in ASSIGNMENTS:
        raise ValueError(f"there is no assignment {topic!r}; there are {', '.join(ASSIGNMENTS)}")
    assignment, began_s = ASSIGNMENTS[topic], time.process_time()
    budget = Budget(allowance=allowance or Allowance())
    try:
        handed = prepare(path, teacher)
    except Exception as error:  # noqa: BLE001  # a file that was handed in may be anything
        marks = tuple(_lost(task, str(error)) for task in assignment.tasks)
        return Grade(student=student, topic=topic, marks=marks)
    return Grade(
        student=student,
        topic=topic,
        marks=tuple(_marks(assignment, handed, str(seed), budget)),
        remarks=_remarks(handed),
        cells=tuple(cell.text[:_LONGEST_CODE] for cell in handed.own[:20]),
        cpu_s=time.process_time() - began_s + budget.cpu_used_s,
    )


def failed_grade(student: str, topic: str, why: str) -> Grade:
    """No points, because the grader itself ended or failed."""
    marks = tuple(_lost(task, why) for task in ASSIGNMENTS[topic].tasks)
    return Grade(student=student, topic=topic, marks=marks, failed=True)


def _remarks(handed: Handed) -> tuple[str, ...]:
    shown = handed.remarks[:_MOST_REMARKS]
    more = len(handed.remarks) - len(shown)
    return (*map(one_line, shown), *((f"and {more:,} more remarks of this kind",) if more else ()))


def _marks(assignment: Assignment, handed: Handed, seed: str, budget: Budget) -> Iterator[Mark]:
    hopeless = ""
    for task in assignment.tasks:
        if hopeless:
            yield _lost(task, hopeless)
            continue
        try:
            submission = Submission(handed.code, budget=budget)
        except (SubmissionError, NothingToEvictError, RecursionError) as error:  # it will not load the next time
            hopeless = _told(error)
            yield _lost(task, hopeless)
            continue
        with submission:
            lost = [said for name, said in handed.lost.items() if not task.cells or name in task.cells]
            yield _mark(task, submission, f"{seed}/{assignment.topic}/{task.name}", lost)


def _mark(task: Task, submission: Submission, seed: str, lost: Sequence[str]) -> Mark:
    """The result of a task.

    Args:
        task: what is asked.
        submission: of whom.
        seed: of the hidden workload.
        lost: what is said of the cells of this task that are not there.
    """
    try:
        found = task.check(submission, seed)
    except Exception as error:  # noqa: BLE001  # answers may be wrong in ways that no check foresees
        why = [*lost, *submission.failed_cells]
        cells = f" ({'; '.join(why)})" if why else ""
        return _lost(task, f"{_told(error)}{cells}", error.score if isinstance(error, SubmissionError) else None)
    said, score = (found.said, found.score) if isinstance(found, OpenResult) else (found, None)
    return Mark(task=task.name, points=task.points, earned=task.points, said=said, score=score)


def _told(error: Exception) -> str:
    """What a student reads of it."""
    if isinstance(error, SubmissionError):
        return str(error)
    if isinstance(error, NothingToEvictError):
        return "it raised NothingToEvictError although a block could be evicted"
    return f"its answers could not be used: {type(error).__name__}: {error}"


def _lost(task: Task, said: str, score: float | None = None) -> Mark:
    return Mark(task=task.name, points=task.points, earned=0, said=said, score=score)
