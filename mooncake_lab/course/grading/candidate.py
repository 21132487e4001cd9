"""The side of a submission: a confined process that executes the submitted cells and answers questions about them.

Started by `enter.py`. Questions come on stdin, answers leave on what was stdout; what cells print goes nowhere.
"""

import ast
import errno
import importlib
import io
import os
import reprlib
import sys
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import CoroutineType, ModuleType
from typing import Any

import msgspec

from mooncake_lab.conductor import Estimator, LatencyEstimator, Placement, Rejection
from mooncake_lab.course.grading.confine import Allowance, UnconfinableError, confine
from mooncake_lab.course.grading.messages import (
    SIGNATURES,
    Answer,
    Ask,
    Call,
    Code,
    EstimatorName,
    Load,
    Make,
    Passes,
    Question,
    Raised,
    Refuses,
    Reply,
    pack,
    read_question,
)
from mooncake_lab.course.round_estimates import RoundEstimator
from mooncake_lab.perf import LatencyModel

_LONGEST_MESSAGE = 2000
_NOT_PERMITTED = (
    "a submission opens no socket, as `asyncio.run` does and `await` in a cell does not, and starts no process"
)
"""What a system call that is refused means, for Python says no more of it than its number."""


class Candidate:
    """A namespace that cells fill, and the objects that were made from it; mutable because cells are.

    As in a notebook the namespace is that of the module `__main__`, so that what looks classes up by name, such as
    `pickle` and `get_type_hints`, finds them.
    """

    def __init__(self, model: LatencyModel) -> None:
        sys.modules["__main__"] = main = ModuleType("__main__")
        self._names = vars(main)
        self._estimators: Mapping[EstimatorName, Estimator] = {
            "paper": LatencyEstimator(model),
            "round": RoundEstimator(),
        }
        self._made: list[Any] = []
        self._owed: Raised | None = None

    def answer(self, question: Question) -> Reply | None:
        """What the cells answer; whatever they raise is an answer too."""
        try:
            reply = self._act(question)
        except BaseException as error:  # noqa: BLE001  # a submission may raise anything, SystemExit included
            reply = Raised(*_told(error))
        if isinstance(question, Ask) and question.quiet:
            self._owed = self._owed or (reply if isinstance(reply, Raised) else None)
            return None
        owed, self._owed = self._owed, None
        return owed or reply

    def _act(self, question: Question) -> Reply:
        match question:
            case Load(cells):
                return _answer([said for cell in cells if (said := self._execute(cell))])
            case Call(name, arguments):
                return _answer(self._named(name)(*arguments))
            case Make(name, arguments):
                self._made.append(self._named(name)(*arguments))
                return _answer(len(self._made) - 1)
            case Ask(number, method, arguments, estimate=estimate):
                return _ask(self._made[number], method, arguments, self._estimators[estimate])

    def _execute(self, cell: Code) -> str:
        """Execute a cell; what went wrong in it, or nothing."""
        try:
            code = compile(cell.text, f"<cell {cell.name}>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            found = eval(code, self._names)  # noqa: S307  # what this is for
            if isinstance(found, CoroutineType):  # the cell awaits something, as IPython allows
                _run(found)
        except BaseException as error:  # noqa: BLE001  # a cell may raise anything, SystemExit included
            return "cell {!r} raised {}: {}".format(cell.name, *_told(error))
        return ""

    def _named(self, name: str) -> Any:
        if name not in self._names:
            raise NameError(f"the notebook defines no {name!r}")
        return self._names[name]


def _told(error: BaseException) -> tuple[str, str]:
    """The class and the text of an exception, as characters that can be sent, whatever was made of both."""
    try:
        name, message = str(type.__dict__["__name__"].__get__(type(error))), str(error)[:_LONGEST_MESSAGE]
    except BaseException as broken:  # noqa: BLE001  # `__str__` of a submission may raise anything, too
        name, message = (
            "an exception",
            f"its text cannot be read: {type.__dict__['__name__'].__get__(type(broken))}",
        )
    if type(error) is PermissionError and error.errno == errno.EPERM and error.filename is None:
        message += f"; {_NOT_PERMITTED}"
    return _sendable(name), _sendable(message)


def _sendable(text: str) -> str:
    """A text with halves of surrogate pairs written out, which have no place in UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _run(awaiting: Coroutine[Any, Any, Any]) -> None:
    """Run a cell that awaits, in an event loop without the sockets that a confined process may not make."""
    import asyncio
    import selectors

    class Loop(asyncio.SelectorEventLoop):
        def _make_self_pipe(self) -> None:
            """Nothing: no other thread will wake it."""

        def _close_self_pipe(self) -> None:
            """Nothing was made."""

    loop = Loop(selectors.SelectSelector())
    try:
        loop.run_until_complete(awaiting)
    finally:
        loop.close()


def _ask(target: Any, method: str, raw: msgspec.Raw, estimate: Estimator) -> Answer:
    """Call a method with arguments of the types that it gets in a notebook."""
    parts = msgspec.msgpack.decode(raw, type=list[msgspec.Raw])
    takes = SIGNATURES[method].takes[: len(parts)]
    arguments: list[Any] = [
        msgspec.msgpack.decode(part, type=kind) for part, kind in zip(parts, takes, strict=True)
    ]
    match method:
        case "place":
            return _answer(target.place(*arguments, estimate))
        case "admit" | "double_check":
            *seen, slo = arguments
            given = getattr(target, method)(*seen, estimate=estimate, slo=slo)
            return _answer(_verdict(method, given))
        case _:
            return _answer(getattr(target, method)(*arguments))


def _verdict(method: str, given: Any) -> Passes | Refuses:
    """An answer of a type that the method may give.

    Raises:
        TypeError: when it is another one.
    """
    if isinstance(given, Rejection):
        return Refuses(given)
    passing, allowed = (
        (Placement, "the placement that was proposed") if method == "admit" else (type(None), "None")
    )
    if isinstance(given, passing):
        return Passes(given)
    raise TypeError(
        f"{method} returned {reprlib.repr(given)}, of type {type(given).__name__};"
        f" allowed are {allowed} and a Rejection"
    )


def _answer(value: Any) -> Answer:
    try:
        encoded = msgspec.msgpack.encode(value, enc_hook=_plain)
    except OverflowError:
        encoded = msgspec.msgpack.encode(_with_words(value), enc_hook=_plain)
    return Answer(msgspec.Raw(encoded))


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as numbers and lists of Python.

    Raises:
        TypeError: when it is something else that cannot be sent.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    raise TypeError(
        f"an answer holds {reprlib.repr(value)}, of type {type(value).__name__}, which is no plain value"
    )


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


def start(order: Mapping[str, Any]) -> None:
    """Confine this process, and answer until the grader hangs up.

    Args:
        order: its `folder` (None where it gets none), its `allowance`, and the `model` of the paper's nodes.
    """
    model = msgspec.convert(order["model"], LatencyModel)
    vars(importlib.import_module("mooncake_lab.book.testbeds"))["paper_node_latency"] = lambda: model
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    questions = io.BufferedReader(io.FileIO(os.dup(sys.stdin.fileno())))
    for stream, mode in ((sys.stdin, os.O_RDONLY), (sys.stdout, os.O_WRONLY), (sys.stderr, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, mode), stream.fileno())
    folder = None if order["folder"] is None else Path(order["folder"])
    try:
        confine(folder, msgspec.convert(order["allowance"], Allowance))
    except (OSError, ValueError, UnconfinableError) as error:
        answers.write(pack(Raised(type(error).__name__, str(error))))
        return
    answers.write(pack(_answer(time.process_time())))
    candidate = Candidate(model)
    decoder = msgspec.msgpack.Decoder(Question)
    while (frame := read_question(questions)) is not None:
        reply = candidate.answer(decoder.decode(frame))
        if reply is not None:
            answers.write(pack(reply))
