"""Grading one submission: its own cells between the teacher's, task by task, and a sentence for each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from mooncake_lab.batch.notebook import Cell, read_notebook
from mooncake_lab.exercises.grading.admission import ADMISSION
from mooncake_lab.exercises.grading.chunked import CHUNKED
from mooncake_lab.exercises.grading.confine import Allowance, UnconfinableError
from mooncake_lab.exercises.grading.eviction import EVICTION
from mooncake_lab.exercises.grading.keys import KEYS
from mooncake_lab.exercises.grading.placement import PLACEMENT
from mooncake_lab.exercises.grading.remote import Submission, SubmissionError
from mooncake_lab.exercises.grading.task import Assignment, Task
from mooncake_lab.store import NothingToEvictError

ASSIGNMENTS: Final[Mapping[str, Assignment]] = MappingProxyType(
    {each.topic: each for each in (KEYS, EVICTION, CHUNKED, PLACEMENT, ADMISSION)}
)
"""Every assignment by its topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What became of one task."""

    task: str
    points: int
    earned: int
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """One student's assignment."""

    student: str
    topic: str
    marks: tuple[Mark, ...]
    cells: tuple[str, ...]
    """The code of the student, for the feedback."""

    @property
    def earned(self) -> int:
        """Points."""
        return sum(mark.earned for mark in self.marks)

    @property
    def points(self) -> int:
        """The most there was."""
        return sum(mark.points for mark in self.marks)


def cells_of(path: Path, teacher: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What will be executed: the teacher's cells without tests, with the student's solutions in their places.

    A student's other cells are not executed, so that nothing of the assignment can be replaced.

    Returns:
        The code to execute in order, and the student's part of it.

    Raises:
        ValueError: when a file is not a notebook, or a solution cell is missing; it says which.
    """
    theirs = {
        _role(cell)["grade_id"]: cell.text for cell in read_notebook(path).cells if _role(cell).get("grade_id")
    }
    code: list[str] = []
    own: list[str] = []
    for cell in read_notebook(teacher).cells:
        role = _role(cell)
        if cell.cell_type != "code" or role.get("grade"):
            continue
        if role.get("solution"):
            name = role["grade_id"]
            if name not in theirs:
                raise ValueError(f"{path} has lost the cell {name!r}, in which the solution belongs")
            own.append(theirs[name])
            code.append(theirs[name])
        else:
            code.append(cell.text)
    return tuple(code), tuple(own)


def grade(path: Path, teacher: Path, *, student: str, seed: int, allowance: Allowance | None = None) -> Grade:
    """Grade one notebook; a bad one is a grade, not an exception.

    Args:
        path: what was handed in.
        teacher: the source of the assignment, named after its topic.
        student: whose it is.
        seed: of hidden workloads; the same for a class.
        allowance: what the submission may use.

    Raises:
        ValueError: when the topic has no assignment.
        UnconfinableError: when this machine cannot confine a submission.
    """
    topic = teacher.stem
    if topic not in ASSIGNMENTS:
        raise ValueError(f"there is no assignment {topic!r}; there are {', '.join(ASSIGNMENTS)}")
    assignment = ASSIGNMENTS[topic]
    try:
        code, own = cells_of(path, teacher)
    except Exception as error:  # noqa: BLE001  # a file that was handed in may be anything
        marks = tuple(_lost(task, str(error)) for task in assignment.tasks)
        return Grade(student=student, topic=topic, marks=marks, cells=())
    marks = tuple(_marks(assignment, code, seed, allowance))
    return Grade(student=student, topic=topic, marks=marks, cells=own)


def _marks(
    assignment: Assignment, code: tuple[str, ...], seed: int, allowance: Allowance | None
) -> Iterator[Mark]:
    """Task by task; after a failed one the submission starts afresh, so that no other task suffers from it."""
    submission: Submission | None = None
    try:
        for number, task in enumerate(assignment.tasks):
            if submission is None:
                try:
                    submission = Submission(code, allowance)
                except UnconfinableError:
                    raise
                except Exception as error:  # noqa: BLE001  # it does not even load, and will not the next time
                    yield from (_lost(each, _told(error)) for each in assignment.tasks[number:])
                    return
            try:
                said = task.check(submission, seed)
            except Exception as error:  # noqa: BLE001  # answers may be wrong in ways that no check foresees
                yield _lost(task, _told(error))
                submission.close()
                submission = None
            else:
                yield Mark(task=task.name, points=task.points, earned=task.points, said=said)
    finally:
        if submission is not None:
            submission.close()


def _told(error: Exception) -> str:
    """What a student reads of it."""
    if isinstance(error, SubmissionError):
        return str(error)
    if isinstance(error, NothingToEvictError):
        return "it raised NothingToEvictError while blocks could go"
    return f"its answers could not be used: {type(error).__name__}: {error}"


def _lost(task: Task, said: str) -> Mark:
    return Mark(task=task.name, points=task.points, earned=0, said=said)


def _role(cell: Cell) -> dict[str, Any]:
    """What nbgrader was told of a cell."""
    told = cell.metadata.get("nbgrader")
    return told if isinstance(told, dict) else {}
