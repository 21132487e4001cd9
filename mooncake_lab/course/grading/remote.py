"""The side of the grader: questions to a confined submission, answers with a deadline, and nothing believed."""

import contextlib
import fcntl
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

import mooncake_lab
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.core import KIB, MIB
from mooncake_lab.course.grading.confine import (
    Allowance,
    UnconfinableError,
    check_confinable,
    why_no_folder,
)
from mooncake_lab.course.grading.memory_group import MemoryGroup
from mooncake_lab.course.grading.messages import (
    LONGEST_ANSWER_BYTES,
    SIGNATURES,
    Answer,
    Ask,
    Call,
    Code,
    EstimatorName,
    Load,
    Make,
    Question,
    Raised,
    Reply,
    length_of,
    pack,
)
from mooncake_lab.course.grading.watch import LOOK_S, Wait, Watch
from mooncake_lab.net.frames import HEADER_BYTES, ProtocolError
from mooncake_lab.store import NothingToEvictError

_START_S: Final = 60.0
"""Python, numpy and this package have to be imported first."""

_MOST_HELD_BYTES: Final = 16 * KIB
"""Limit for queued questions without an answer: one message carries them and the next question that has one."""
_KERNEL_BYTES: Final = 128 * MIB
"""What a control group allows besides memory and files: page tables, and what the kernel keeps for a process."""
_FOLDER_PREFIX: Final = "mooncake-lab-submission-"


class SubmissionError(Exception):
    """A submission raised, answered nonsense, took too long or ended; the message is for the student.

    Args:
        said: to the student.
        score: what an open task measured before it was lost.
    """

    def __init__(self, said: str, score: float | None = None) -> None:
        super().__init__(said)
        self.score = score


@dataclass(slots=True, kw_only=True)
class Budget:
    """What one submission may use over all its tasks; mutable because it is used up."""

    allowance: Allowance
    cpu_used_s: float = 0.0
    wait: Wait = field(default_factory=Wait)
    ends_s: float = math.inf
    """When its time is over, by the monotonic clock; known since its first cell."""

    def begin(self) -> None:
        """Its first cell is about to be executed."""
        if math.isinf(self.ends_s):
            self.ends_s = time.monotonic() + self.allowance.wall_s

    def left(self) -> Allowance:
        """What the next process may use.

        Raises:
            SubmissionError: when processor time or time is used up.
        """
        if time.monotonic() >= self.ends_s:
            raise SubmissionError(f"it took more than {self.allowance.wall_s:g} s in all")
        cpu_s = math.ceil(self.allowance.cpu_s - self.cpu_used_s)
        if cpu_s <= 0:
            raise SubmissionError(f"it used more than {self.allowance.cpu_s} s of processor time in all")
        return replace(self.allowance, cpu_s=cpu_s)


class Submission:
    """A student's cells in a confined process. A context manager; mutable because a process is.

    Args:
        cells: the code, in the order of the notebook.
        allowance: what it may use; where a budget is given, that of the budget.
        budget: what it shares with the other processes of the same submission.

    Raises:
        UnconfinableError: when this machine cannot confine a process.
        SubmissionError: when its process ends or takes too long while the cells are executed.
    """

    def __init__(
        self, cells: Sequence[Code], allowance: Allowance | None = None, budget: Budget | None = None
    ) -> None:
        check_confinable()
        self._budget = budget or Budget(allowance=allowance or Allowance())
        self._allowance = self._budget.left()
        self._folder = None if why_no_folder() else _Folder()
        self._cpu_before_s = self._cpu_s = 0.0
        self._status: int | None = None
        self._told = bytearray()
        try:
            self._process = _started(None if self._folder is None else self._folder.path, self._allowance)
        except BaseException:
            self._forget_folder()
            raise
        most = self._allowance.memory_bytes + self._allowance.folder_bytes + _KERNEL_BYTES
        self._group = MemoryGroup.around(self._process.pid, most)
        self._watch: Watch | None = None
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._answers = selectors.DefaultSelector()
        if self._process.stdout is None or self._process.stdin is None:
            raise AssertionError("the pipes were asked for")
        self._stdout, self._stdin = self._process.stdout.fileno(), self._process.stdin.fileno()
        os.set_blocking(self._stdin, False)
        self._answers.register(self._stdout, selectors.EVENT_READ)
        try:
            self._start()
            self._watch = Watch(self._process.pid, self._budget.wait)
            self._budget.begin()
            loaded = self._exchange(Load([*cells]))
            self.failed_cells: tuple[str, ...] = _decoded(loaded, tuple[str, ...], "the notebook")
            """What went wrong in which cell."""
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
        """End the process, whatever it is doing; its files go with it."""
        self._kill()
        self._reap()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # a question was still buffered, and its reader is gone
        self._answers.close()
        if self._group is not None:
            self._group.close()
        self._forget_folder()

    def _forget_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def call(self, name: str, *arguments: Any, gives: Any = Any) -> Any:
        """Call one of its functions with plain values; the answer must be of the type `gives`.

        Raises:
            SubmissionError: when it raises, takes too long, ends, or answers something else.
        """
        return _decoded(self._exchange(Call(name, list(arguments))), gives, name)

    def make(self, name: str, *arguments: Any) -> int:
        """Make an object of one of its classes; the answer is a number to ask it by.

        Raises:
            SubmissionError: when it raises, takes too long, or ends.
        """
        return _decoded(self._exchange(Make(name, list(arguments))), int, name)

    def ask(self, number: int, method: str, *arguments: Any, estimate: EstimatorName = "paper") -> Any:
        """Call a method of an object it made.

        Raises:
            SubmissionError: when it raises, takes too long, ends, or answers something else.
        """
        answer = self._exchange(Ask(number, method, _packed(arguments), estimate=estimate))
        return _decoded(answer, SIGNATURES[method].gives, method)

    def tell(self, number: int, method: str, *arguments: Any) -> None:
        """Call a method without waiting; if it raises, the next answer says so."""
        self._told += pack(Ask(number, method, _packed(arguments), quiet=True))
        if len(self._told) > _MOST_HELD_BYTES:
            self._send(b"", self._deadline_s())

    def _start(self) -> None:
        """Wait until the process is confined; that it cannot be is no fault of the student."""
        try:
            ready = self._receive(time.monotonic() + _START_S)
            self._cpu_before_s = _decoded(ready, float, "the process")
        except SubmissionError as error:
            self._kill()
            told = self._process.stderr.read(2000).decode(errors="replace").strip() if self._process.stderr else ""
            reason = told.splitlines()[-1] if told else str(error)
            raise UnconfinableError(f"no confined process starts here: {reason}") from error

    def _deadline_s(self) -> float:
        return min(time.monotonic() + self._allowance.reply_s, self._budget.ends_s)

    def _exchange(self, question: Question) -> Answer:
        deadline_s = self._deadline_s()
        self._send(pack(question), deadline_s)
        return self._receive(deadline_s)

    def _receive(self, deadline_s: float) -> Answer:
        try:
            length = length_of(self._read(HEADER_BYTES, deadline_s), LONGEST_ANSWER_BYTES)
            reply = self._decoder.decode(self._read(length, deadline_s))
        except (ValueError, ProtocolError, msgspec.MsgspecError) as error:
            raise SubmissionError(f"its process answered nonsense: {error}") from error
        if isinstance(reply, Raised):
            if reply.kind == NothingToEvictError.__name__:
                raise NothingToEvictError(0)
            raise SubmissionError(f"it raised {reply.kind}: {reply.message}".removesuffix(": "))
        return reply

    def _send(self, frame: bytes, deadline_s: float) -> None:
        rest = memoryview(bytes(self._told) + frame)
        self._told.clear()
        while rest:
            try:
                rest = rest[os.write(self._stdin, rest) :]
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise self._too_late() from None
                began_s = time.monotonic()
                time.sleep(0.0005)
                self._waited(began_s, silent=True)
            except BrokenPipeError:
                raise self._ended() from None

    def _read(self, count: int, deadline_s: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            self._await(deadline_s)
            part = os.read(self._stdout, count - len(parts))
            if not part:
                raise self._ended()
            parts += part
        return bytes(parts)

    def _await(self, deadline_s: float) -> None:
        """Wait until there is something to read."""
        while True:
            began_s = time.monotonic()
            ready = bool(self._answers.select(min(max(deadline_s - began_s, 0), LOOK_S)))
            self._waited(began_s, silent=not ready)
            if ready:
                return
            if time.monotonic() >= deadline_s:
                raise self._too_late()

    def _waited(self, began_s: float, *, silent: bool) -> None:
        """Count a wait for the process, and end it if it has to."""
        if self._watch and (why := self._watch.waited(time.monotonic() - began_s, silent=silent)):
            self._kill()
            raise SubmissionError(why)

    def _too_late(self) -> SubmissionError:
        self._kill()
        if time.monotonic() >= self._budget.ends_s:
            return SubmissionError(f"it took more than {self._allowance.wall_s:g} s in all")
        return SubmissionError(
            f"it gave no answer within {self._allowance.reply_s:g} s; is there an endless loop?"
        )

    def _ended(self) -> SubmissionError:
        code = self._reap()
        if code >= 0:
            return SubmissionError(f"its process ended itself, with exit status {code}, before it answered")
        if self._cpu_s >= self._allowance.cpu_s and -code in {signal.SIGKILL, signal.SIGXCPU}:
            most = self._budget.allowance.cpu_s
            return SubmissionError(f"it used more than {most} s of processor time in all")
        if -code == signal.SIGSYS:
            return SubmissionError(
                "its process was ended by the kernel because of a system call that is not allowed"
            )
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if -code == signal.SIGKILL:
            return SubmissionError(
                f"its process was killed ({name}), as when it needs more memory than it may have"
            )
        return SubmissionError(f"its process crashed ({name})")

    def _kill(self) -> None:
        """Not `Popen.kill`, which would wait for a process that has ended and forget what it used."""
        if self._status is None:
            os.kill(self._process.pid, signal.SIGKILL)

    def _reap(self) -> int:
        """Wait for the end of the process and charge what it used; its exit code."""
        if self._status is None:
            _, status, used = os.wait4(self._process.pid, 0)
            self._status = self._process.returncode = os.waitstatus_to_exitcode(status)
            self._cpu_s = max(used.ru_utime + used.ru_stime - self._cpu_before_s, 0.0)
            self._budget.cpu_used_s += self._cpu_s
        return self._status


class _Folder:
    """An empty folder over which a submission mounts its own; locked as long as its grader lives."""

    def __init__(self) -> None:
        _forget_abandoned_folders()
        while True:
            self.path = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # another grader took it for abandoned
                continue
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:  # no other grader took it for abandoned before it was locked
                return
            os.close(self._lock)

    def close(self) -> None:
        """Remove it: it is empty, because what was written lay in a file system that is gone."""
        try:
            Path(self.path).rmdir()
        except OSError as error:
            warnings.warn(f"the folder of a submission stays behind: {error}", RuntimeWarning, stacklevel=4)
        os.close(self._lock)


def _forget_abandoned_folders() -> None:
    """Remove the empty folders of graders that were killed: nobody holds their locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or not empty
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder.rmdir()
            finally:
                os.close(descriptor)


def _started(folder: str | None, allowance: Allowance) -> subprocess.Popen[bytes]:
    """The process, which has yet to confine itself."""
    package = Path(mooncake_lab.__file__).resolve().parent
    order = msgspec.json.encode(
        {
            "folder": folder,
            "allowance": asdict(allowance),
            "package": str(package),
            "model": paper_node_latency(),
        }
    )
    script = Path(__file__).resolve().with_name("enter.py")
    home = folder or "/nonexistent"
    environment = {
        **{name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ},
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "HOME": home,
        "TMPDIR": home,
        "NUMBA_CACHE_DIR": home,
        "PYTHONHASHSEED": "0",
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(  # noqa: S603  # our own interpreter and script
        [sys.executable, "-P", "-I", str(script), "enter", order.decode()],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=environment,
        start_new_session=True,
    )


def _packed(arguments: Sequence[Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(arguments, enc_hook=_as_set))


def _as_set(value: Any) -> Any:
    """A view of the keys of a dict, and other sets.

    Raises:
        TypeError: when it is something else.
    """
    if isinstance(value, AbstractSet):
        return frozenset(value)
    raise TypeError(f"{value!r} cannot be sent to a submission")


def _decoded(answer: Answer, kind: Any, name: str) -> Any:
    try:
        return msgspec.msgpack.decode(answer.value, type=kind)
    except msgspec.MsgspecError as error:
        raise SubmissionError(f"{name} returned an answer of the wrong type: {error}") from error
