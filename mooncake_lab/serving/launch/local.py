"""Worker processes of this machine: started with exec, never forked, with warm spares for replacements.

A process loads torch and the model, compiles what is compiled on first use, and waits for a `WorkerSpec` over a
socket pair (see `process`). It becomes a worker when it gets one. After the worker was told to stop, the process
waits for the next, so that clusters that share one launcher start in milliseconds.

Each process has a thread of its own here, which starts it, hears when it is ready, and collects its exit status.
The kernel kills a process when the thread that started it is gone, thus also when this process is killed.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, Literal, Self, final

import msgspec

from mooncake_lab.serving.launch import WorkerError, pause_before_restart_s
from mooncake_lab.serving.launch.memory import memory_left_bytes
from mooncake_lab.serving.spec import LiveOptions, WorkerSpec, model_options

MOST_BYTES: Final = 2**16
"""The largest message between a launcher and a process."""
READY: Final = b"ready "
"""Begins the message of a process that waits for a `WorkerSpec`. There follow the number of workers that it has
been, and the most memory that it has had (bytes)."""
_LOG: Final = logging.getLogger(__name__)
_PROGRAM: Final = Path(__file__).with_name("process.py")
_JOIN_S: Final = 10.0
_SPARE_PAUSE_S: Final = 60.0
"""The longest pause before a spare is started again that ended before it was used."""
_NO_ROOM_S: Final = 10.0
"""After so long it is looked again whether there is memory for a spare."""

State = Literal["starting", "idle", "assigned", "ended"]


@final
class _Process:
    """One worker process, seen from its launcher. Mutable: `launcher.changed` guards its state.

    Args:
        launcher: told of every change of state.
        background: whether it loads at low priority, because others serve meanwhile.
    """

    def __init__(self, launcher: "WorkerProcesses", *, background: bool) -> None:
        self.state: State = "starting"
        self.assignment = 0
        """How many workers it has been, counting the present one."""
        self.child: subprocess.Popen[bytes] | None = None
        self.reason = ""
        """Why it ended; empty until then."""
        self.is_loaded = False
        """Whether it has been ready once."""
        self.background = background
        self._launcher = launcher
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.thread = threading.Thread(target=self._watch, name="worker-process", daemon=True)

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send one message; a process that starts reads it once it is ready.

        Raises:
            OSError: when the process has ended.
        """
        socket.send_fds(self._ours, [message], descriptors)

    def kill(self) -> None:
        """End it with SIGKILL, whatever it does."""
        if self.child is not None:
            self.child.kill()

    def _watch(self) -> None:
        try:
            with self._ours, self._theirs:
                self.reason = self._run()
        except OSError as error:
            self.reason = f"its process could not be started: {error}"
        except Exception as error:  # noqa: BLE001  # its worker must not wait for ever
            _LOG.exception("a worker process could not be watched")
            self.reason = repr(error)
        finally:
            self._launcher.process_ended(self)

    def _run(self) -> str:
        """Start the process and listen to it until it ends; why it ended."""
        priority = "background" if self.background else "foreground"
        threads = str(self._launcher.model.threads)
        with self._launcher.changed:
            if self._launcher.is_closed:
                return "the launcher is closed"
            self.child = subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, str(_PROGRAM), str(self._theirs.fileno()), str(os.getpid()), priority],
                pass_fds=[self._theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads},
            )
        self._theirs.close()
        error = ""
        while message := self._receive():
            if message.startswith(READY):
                workers, memory_bytes = message.removeprefix(READY).split()
                self._launcher.process_ready(self, int(workers), int(memory_bytes))
            else:
                error = message.decode(errors="replace")
        status = self.child.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return error or how

    def _receive(self) -> bytes:
        """The next message of the process; empty when it has ended."""
        try:
            return self._ours.recv(MOST_BYTES)
        except ConnectionError:
            return b""


@final
class RunningWorker:
    """A worker that was launched: its process, as long as it is this worker. Immutable."""

    __slots__ = ("_assignment", "_launcher", "_process")

    def __init__(self, launcher: "WorkerProcesses", process: _Process) -> None:
        self._launcher = launcher
        self._process = process
        self._assignment = process.assignment

    def kill(self) -> None:
        """End its process with SIGKILL, unless that waits for, or is, another worker by now."""
        with self._launcher.changed:
            if not self._is_over():
                self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait until its process has ended, or is ready for another worker; whether that came to be in time."""
        with self._launcher.changed:
            return self._launcher.changed.wait_for(self._is_over, timeout_s)

    def reason(self) -> str:
        """Why its process ended, or what it is doing instead."""
        return self._process.reason or f"its process is {self._process.state}"

    def _is_over(self) -> bool:
        process = self._process
        return process.state != "assigned" or process.assignment != self._assignment


@final
class WorkerProcesses:
    """Processes that have loaded one model, each a worker or ready to become one.

    It may serve several clusters, one after the other or at once, from any thread. Mutable: it owns processes.

    Args:
        options: of a cluster; others must agree with it in what a process loads (`ModelOptions`).
    """

    def __init__(self, options: LiveOptions) -> None:
        self.model = model_options(options)
        self.changed = threading.Condition()
        self.is_closed = False
        self._spares = options.spares
        self._keeps_spares = False
        self._processes: list[_Process] = []
        self._pause_s = 0.0
        """Before the next spare is started: more after each that ended before it was used."""
        self._closing = threading.Event()
        self._loading_bytes = 0
        """The most memory that a process has taken to load the model."""
        self._cannot_load = False
        """Whether the last process that was needed at once could not load the model."""
        self._waits_for_memory = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def start(self, processes: int, *, timeout_s: float = 300.0) -> Self:
        """Make this number of processes ready, and wait until they are: clusters then start and recover at once.

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
            ValueError: when the processes have loaded another model.
            ConnectionError: when the launcher is closed.
            OSError: when the connection is closed.
        """
        if model_options(spec) != self.model:
            raise ValueError(f"worker processes with {self.model} cannot serve {model_options(spec)}")
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
                raise ConnectionError("the launcher of worker processes is closed")
            idle = next((process for process in self._processes if process.state == "idle"), None)
            if idle is None:
                process = self._add(background=False)
            else:
                process, self._cannot_load = idle, False
            process.state = "assigned"
            process.assignment += 1
            self._top_up()
            return process, RunningWorker(self, process)

    def keep_spares(self) -> None:
        """From now on prepare spares in the background, whenever fewer are ready than the spec asks for.

        None is prepared while less memory is left than a process took to load the model, nor while workers that
        are needed at once load it, or try to: a spare costs no worker its memory or its time.
        """
        with self.changed:
            self._keeps_spares = True
            self._top_up()

    def idle(self) -> list[int]:
        """The pids of processes that are ready to become workers."""
        return self._pids("idle")

    def pids(self) -> list[int]:
        """The pids of all processes, workers and spares."""
        return self._pids("starting", "idle", "assigned")

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

    def process_ready(self, process: _Process, workers: int, memory_bytes: int) -> None:
        """A process has loaded the model, or has finished being a worker; `workers` counts how often."""
        with self.changed:
            if not process.is_loaded:
                process.is_loaded = True
                self._loading_bytes = max(self._loading_bytes, memory_bytes)
                self._cannot_load = self._cannot_load and process.background
            if workers == process.assignment:
                process.state = "idle"
                self._pause_s = 0.0
            self._top_up()
            self.changed.notify_all()

    def process_ended(self, process: _Process) -> None:
        """A process is gone. A spare is replaced, after a pause that grows with the number of failures."""
        with self.changed:
            was_spare = process.state in {"starting", "idle"}
            process.state = "ended"
            self._processes.remove(process)
            if not process.is_loaded and not process.background:
                self._cannot_load = True
            self.changed.notify_all()
            if self.is_closed or not (was_spare and self._keeps_spares):
                return
            pause_s = self._pause_s = pause_before_restart_s(self._pause_s, 0.0, longest_s=_SPARE_PAUSE_S)
        _LOG.warning("a spare worker process ended: %s; another starts in %.1f s", process.reason, pause_s)
        self._closing.wait(pause_s)
        with self.changed:
            self._top_up()

    def _top_up(self) -> None:
        """Start spares, as many as are wanted and there is memory for."""
        if not self._keeps_spares or self.is_closed or self._cannot_load:
            return
        if any(not process.is_loaded and not process.background for process in self._processes):
            return  # they are needed at once, and take the cores and the memory first
        for _ in range(self._spares - self._count("idle") - self._count("starting")):
            if not self._has_memory_for_spare():
                return
            self._add(background=True)

    def _has_memory_for_spare(self) -> bool:
        """Whether one more process could load the model beside those that load it; if not, look again later."""
        left_bytes, loading = memory_left_bytes(), self._count("starting")
        if left_bytes is None or left_bytes >= self._loading_bytes * (1 + loading):
            return True
        if not self._waits_for_memory:
            self._waits_for_memory = True
            says = "no spare worker is started: %.0f MB of memory are left, and loading the model took %.0f MB;"
            says += " without a spare, replacing a worker that is lost takes as long as starting one"
            _LOG.warning(says, left_bytes / 1e6, self._loading_bytes / 1e6)
            threading.Thread(target=self._await_memory, name="spares", daemon=True).start()
        return False

    def _await_memory(self) -> None:
        """Start the spares that are lacking when there is memory for them."""
        while not self._closing.wait(_NO_ROOM_S):
            with self.changed:
                self._top_up()
                if self._spares <= self._count("idle") + self._count("starting"):
                    self._waits_for_memory = False
                    return

    def _add(self, *, background: bool) -> _Process:
        process = _Process(self, background=background)
        self._processes.append(process)
        process.send(msgspec.msgpack.encode(self.model))
        process.thread.start()
        return process

    def _count(self, state: State) -> int:
        return sum(process.state == state for process in self._processes)

    def _pids(self, *states: State) -> list[int]:
        with self.changed:
            return [p.child.pid for p in self._processes if p.child is not None and p.state in states]
