"""What a class gets and what it hands in: assignments without solutions, and the notebooks that can be graded."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

LARGEST_NOTEBOOK_BYTES: Final = 50_000_000
"""Size limit for a submitted notebook; most of a large one is outputs, which are not read."""
COLLECTED: Final = "collected.csv"
"""The table of what was collected from a learning platform, beside the folders of students."""
_MOST_NAMED: Final = 10
"""Files of one student that are named one by one."""
_LONGEST_LABEL: Final = 50
"""Letters; a file's name has to hold them and more."""
_WRITTEN_BY_NBGRADER: Final = ("timestamp.txt", "submission_secret.txt")
"""Beside a notebook that nbgrader collected; no student put them there."""


@dataclass(frozen=True, slots=True)
class HandedIn:
    """One notebook to grade."""

    student: str
    """As `student_label` writes the folder's name."""
    path: Path
    teacher: Path
    """The instructor's notebook of the same topic."""


@dataclass(frozen=True, slots=True)
class Ungraded:
    """A file, link or folder that is not graded."""

    path: Path
    why: str
    """The rest of a sentence that begins with the path."""

    def __str__(self) -> str:
        return f"{printable(self.path)} {self.why}"


@dataclass(frozen=True, slots=True)
class Collection:
    """Everything that a class handed in."""

    notebooks: tuple[HandedIn, ...]
    ungraded: tuple[Ungraded, ...]
    without: Mapping[str, str]
    """Students without a gradable submission, and the reason."""


def collect(submissions: Path, sources: Path) -> Collection:
    """Go through a folder of submissions, file by file.

    A notebook to grade is `STUDENT/TOPIC.ipynb`, or `STUDENT/TOPIC/TOPIC.ipynb` as nbgrader collects them. Links
    are not followed. Hidden files and folders (`.ipynb_checkpoints`, `.DS_Store`) and what nbgrader writes beside
    a notebook are passed over; everything else is named.

    Args:
        submissions: one folder a student.
        sources: the folder of the instructor's notebooks, one a topic.
    """
    teachers = {path.stem: path for path in sorted(sources.glob("*.ipynb"))}
    notebooks: list[HandedIn] = []
    ungraded: list[Ungraded] = []
    without: dict[str, str] = {}
    for entry in sorted(path for path in submissions.iterdir() if not path.name.startswith(".")):
        if entry.name == COLLECTED and entry.is_file():
            continue
        if not entry.is_dir():
            ungraded.append(Ungraded(entry, "lies in no student's folder"))
            continue
        taken, left = _of_student(entry, teachers)
        if not taken:
            without[student_label(entry.name)] = _why_nothing(entry, left)
            left.append(Ungraded(entry, "holds nothing that can be graded"))
        notebooks += taken
        ungraded += left
    return Collection(tuple(notebooks), tuple(ungraded), MappingProxyType(without))


def in_short(ungraded: Sequence[Ungraded], submissions: Path) -> Iterator[str]:
    """A sentence for each thing that is not graded, but one with a count for many files of the same student."""
    by_student: dict[str, list[Ungraded]] = {}
    for each in ungraded:
        student, *below = each.path.relative_to(submissions).parts or ("",)
        by_student.setdefault(student if below or each.path.is_dir() else "", []).append(each)
    for student, some in by_student.items():
        folder = submissions / student
        files = [each for each in some if each.path != folder]
        yield from map(str, files[:_MOST_NAMED])
        if more := files[_MOST_NAMED:]:
            yield f"{len(more):,} more below {printable(folder)}, the first of them {more[0]}"
        yield from (str(each) for each in some if each.path == folder)


def printable(text: Path | str) -> str:
    """A text in printable form: a file name may contain any bytes but two."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def student_label(folder: str) -> str:
    """A student's name in tables and in the names of pages: printable, short, and of no other folder.

    Two folders whose names differ only in what cannot be printed have different labels.
    """
    shown = printable(folder)[:_LONGEST_LABEL].strip().replace("~", "-")
    if shown == folder:
        return folder
    return f"{shown}~{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"


def _of_student(folder: Path, teachers: Mapping[str, Path]) -> tuple[list[HandedIn], list[Ungraded]]:
    """What is graded of one student, at most one notebook a topic, and what is not."""
    if folder.is_symlink():
        return [], [Ungraded(folder, "is a link")]
    files, ungraded = _below(folder)
    taken: dict[str, HandedIn] = {}
    for path in files:
        topic = path.parent.name
        if path.name in _WRITTEN_BY_NBGRADER and path.parent == folder / topic and topic in teachers:
            continue
        try:
            why = _refused(path, folder, teachers)
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
        if not why and path.stem in taken:
            first = printable(taken[path.stem].path.relative_to(folder.parent))
            why = f"is a second one of this assignment; {first} is graded"
        if why:
            ungraded.append(Ungraded(path, why))
        else:
            taken[path.stem] = HandedIn(student_label(folder.name), path, teachers[path.stem])
    return list(taken.values()), ungraded


def _below(folder: Path) -> tuple[list[Path], list[Ungraded]]:
    """Whatever lies below a folder and is no folder, in order; and the folders that cannot be read."""
    files: list[Path] = []
    unread: list[Ungraded] = []
    waiting = [folder]  # not recursion: a student may nest folders as deeply as the system allows
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        (waiting if entry.is_dir(follow_symlinks=False) else files).append(here / entry.name)
        except OSError as error:
            unread.append(Ungraded(here, f"cannot be read: {error.strerror}"))
    return sorted(files), unread


def _refused(path: Path, folder: Path, teachers: Mapping[str, Path]) -> str:
    """Why a file of a student's folder is not graded; empty when it is."""
    if path.is_symlink():
        return "is a link"
    if path.suffix != ".ipynb" or path.stem not in teachers:
        return f"is not named after an assignment ({', '.join(f'{topic}.ipynb' for topic in teachers)})"
    if path.parent not in (folder, folder / path.stem):
        student = printable(folder.name)
        return f"lies neither at {student}/{path.name} nor at {student}/{path.stem}/{path.name}"
    if not path.is_file():
        return "is not a file"
    if path.stat().st_size > LARGEST_NOTEBOOK_BYTES:
        return f"is larger than {LARGEST_NOTEBOOK_BYTES:,} bytes"
    path.open("rb").close()  # an unreadable file is reported here and does not stop the grading
    return ""


def _why_nothing(folder: Path, left: list[Ungraded]) -> str:
    """Reason in a table of points for a student without a graded submission."""
    if not left:
        return "nothing could be graded: the folder is empty"
    first = Ungraded(left[0].path.relative_to(folder.parent), left[0].why)
    others = len(left) - 1
    return f"nothing could be graded: {first}" + (f"; and {others} more that could not" if others else "")


MARKS: Final = ("### BEGIN SOLUTION", "### END SOLUTION", "### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")
"""Between these lie what a student must not see."""


def release(source: Path, folder: Path) -> Path:
    """Write an assignment without solutions and hidden tests, its other cells locked; the path of the copy.

    Raises:
        ValueError: when a mark is left over, so that something would leak, or nbgrader's metadata are wrong.
    """
    import nbformat
    from nbgrader.preprocessors import (
        CheckCellMetadata,
        ClearHiddenTests,
        ClearOutput,
        ClearSolutions,
        ComputeChecksums,
        LockCells,
    )

    steps = (LockCells, ClearSolutions, ClearOutput, CheckCellMetadata, ClearHiddenTests, ComputeChecksums)
    notebook: Any = nbformat.read(source, as_version=4)
    resources: Any = {"nbgrader": {"assignment": source.stem, "notebook": source.stem, "student": "."}}
    for step in steps:
        notebook, resources = step().preprocess(notebook, resources)
    for cell in notebook.cells:  # a test of what is still missing must not stop the cells behind it
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "raises-exception"]
    text = nbformat.writes(notebook) + "\n"
    left = [mark for mark in MARKS if mark in text]
    if left:
        raise ValueError(f"{source}: {left[0]!r} is left over; every BEGIN needs its END in the same cell")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / source.name
    path.write_text(text, encoding="utf-8")
    return path
