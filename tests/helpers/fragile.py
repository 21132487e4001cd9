"""Work for grading workers that end as the kernel ends a process without memory; workers import it by name."""

import os
import signal
from pathlib import Path


def work(item: tuple[str, Path]) -> str:
    """End this process for items named `always`, and at the first try for those named `once`."""
    name, notes = item
    with (notes / name).open("a") as tries:
        tries.write("x")
    first = len((notes / name).read_text()) == 1
    if name.startswith("always") or (name.startswith("once") and first):
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("raises"):
        raise ValueError(name)
    return name.upper()


KEPT: list[bytearray] = []
"""What `keep` has not given back."""


def keep(mib: int) -> tuple[int, int]:
    """Hold so much memory for as long as this process lives; its id, and what it held before, in MiB."""
    before = sum(map(len, KEPT)) // 2**20
    KEPT.append(bytearray(b"x" * (mib * 2**20)))
    return os.getpid(), before


def end_at_start(_parent: int) -> None:
    """Instead of what a worker does first."""
    os.kill(os.getpid(), signal.SIGKILL)


def grade(task):
    """Instead of grading a notebook, by the student's name."""
    from mooncake_lab.course.grading.grade import Grade, Mark

    student = task[1].handed.student
    work((student, task[1].handed.path.parent))
    return Grade(student=student, topic="keys", marks=(Mark(task="a task", points=2, earned=2, said="fine"),))
