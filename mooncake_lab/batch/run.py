"""Many notebooks at once, in processes of this machine or on workers of a Dask cluster, with a progress display.

A worker of a cluster works in the same folder as here, under the same path (a shared file system), with the same
environment; results come back through that folder. Progress is read from the executed copies themselves, which
papermill saves after each cell.
"""

import os
import threading
import traceback
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from mooncake_lab.batch.execute import Outcome, execute_in_worker
from mooncake_lab.batch.notebook import read_notebook
from mooncake_lab.batch.plan import NotebookJob, after_the_others

PROCESSES: Final = "processes"
"""The executor of this machine."""

_DASK: Final = "dask"
_PRELOADED: Final = ("papermill", "mooncake_lab.batch.execute")


def check_executor(name: str) -> str:
    """The name as it is.

    Raises:
        ValueError: when it is neither `processes` nor `dask://HOST:PORT`.
    """
    parts = urlsplit(name)
    if name == PROCESSES or (parts.scheme == _DASK and parts.hostname and parts.port):
        return name
    raise ValueError(f"there is no executor {name!r}; allowed are {PROCESSES} and {_DASK}://HOST:PORT")


@contextmanager
def opened(name: str, *, workers: int) -> Generator[Executor]:
    """An executor, closed afterwards.

    Args:
        name: what `check_executor` lets through.
        workers: processes at a time on this machine; a cluster has as many as it has.

    Raises:
        OSError: when the scheduler of a cluster does not answer.
    """
    if name == PROCESSES:
        # from a process that has imported papermill, which takes seconds, and has run none of its event loops,
        # which do not survive a fork
        context = get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED])
        pool = ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_end_with_parent)
        try:
            yield pool
        except BaseException:  # an interrupt: what has not begun is not to begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        return
    from distributed import Client

    with Client(f"tcp://{urlsplit(name).netloc}", set_as_default=False) as client:
        yield client.get_executor(retries=1, pure=False)


def _end_with_parent() -> None:
    """Have this worker end when who started it was killed; its kernel then finds itself alone, and ends."""
    parent = parent_process()
    assert parent is not None  # noqa: S101  # it was started by one

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


class Display:
    """Shows the state of a batch on stderr; mutable, because a screen is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("cells"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def waiting(self, job: NotebookJob) -> None:
        """Show a notebook that will run."""
        cells = len(read_notebook(job.root / job.source).cells) + 1  # papermill puts one in
        self._bars[job.name] = self._progress.add_task(job.name, total=cells, start=False)

    def look(self, jobs: Iterable[NotebookJob]) -> None:
        """See how far the running notebooks are; does nothing unless the output is a terminal."""
        if not self._console.is_terminal:
            return
        for job in jobs:
            try:
                cells = read_notebook(job.root / job.output).cells
            except (OSError, ValueError):  # not begun, or being written right now
                continue
            self._progress.start_task(self._bars[job.name])
            self._progress.update(self._bars[job.name], completed=sum(cell.is_finished for cell in cells))

    def finished(self, outcome: Outcome) -> None:
        """Say how a notebook ended."""
        if (bar := self._bars.pop(outcome.name, None)) is not None:
            self._progress.remove_task(bar)
        match outcome.status:
            case "cached":
                how = "up to date"
            case "executed":
                how = f"executed in {outcome.seconds:.1f} s"
            case "failed":
                how = f"FAILED: {outcome.error}\n{'':17}read {outcome.notebook.as_posix()} up to there"
        self._console.print(f"{outcome.name:<16} {how}", markup=False, highlight=False, soft_wrap=True)


__all__ = ["Outcome", "run"]

_LOOK_EVERY_S: Final = 0.5


def run(
    jobs: Sequence[NotebookJob],
    *,
    workers: int,
    threads: int,
    display: Display,
    force: bool = False,
    executor: str = PROCESSES,
) -> list[Outcome]:
    """Execute what is not up to date; the outcomes come in the order of the jobs.

    All of them run, also after one failed: the next build then finds the good ones done. Those that gather the
    numbers of others run last. Of the rest the last one begins first: the longest chapters are in the second half
    of the book, and what begins last should be short.

    Args:
        jobs: what `plan` returned.
        workers: notebooks at a time on this machine.
        threads: of the numeric libraries, in each notebook.
        display: shows what happens.
        force: execute also what is up to date.
        executor: `processes` or `dask://HOST:PORT`.
    """
    done: dict[str, Outcome] = {}
    with display:
        for gathers in (False, True):
            turn = [after_the_others(job) if gathers else job for job in jobs if job.gathers == gathers]
            kept = {job.name: _cached(job) for job in turn if not force and job.is_done()}
            for outcome in kept.values():
                display.finished(outcome)
            todo = [job for job in turn if job.name not in kept]
            done |= kept | (_execute_all(todo, workers, threads, display, executor) if todo else {})
    return [done[job.name] for job in jobs]


def _cached(job: NotebookJob) -> Outcome:
    return Outcome(topic=job.topic, point=job.point, status="cached", seconds=0.0, notebook=job.output)


def _execute_all(
    todo: Sequence[NotebookJob], workers: int, threads: int, display: Display, executor: str
) -> dict[str, Outcome]:
    """Everything that is to be done; a worker that dies takes no other notebook with it."""
    done: dict[str, Outcome] = {}
    broken: list[NotebookJob] = []
    with opened(executor, workers=min(workers, len(todo))) as pool:
        running: dict[Future[Outcome], NotebookJob] = {}
        for job in reversed(todo):
            display.waiting(job)
            try:
                running[pool.submit(execute_in_worker, job, threads)] = job
            except BrokenExecutor:
                broken.append(job)
        while running:
            finished, _ = wait(running, timeout=_LOOK_EVERY_S, return_when=FIRST_COMPLETED)
            for future in finished:
                job = running.pop(future)
                if isinstance(future.exception(), BrokenExecutor):
                    broken.append(job)
                    continue
                done[job.name] = _outcome(future, job)
                display.finished(done[job.name])
            display.look(running.values())
    for job in broken:  # who of them broke it is not known: each once more, alone
        with opened(executor, workers=1) as pool:
            future = pool.submit(execute_in_worker, job, threads)
            wait([future])
            done[job.name] = _outcome(future, job)
        display.finished(done[job.name])
    return done


def _outcome(future: Future[Outcome], job: NotebookJob) -> Outcome:
    """What the worker said; that it died, or could not even begin, is the failure of one notebook, not of all."""
    error = future.exception()
    if error is None:
        return future.result()
    said = f"the worker failed with {type(error).__name__}: {error}"
    where = "".join(traceback.format_exception(error))
    return Outcome(
        topic=job.topic,
        point=job.point,
        status="failed",
        seconds=0.0,
        notebook=job.output,
        error=said,
        traceback=where,
    )
