"""Grading a class: notebook by notebook, several at a time, each grade kept before the next is waited for.

Grades go to disk as they are given: if the grader ends, what it had graded stays.
"""

import hashlib
import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

import mooncake_lab
from mooncake_lab.batch.provenance import tree_digest
from mooncake_lab.course.grading.collect import Collection, HandedIn
from mooncake_lab.course.grading.confine import Allowance, end_with_parent
from mooncake_lab.course.grading.grade import Grade, grade
from mooncake_lab.course.grading.report import page_of, replace_file, write_page, write_tables

_NAME: Final = "grades.jsonl"
_SECRET: Final = "secret"  # noqa: S105  # the name of a file
_SECRET_BYTES: Final = 16


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
        replace_file(path, f"{secrets.token_hex(_SECRET_BYTES)}\n", mode=0o600)
    found = path.read_text(encoding="ascii").strip()
    if len(found) != 2 * _SECRET_BYTES or not set(found) <= set("0123456789abcdef"):
        raise ValueError(f"{path} holds {found[:40]!r}; {2 * _SECRET_BYTES} hexadecimal digits are needed")
    return found


class JournalEntry(msgspec.Struct, frozen=True):
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
        self.grades: dict[str, Grade] = {}
        whole = 0
        raw = self._path.read_bytes() if self._path.exists() else b""
        for line in raw.splitlines(keepends=True):
            try:
                entry = msgspec.json.decode(line, type=JournalEntry)
            except msgspec.MsgspecError:
                break
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            self.grades[entry.key] = entry.grade
        if whole < len(raw):
            os.truncate(self._path, whole)

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
    parts = (handed.student, handed.teacher.stem, seed, repr(rules.allowance), str(rules.borrowing))
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
    borrowing: bool = False
    """Whether answers that are the package's own earn points."""


def grade_class(
    collected: Collection, folder: Path, rules: Rules, report: Callable[[int], object] = lambda _: None
) -> list[Grade]:
    """Grade everything, and keep each grade, its page and both tables as soon as it is given.

    What has a grade from an earlier run is graded again only when something has changed that it depends on.

    Args:
        collected: what was handed in.
        folder: where the grades go.
        rules: how it is graded.
        report: told of how many more are done.

    Raises:
        UnconfinableError: when this machine cannot confine a submission; what was graded before stays.
    """
    seed = f"{rules.seed}/{class_secret(folder)}"
    journal = Journal(folder)
    keys = [grade_key(each, seed, rules) for each in collected.notebooks]
    found = {key: journal.grades.get(key) for key in keys}
    todo = [
        (key, each)
        for key, each in zip(keys, collected.notebooks, strict=True)
        if found[key] is None or not page_of(each.student, each.teacher.stem, folder).exists()
    ]
    report(len(keys) - len(todo))

    def given() -> list[Grade]:
        return [one for key in keys if (one := found[key]) is not None]

    write_tables(given(), folder, collected.without)
    for key, one in _graded(todo, seed, rules):
        write_page(one, folder)
        journal.add(key, one)
        found[key] = one
        write_tables(given(), folder, collected.without)
        report(1)
    return given()


def _graded(todo: list[tuple[str, HandedIn]], seed: str, rules: Rules) -> Iterator[tuple[str, Grade]]:
    """Grades in the order in which they are given."""
    if rules.jobs == 1:
        yield from ((key, _grade(each, seed, rules)) for key, each in todo)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(rules.jobs, mp_context=spawn, initializer=end_with_parent) as pool:
        waiting = {pool.submit(_grade, each, seed, rules): key for key, each in todo}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _grade(handed: HandedIn, seed: str, rules: Rules) -> Grade:
    return grade(
        handed.path,
        handed.teacher,
        student=handed.student,
        seed=seed,
        allowance=rules.allowance,
        borrowing=rules.borrowing,
    )
