"""The side of the grader: questions to a confined submission, answers with a deadline, and nothing believed."""

import contextlib
import math
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from mooncake_lab.core import MIB
from mooncake_lab.exercises.grading.confine import Allowance, UnconfinableError, check_confinable
from mooncake_lab.exercises.grading.messages import (
    HEAD_BYTES,
    SIGNATURES,
    Answer,
    Ask,
    Call,
    Load,
    Make,
    Question,
    Raised,
    Reply,
    length_of,
    pack,
)
from mooncake_lab.store import NothingToEvictError

_START_S = 60.0
"""Python, numpy and this package have to be imported first."""
_LOOK_EVERY_S = 0.5


class SubmissionError(Exception):
    """A submission raised, answered nonsense, took too long or died; the message is for the student."""


class Submission:
    """A student's cells in a confined process. A context manager; mutable because a process is.

    Args:
        cells: the code, in the order of the notebook.
        allowance: what it may use.

    Raises:
        UnconfinableError: when this machine cannot confine a process.
        SubmissionError: when a cell raises.
        NothingToEvictError: when a cell raises that.
    """

    def __init__(self, cells: Sequence[str], allowance: Allowance | None = None) -> None:
        check_confinable()
        self._allowance = allowance or Allowance()
        self._folder = tempfile.mkdtemp(prefix="submission-")
        self._ends_s = math.inf
        self._looked_s = time.monotonic()
        limits = msgspec.json.encode(self._allowance).decode()
        command = [sys.executable, "-m", "mooncake_lab.exercises.grading.candidate", self._folder, limits]
        environment = {
            **{name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ},
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HOME": self._folder,
            "TMPDIR": self._folder,
            "NUMBA_CACHE_DIR": self._folder,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
        }
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._answers = selectors.DefaultSelector()
        if self._process.stdout is None or self._process.stdin is None:
            raise AssertionError("the pipes were asked for")
        self._stdout, self._stdin = self._process.stdout.fileno(), self._process.stdin.fileno()
        os.set_blocking(self._stdin, False)
        self._answers.register(self._stdout, selectors.EVENT_READ)
        try:
            self._start()
            self._ends_s = time.monotonic() + self._allowance.wall_s
            self._exchange(Load(list(cells)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is doing, and forget its folder."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # it was still holding a question nobody will read
        self._answers.close()
        # not Python's own, which recurses: a submission may leave folders a thousand deep
        subprocess.run(["rm", "-rf", "--", self._folder], check=False, stderr=subprocess.DEVNULL)  # noqa: S603, S607

    def call(self, name: str, *arguments: Any, gives: Any = Any) -> Any:
        """Call one of its functions with plain values; the answer must be of the type `gives`.

        Raises:
            SubmissionError: when it raises, takes too long, dies, or answers something else.
        """
        return _decoded(self._exchange(Call(name, list(arguments))), gives, name)

    def make(self, name: str, *arguments: Any) -> int:
        """Make an object of one of its classes; the answer is a number to ask it by.

        Raises:
            SubmissionError: when it raises, takes too long, or dies.
        """
        return _decoded(self._exchange(Make(name, list(arguments))), int, name)

    def ask(self, number: int, method: str, *arguments: Any, gives: Any = Any) -> Any:
        """Call a method of an object it made.

        Raises:
            SubmissionError: when it raises, takes too long, dies, or answers something else.
        """
        return self.ask_why(number, method, *arguments, gives=gives)[0]

    def ask_why(self, number: int, method: str, *arguments: Any, gives: Any = Any) -> tuple[Any, str]:
        """The same, and the reason that came beside the answer."""
        answer = self._exchange(Ask(number, method, _packed(arguments)))
        return _decoded(answer, SIGNATURES[method].gives if method in SIGNATURES else gives, method), answer.reason

    def tell(self, number: int, method: str, *arguments: Any) -> None:
        """Call a method without waiting; if it raises, the next answer says so."""
        self._send(Ask(number, method, _packed(arguments), quiet=True), self._deadline_s())

    def _start(self) -> None:
        """Wait until the process is confined; that it cannot be is no fault of the student."""
        try:
            self._exchange(Load([]), time.monotonic() + _START_S)
        except SubmissionError as error:
            raise UnconfinableError(f"no confined process starts here: {error}") from error

    def _deadline_s(self) -> float:
        return min(time.monotonic() + self._allowance.reply_s, self._ends_s)

    def _exchange(self, question: Question, deadline_s: float | None = None) -> Answer:
        deadline_s = self._deadline_s() if deadline_s is None else deadline_s
        if time.monotonic() - self._looked_s > _LOOK_EVERY_S / 5:  # whoever answers quickly may write quickly
            self._look_at_folder()
        self._send(question, deadline_s)
        try:
            length = length_of(self._read(HEAD_BYTES, deadline_s))
            reply = self._decoder.decode(self._read(length, deadline_s))
        except (ValueError, msgspec.MsgspecError) as error:
            raise SubmissionError(f"its process answered nonsense: {error}") from error
        if isinstance(reply, Raised):
            if reply.kind == NothingToEvictError.__name__:
                raise NothingToEvictError(0)
            raise SubmissionError(f"it raised {reply.kind}: {reply.message}".removesuffix(": "))
        return reply

    def _send(self, question: Question, deadline_s: float) -> None:
        rest = memoryview(pack(question))
        while rest:
            try:
                rest = rest[os.write(self._stdin, rest) :]
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise self._too_late() from None
                time.sleep(0.0005)
            except BrokenPipeError:
                raise self._dead() from None

    def _read(self, count: int, deadline_s: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            left_s = max(deadline_s - time.monotonic(), 0)
            if not self._answers.select(min(left_s, _LOOK_EVERY_S)):
                self._look_at_folder()
                if left_s <= _LOOK_EVERY_S:
                    raise self._too_late()
                continue
            part = os.read(self._stdout, min(count - len(parts), 1 << 20))
            if not part:
                raise self._dead()
            parts += part
        return bytes(parts)

    def _look_at_folder(self) -> None:
        """End a submission that fills the disk."""
        self._looked_s = time.monotonic()
        entries, size_bytes, folders = 0, 0, [self._folder]
        while folders and entries <= self._allowance.folder_entries:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as found:
                for entry in found:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        size_bytes += entry.stat(follow_symlinks=False).st_size
        if entries > self._allowance.folder_entries or size_bytes > self._allowance.folder_bytes:
            self._process.kill()
            raise SubmissionError(
                f"it wrote {entries} files of {size_bytes / MIB:.0f} MiB; allowed are"
                f" {self._allowance.folder_entries} of {self._allowance.folder_bytes / MIB:.0f} MiB in all"
            )

    def _too_late(self) -> SubmissionError:
        self._process.kill()
        if time.monotonic() >= self._ends_s:
            return SubmissionError(f"its answers took more than {self._allowance.wall_s:g} s in all")
        return SubmissionError(
            f"it gave no answer within {self._allowance.reply_s:g} s; is there an endless loop?"
        )

    def _dead(self) -> SubmissionError:
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return SubmissionError(
            f"its process ended with {how}; it may have used more than {self._allowance.cpu_s} s of processor"
            " time, or done what is not allowed"
        )


def _packed(arguments: Sequence[Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(arguments))


def _decoded(answer: Answer, kind: Any, name: str) -> Any:
    try:
        return msgspec.msgpack.decode(answer.value, type=kind)
    except msgspec.MsgspecError as error:
        raise SubmissionError(f"{name} answered what it should not: {error}") from error
