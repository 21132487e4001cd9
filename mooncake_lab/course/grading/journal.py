"""Grades on disk as they are given: whatever ends the grader, what it had graded stays."""

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

import mooncake_lab
from mooncake_lab.batch.provenance import tree_digest
from mooncake_lab.course.grading.collect import HandedIn
from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.grade import Grade

_NAME: Final = "grades.jsonl"


class Entry(msgspec.Struct, frozen=True):
    """A grade, and the name of what it was given for."""

    key: str
    grade: Grade


class Journal:
    """One line per grade in a file, each on disk before the next is begun; mutable because it grows.

    A line that is not whole, because the grader or the machine ended while it was written, is dropped.

    Args:
        folder: where the grades are.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _NAME
        self._grades: dict[str, Grade] = {}
        whole = 0
        raw = self._path.read_bytes() if self._path.exists() else b""
        for line in raw.splitlines(keepends=True):
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except msgspec.MsgspecError:
                break
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            self._grades[entry.key] = entry.grade
        if whole < len(raw):
            os.truncate(self._path, whole)

    def find(self, key: str) -> Grade | None:
        """The grade that was given for this."""
        return self._grades.get(key)

    def add(self, key: str, grade: Grade) -> None:
        """Keep a grade, on disk when this returns."""
        self._grades[key] = grade
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(Entry(key, grade)) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def grade_key(handed: HandedIn, seed: str, allowance: Allowance, *, borrowing: bool) -> str:
    """One name for everything that a grade depends on: both notebooks, the seed, the limits, this package."""
    whole = hashlib.sha256()
    parts = (handed.student, handed.teacher.stem, seed, repr(allowance), str(borrowing), _package_digest())
    for part in (*map(str.encode, parts), handed.path.read_bytes(), handed.teacher.read_bytes()):
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


@cache
def _package_digest() -> str:
    package = Path(mooncake_lab.__file__).parent
    version = f"{mooncake_lab.__version__}, Python {sys.version_info[:2]}"
    return f"{version}, {tree_digest(package, package.rglob('*.py'))}"
