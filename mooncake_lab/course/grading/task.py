"""What is graded: tasks with points, each a question to a submission and a check on hidden workloads."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from mooncake_lab.course.grading.remote import Submission, SubmissionError

Check: TypeAlias = Callable[[Submission, str], str]
"""A submission and the hidden seed of this task: a sentence on what went well; `SubmissionError` where it did not.

What is drawn with the seed comes from a `HiddenDraw`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to get right, all or nothing."""

    name: str
    """What is asked, as a statement."""
    points: int
    check: Check
    cells: tuple[str, ...] = ()
    """The solution cells that it is about; all of them where none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """An evening's work: a notebook, and the tasks it is graded by."""

    topic: str
    """Stem of its notebook in `notebooks/assignments`."""
    tasks: tuple[Task, ...]

    @property
    def points(self) -> int:
        """The most that can be earned."""
        return sum(task.points for task in self.tasks)


def require(holds: bool, message: str) -> None:
    """Fail a task with a sentence for the student.

    Raises:
        SubmissionError: unless it holds.
    """
    if not holds:
        raise SubmissionError(message)


_SECRET_BYTES: Final = 16


class HiddenDraw(random.Random):
    """Random numbers of a task: a keyed hash that counts.

    The output of Python's own generator can be predicted from enough of its earlier draws.

    Args:
        seed: of the class.
        names: what else tells these draws from others: the topic, the task.
    """

    def __init__(self, seed: str, *names: object) -> None:
        text = "\0".join(map(str, (seed, *names)))
        self._key = hashlib.blake2b(text.encode(), digest_size=_SECRET_BYTES).digest()
        self._count = 0
        super().__init__()

    def seed(self, *given: Any, **named: Any) -> None:
        """Nothing: the key is the seed."""
        del given, named

    def getrandbits(self, k: int, /) -> int:
        """Draw `k` random bits."""
        found = 0
        for _ in range(0, k, 512):
            self._count += 1
            text = self._count.to_bytes(8, "little")
            found = found << 512 | int.from_bytes(hashlib.blake2b(text, key=self._key).digest(), "little")
        return found >> (-k % 512)

    def random(self) -> float:
        """Uniform in [0, 1)."""
        return self.getrandbits(53) / 2**53
