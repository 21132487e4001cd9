"""A crew of processes that prefill together: started, given jobs, watched, and always ended."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from mooncake_lab.engine.pipeline.jobs import Job, Share
from mooncake_lab.engine.pipeline.worker import CrewSpec, live

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["Crew", "CrewSpec", "ProcessDiedError"]

_PRELOADED: Final = ["mooncake_lab.engine.pipeline.worker"]


class ProcessDiedError(RuntimeError):
    """A process of a crew ended or failed in the middle of something; the crew is stopped.

    Args:
        rank: which one.
        exit_code: of the process, negative for a signal; None where it failed and said why.
        said: what is known of the reason.
    """

    def __init__(self, rank: int, exit_code: int | None, said: str) -> None:
        super().__init__(said)
        self.rank = rank
        self.exit_code = exit_code


class Crew:
    """Processes on this machine that share prefills. Use it in a `with` statement: leaving it ends them all.

    A process that dies or fails is reported by rank, and the rest are stopped: they would wait for it. A process
    whose crew is gone ends itself.

    Args:
        spec: what to start.
        clock: gives seconds, for time limits.

    Raises:
        ProcessDiedError: when a process does not come up.
        TimeoutError: when it takes longer than the spec allows.
    """

    def __init__(self, spec: CrewSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self._clock = clock
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-lab-crew-")))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)  # torch is imported once, not once a process
        self._pipes: list[Any] = []  # Connection, but typeshed names it otherwise
        self._processes: list[BaseProcess] = []
        self._stack.callback(self._stop)
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            for rank in range(spec.processes):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=live,
                    args=(rank, spec, str(folder / "rendezvous"), theirs),
                    name=f"crew-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._gather("coming up", spec.timeout_s)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> list[int]:
        """Ranks of the processes that run."""
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def run(self, job: Job, timeout_s: float | None = None) -> list[Share]:
        """Do a job together; the shares of those that took part, by rank.

        Args:
            job: what to do.
            timeout_s: after which it is given up; None takes the spec's.

        Raises:
            ValueError: when the job needs more processes than there are, or the crew has been stopped.
            ProcessDiedError: when a process dies or fails.
            TimeoutError: when it takes longer than the spec allows.
        """
        if job.processes > self.spec.processes:
            raise ValueError(f"a job for {job.processes} processes; this crew has {self.spec.processes}")
        if len(self.alive) < self.spec.processes:
            raise ValueError(f"only ranks {self.alive} of {self.spec.processes} are alive; start another crew")
        for pipe in self._pipes:
            pipe.send(job)
        return self._gather("prefilling", timeout_s or self.spec.timeout_s)[: job.processes]

    def close(self) -> None:
        """End all processes and remove what they shared; once is enough, more does nothing."""
        self._stack.close()

    def _gather(self, doing: str, timeout_s: float) -> list[Any]:
        """One answer of every process."""
        answers: dict[int, Any] = {}
        until_s = self._clock() + timeout_s
        while len(answers) < len(self._processes):
            missing = [rank for rank in range(len(self._processes)) if rank not in answers]
            watched: list[Any] = [self._pipes[rank] for rank in missing]
            watched += [process.sentinel for process in self._processes]
            if not wait(watched, max(until_s - self._clock(), 0.0)):
                self.close()
                raise TimeoutError(f"ranks {missing} gave no answer within {timeout_s:g} s of {doing}")
            for rank in missing:
                if self._pipes[rank].poll():
                    answers[rank] = self._answer(rank, doing)
            self._require_alive(doing)
        return [answers[rank] for rank in range(len(self._processes))]

    def _answer(self, rank: int, doing: str) -> Any:
        try:
            kind, content = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._report_death(rank, doing)
        if kind == "failed":
            self.close()
            raise ProcessDiedError(
                rank, None, f"rank {rank} of {len(self._processes)} failed while {doing}: {content}"
            )
        return content

    def _require_alive(self, doing: str) -> None:
        for rank, process in enumerate(self._processes):
            if not process.is_alive() and not self._pipes[rank].poll():
                self._report_death(rank, doing)

    def _report_death(self, rank: int, doing: str) -> NoReturn:
        process, count = self._processes[rank], len(self._processes)
        process.join(5)
        code = process.exitcode
        self.close()
        raise ProcessDiedError(
            rank, code, f"rank {rank} of {count} died while {doing}, exit code {code}; the others were stopped"
        )

    def _stop(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                process.kill()  # a process may wait in the network for one that is gone: it cannot be asked
            pipe.close()
        for process in self._processes:
            process.join()
