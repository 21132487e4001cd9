"""Grading a class: notebook by notebook, several at a time, each grade kept before the next is waited for."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mooncake_lab.course.grading.collect import Collection, HandedIn
from mooncake_lab.course.grading.confine import Allowance, end_with_parent
from mooncake_lab.course.grading.grade import Grade, grade
from mooncake_lab.course.grading.hidden import class_secret
from mooncake_lab.course.grading.journal import Journal, grade_key
from mooncake_lab.course.grading.report import page_of, write_page, write_tables


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
    afresh: bool = False
    """Whether to grade also what has a grade already."""


def _nobody(done: int) -> None:
    """Report no progress."""
    del done


def grade_class(
    collected: Collection, folder: Path, rules: Rules, report: Callable[[int], None] = _nobody
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
    keys = [grade_key(each, seed, rules.allowance, borrowing=rules.borrowing) for each in collected.notebooks]
    found = {key: None if rules.afresh else journal.find(key) for key in keys}
    todo: list[tuple[str, HandedIn]] = []
    for key, each in zip(keys, collected.notebooks, strict=True):
        if found[key] is None or not page_of(each.student, each.teacher.stem, folder).exists():
            todo.append((key, each))
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
    one = partial(_grade, seed=seed, allowance=rules.allowance, borrowing=rules.borrowing)
    if rules.jobs == 1:
        yield from ((key, one(each)) for key, each in todo)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(rules.jobs, mp_context=spawn, initializer=end_with_parent) as pool:
        waiting = {pool.submit(one, each): key for key, each in todo}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _grade(handed: HandedIn, *, seed: str, allowance: Allowance, borrowing: bool) -> Grade:
    return grade(
        handed.path,
        handed.teacher,
        student=handed.student,
        seed=seed,
        allowance=allowance,
        borrowing=borrowing,
    )
