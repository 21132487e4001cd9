"""The side of a submission: a confined process that executes somebody's cells and answers questions about them.

    python -m mooncake_lab.exercises.grading.candidate FOLDER ALLOWANCE

Questions come on stdin, answers leave on what was stdout; what the cells print goes nowhere. Started by `remote`.
"""

import io
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from mooncake_lab.conductor import Estimator, Rejection
from mooncake_lab.exercises.grading.confine import Allowance, UnconfinableError, confine
from mooncake_lab.exercises.grading.messages import (
    SIGNATURES,
    Answer,
    Ask,
    Call,
    Load,
    Make,
    Question,
    Raised,
    Reply,
    pack,
    read_frame,
)


class Candidate:
    """A namespace that cells fill, and the objects that were made from it; mutable because cells are."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._made: list[Any] = []
        self._owed: Raised | None = None

    def answer(self, question: Question) -> Reply | None:
        """What the cells answer; whatever they raise is an answer too."""
        try:
            reply = self._act(question)
        except BaseException as error:  # noqa: BLE001  # a submission may raise anything, SystemExit included
            reply = Raised(type(error).__name__, str(error)[:2000])
        if isinstance(question, Ask) and question.quiet:
            self._owed = self._owed or (reply if isinstance(reply, Raised) else None)
            return None
        owed, self._owed = self._owed, None
        return owed or reply

    def _act(self, question: Question) -> Reply:
        match question:
            case Load(cells):
                for number, cell in enumerate(cells, start=1):
                    exec(compile(cell, f"<cell {number}>", "exec"), self._names)  # noqa: S102  # what this process is for
                return _answer(None)
            case Call(name, arguments):
                return _answer(self._named(name)(*arguments))
            case Make(name, arguments):
                self._made.append(self._named(name)(*arguments))
                return _answer(len(self._made) - 1)
            case Ask(number, method, arguments):
                return _ask(self._made[number], method, arguments)

    def _named(self, name: str) -> Any:
        if name not in self._names:
            raise NameError(f"the notebook defines no {name!r}")
        return self._names[name]


def _ask(target: Any, method: str, raw: msgspec.Raw) -> Answer:
    if method not in SIGNATURES:
        return _answer(getattr(target, method)(*msgspec.msgpack.decode(raw)))
    takes = SIGNATURES[method].takes
    parts = msgspec.msgpack.decode(raw, type=list[msgspec.Raw])
    arguments: list[Any] = [
        msgspec.msgpack.decode(part, type=kind) for part, kind in zip(parts, takes, strict=True)
    ]
    match method:
        case "place":
            return _answer(target.place(*arguments, _estimator()))
        case "admit" | "double_check":
            if not hasattr(target, method):
                return _answer(value=True)  # who says nothing on arrival at the decode instance lets everybody in
            *seen, slo = arguments
            given = getattr(target, method)(*seen, estimate=_estimator(), slo=slo)
            refused = isinstance(given, Rejection)
            return _answer(not refused, given.reason if refused else "")
        case _:
            return _answer(getattr(target, method)(*arguments))


def _answer(value: Any, reason: str = "") -> Answer:
    try:
        encoded = msgspec.msgpack.encode(value)
    except OverflowError:
        encoded = msgspec.msgpack.encode(_with_words(value))
    return Answer(msgspec.Raw(encoded), reason)


def _with_words(value: Any) -> Any:
    """The same with integers of more than 64 bits as text: keys may be of any size."""
    match value:
        case int():
            return value if -(2**63) <= value < 2**64 else str(value)
        case list() | tuple():
            return [_with_words(each) for each in value]
        case dict():
            return {_with_words(key): _with_words(each) for key, each in value.items()}
        case _:
            return value


@cache
def _estimator() -> Estimator:
    """What the Conductor believes, the same as in the grader's own simulation."""
    from mooncake_lab.conductor import LatencyEstimator
    from mooncake_lab.experiments.paper_node import paper_node_latency

    return LatencyEstimator(paper_node_latency())


def main(folder: Path, allowance: Allowance) -> None:
    """Answer until the grader hangs up."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    questions = io.BufferedReader(io.FileIO(os.dup(sys.stdin.fileno())))
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.chdir(folder)
    try:
        confine(folder, allowance)
    except (OSError, ValueError, UnconfinableError) as error:
        answers.write(pack(Raised(type(error).__name__, str(error))))
        return
    candidate = Candidate()
    decoder = msgspec.msgpack.Decoder(Question)
    while (frame := read_frame(questions)) is not None:
        reply = candidate.answer(decoder.decode(frame))
        if reply is not None:
            answers.write(pack(reply))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), msgspec.json.decode(sys.argv[2], type=Allowance))
