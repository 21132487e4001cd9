"""Worker processes of this machine: started with exec, never forked, with warm spares for replacements.

A process loads torch and the model, compiles what is compiled on first use, and waits for a `WorkerSpec` over a
socket pair (see `process`). It becomes a worker when it gets one. After the worker was told to stop, the process
waits for the next, so that clusters that share a pool start in milliseconds.

Each process has a thread of its own here, which starts it, reads what it writes to stderr, and collects its exit
status. The kernel kills a process when the thread that started it is gone, thus also when this one is killed.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, Self, final

import msgspec

from mooncake_lab.serving.launch import WorkerError
from mooncake_lab.serving.spec import LiveSpec, WorkerSpec

MOST_BYTES: Final = 2**16
"""Of one message between a pool and a process."""
READY: Final = b"ready "
"""Begins the message of a process that waits for a `WorkerSpec`; the number of workers it has been follows."""
_LOG: Final = logging.getLogger(__name__)
_PROGRAM: Final = Path(__file__).with_name("process.py")
_JOIN_S: Final = 10.0
_STDERR_LINES: Final = 12
_LONGEST_PAUSE_S: Final = 30.0

State = Literal["starting", "idle", "assigned", "ended"]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a process loads before it knows which worker it will be; the first message to it."""

    model: str
    seed: int
    device: str
    dtype: str | None
    backend: str
    max_model_len: int
    threads: int


def model_spec(spec: LiveSpec) -> ModelSpec:
    """What the processes of a cluster load."""
    return ModelSpec(**{name: getattr(spec, name) for name in ModelSpec.__struct_fields__})


@final
class _Process:
    """One worker process, seen from its pool. Mutable: it starts and ends; `pool.changed` guards its state.

    Args:
        pool: told of every change of state.
        background: whether it loads at low priority, because others serve meanwhile.
    """

    def __init__(self, pool: "WorkerPool", *, background: bool) -> None:
        self.state: State = "starting"
        self._background = background
        self.assignment = 0
        """How many workers it has been, counting the present one."""
        self.pid: int | None = None
        self.reason = ""
        """Why it ended; empty until then."""
        self._pool = pool
        self._home, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._error = ""
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self.thread = threading.Thread(target=self._watch, name="worker-process", daemon=True)

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send one message; a process that starts reads it once it is ready.

        Raises:
            OSError: when the process has ended.
        """
        socket.send_fds(self._home, [message], descriptors)

    def kill(self) -> None:
        """End it with SIGKILL, whatever it does."""
        with self._pool.changed:
            if self.pid is not None:  # it is None before the exit status is collected and the pid given away
                os.kill(self.pid, signal.SIGKILL)

    def stderr_tail(self) -> str:
        """What it wrote last to stderr, in one line; empty where it wrote nothing."""
        return " | ".join(line for line in self._stderr if line.strip())

    def _watch(self) -> None:
        reason = "the pool is closed"
        try:
            with self._home, self._theirs:
                process = self._start()
                if process is not None:
                    self._theirs.close()
                    self._read(process)
                    reason = self._collect(process)
        except OSError as error:
            reason = f"its process could not be started: {error}"
        except Exception as error:  # noqa: BLE001  # its worker must not wait for ever
            _LOG.exception("a worker process could not be watched")
            reason = repr(error)
        finally:
            self._pool.process_ended(self, reason)

    def _start(self) -> subprocess.Popen[bytes] | None:
        priority = "background" if self._background else "foreground"
        with self._pool.changed:
            if self._pool.is_closed:
                return None
            process = subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, str(_PROGRAM), str(self._theirs.fileno()), str(os.getpid()), priority],
                pass_fds=[self._theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_environment(self._pool.model.threads),
            )
            self.pid = process.pid
        return process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Read messages and stderr until both end, which is when the process ends."""
        assert process.stderr is not None  # noqa: S101  # it is a pipe
        errors = process.stderr.fileno()
        reading, rest = {self._home.fileno(), errors}, b""
        while self._home.fileno() in reading:
            ready = _readable(reading)
            if errors in ready:
                rest = self._read_stderr(errors, rest, reading)
            elif self._home.fileno() in ready:
                try:
                    message = self._home.recv(MOST_BYTES)
                except ConnectionError:
                    message = b""
                if not message:
                    reading.discard(self._home.fileno())
                elif message.startswith(READY):
                    self._pool.process_ready(self, int(message.removeprefix(READY)))
                else:
                    self._error = message.decode(errors="replace")
        while errors in reading and _readable([errors], 0.5):
            rest = self._read_stderr(errors, rest, reading)
        if rest:
            self._stderr.append(rest.decode(errors="replace"))

    def _read_stderr(self, errors: int, rest: bytes, reading: set[int]) -> bytes:
        """Pass on what it writes, and remember the last lines; the beginning of a line that has not ended."""
        written = os.read(errors, MOST_BYTES)
        if not written:
            reading.discard(errors)
            return rest
        with contextlib.suppress(OSError):  # ours is closed
            os.write(2, written)
        *lines, rest = (rest + written).split(b"\n")
        self._stderr.extend(line.decode(errors="replace") for line in lines)
        return rest[-MOST_BYTES:]

    def _collect(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stderr is not None  # noqa: S101  # it is a pipe
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            with self._pool.changed:
                self.pid = None
            status = process.wait()
            process.stderr.close()
        if self._error:
            return self._error
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        tail = self.stderr_tail()
        return f"{how}; last lines of its stderr: {tail}" if tail and status else how


@final
class RunningWorker:
    """A worker that was launched: its process, as long as it is this worker. Immutable."""

    __slots__ = ("_assignment", "_pool", "_process")

    def __init__(self, pool: "WorkerPool", process: _Process) -> None:
        self._pool = pool
        self._process = process
        self._assignment = process.assignment

    @property
    def pid(self) -> int | None:
        """Of its process; None until that is started."""
        return self._process.pid

    def kill(self) -> None:
        """End its process with SIGKILL, unless that waits for, or is, another worker by now."""
        with self._pool.changed:
            if not self._is_over():
                self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait until its process has ended, or is ready for another worker; whether that came to be in time."""
        with self._pool.changed:
            return self._pool.changed.wait_for(self._is_over, timeout_s)

    def reason(self) -> str:
        """Why its process ended, or what it is doing instead."""
        if self._process.reason:
            return self._process.reason
        tail = self._process.stderr_tail()
        return f"its process is {self._process.state}" + (f"; last lines of its stderr: {tail}" if tail else "")

    def _is_over(self) -> bool:
        process = self._process
        return process.state != "assigned" or process.assignment != self._assignment


@final
class WorkerPool:
    """Processes that have loaded one model, each a worker or ready to become one.

    It may serve several clusters, one after the other or at once, from any thread. Mutable: it owns processes.

    Args:
        spec: of a cluster; others must agree with it in model, seed, device, numbers, longest context and threads.
    """

    def __init__(self, spec: LiveSpec) -> None:
        self.model = model_spec(spec)
        self.changed = threading.Condition()
        self.is_closed = False
        self._spares = spec.spares
        self._keeps_spares = False
        self._processes: list[_Process] = []
        self._failures = 0
        """Spares in succession that ended before they were used."""
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def check(self, spec: LiveSpec) -> None:
        """Refuse a cluster whose model the processes have not loaded.

        Raises:
            ValueError: naming both.
        """
        if model_spec(spec) != self.model:
            raise ValueError(f"worker processes with {self.model} cannot serve {model_spec(spec)}")

    def start(self, processes: int, *, timeout_s: float = 300.0) -> Self:
        """Have so many processes ready, and wait until they are: clusters then start, and recover, at once.

        Raises:
            WorkerError: when one cannot load the model, or takes too long.
        """
        with self.changed:
            started = [self._add(background=False) for _ in range(processes - self._count("idle"))]
            in_time = self.changed.wait_for(lambda: all(p.state != "starting" for p in started), timeout_s)
            reasons = [p.reason for p in started if p.state == "ended"]
        if reasons or not in_time:
            raise WorkerError(reasons[0] if reasons else f"a worker process was not ready within {timeout_s:g} s")
        return self

    def launch(self, spec: WorkerSpec, control: socket.socket) -> RunningWorker:
        """Make a process a worker that holds one end of its control connection: a ready one, else a new one.

        Raises:
            ConnectionError: when the pool is closed.
            OSError: when the connection is closed.
        """
        message = msgspec.msgpack.encode(spec)
        with control.dup() as theirs:  # its owner may close it meanwhile: that ends the worker, and costs no other
            while True:
                process, worker = self._assign()
                try:
                    process.send(message, theirs.fileno())
                except OSError:  # it ended while it waited: another takes its place
                    worker.wait(_JOIN_S)
                    continue
                return worker

    def _assign(self) -> tuple[_Process, RunningWorker]:
        """A process that is a worker from now on: a ready one, else a new one."""
        with self.changed:
            if self.is_closed:
                raise ConnectionError("the pool of worker processes is closed")
            idle = next((process for process in self._processes if process.state == "idle"), None)
            process = idle or self._add(background=False)
            process.state = "assigned"
            process.assignment += 1
            worker = RunningWorker(self, process)
            self._top_up()
        return process, worker

    def keep_spares(self) -> None:
        """From now on prepare spares in the background, whenever fewer are ready than the spec asks for."""
        with self.changed:
            self._keeps_spares = True
            self._top_up()

    def idle(self) -> list[int]:
        """The pids of processes that are ready to become workers."""
        with self.changed:
            return [p.pid for p in self._processes if p.state == "idle" and p.pid is not None]

    def pids(self) -> list[int]:
        """The pids of all processes, workers and spares."""
        with self.changed:
            return [p.pid for p in self._processes if p.pid is not None]

    def close(self) -> None:
        """End every process, also those that still load."""
        with self.changed:
            self.is_closed = True
            self._closing.set()
            processes = list(self._processes)
        for process in processes:
            process.kill()
        for process in processes:
            process.thread.join(_JOIN_S)

    def process_ready(self, process: _Process, workers: int) -> None:
        """A process has loaded the model, or has finished being so many workers."""
        with self.changed:
            if workers == process.assignment:
                process.state = "idle"
                self._failures = 0
                self.changed.notify_all()

    def process_ended(self, process: _Process, reason: str) -> None:
        """A process is gone. A spare is replaced, after a pause that grows with the number of failures."""
        with self.changed:
            is_spare = process.state in {"starting", "idle"}
            process.state, process.reason = "ended", reason
            self._processes.remove(process)
            self.changed.notify_all()
            if self.is_closed or not (is_spare and self._keeps_spares):
                return
            self._failures += 1
            pause_s = min(0.05 * 2**self._failures, _LONGEST_PAUSE_S)
        _LOG.warning("a spare worker process ended: %s; another starts in %.1f s", reason, pause_s)
        self._closing.wait(pause_s)
        with self.changed:
            self._top_up()

    def _top_up(self) -> None:
        if self._keeps_spares and not self.is_closed:
            for _ in range(self._spares - self._count("idle") - self._count("starting")):
                self._add(background=True)

    def _add(self, *, background: bool) -> _Process:
        process = _Process(self, background=background)
        self._processes.append(process)
        process.send(msgspec.msgpack.encode(self.model))
        process.thread.start()
        return process

    def _count(self, state: State) -> int:
        return sum(process.state == state for process in self._processes)


def _readable(files: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Those of these file descriptors that can be read, or are at their end; `select` knows none above 1023."""
    poll = select.poll()
    for each in files:
        poll.register(each, select.POLLIN)
    return {each for each, _ in poll.poll(None if timeout_s is None else 1e3 * timeout_s)}


def _environment(threads: int) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
