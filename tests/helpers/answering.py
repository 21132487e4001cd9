"""Submissions that answer in the process of a test: the grader's checks and messages, without confinement.

Starting a confined process costs half a second, too much for hundreds of pairs of seeds and wrong solutions.
"""

import sys

import msgspec

from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.course.grading.candidate import Candidate
from mooncake_lab.course.grading.cells import prepare
from mooncake_lab.course.grading.messages import Answer, Ask, Load, Question, Raised
from mooncake_lab.course.grading.remote import Submission, SubmissionError, _packed
from mooncake_lab.store import NothingToEvictError


class Answering(Submission):
    """A submission whose candidate is an object of this process."""

    def __init__(self, cells):
        main = sys.modules["__main__"]
        try:
            self._candidate = Candidate(paper_node_latency())
        finally:
            sys.modules["__main__"] = main
        self._exchange(Load([*cells]))

    def close(self):
        """Nothing was started."""

    def tell(self, number, method, *arguments):
        """Call a method; what it raises is told with the next answer, as by a process."""
        self._candidate.answer(Ask(number, method, _packed(arguments), quiet=True))

    def _exchange(self, question):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(question), type=Question)
        reply = self._candidate.answer(sent)
        if isinstance(reply, Raised):
            if reply.kind == NothingToEvictError.__name__:
                raise NothingToEvictError(0)
            raise SubmissionError(f"it raised {reply.kind}: {reply.message}")
        assert isinstance(reply, Answer)
        return reply


def points(assignment, path, teacher, seed):
    """Points of each task of a notebook, in order."""
    cells = prepare(path, teacher).code
    earned = []
    for task in assignment.tasks:
        try:
            task.check(Answering(cells), f"{seed}/{assignment.topic}/{task.name}")
        except Exception:  # noqa: BLE001  # as the grader takes it
            earned.append(0)
        else:
            earned.append(task.points)
    return earned
