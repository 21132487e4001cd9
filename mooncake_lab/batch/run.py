"""Many notebooks at once, in processes of this machine or on workers of a Dask cluster.

A worker of a cluster works in the same folder as here, under the same path (a shared file system), with the same
environment; results come back through that folder.
"""

import os
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context, parent_process
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mooncake_lab.batch.execute import Outcome, Status, execute_in_worker
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


def run(
    jobs: Sequence[NotebookJob],
    *,
    workers: int,
    threads: int,
    console: Console,
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
        console: gets a line per notebook and, if it is a terminal, a bar.
        force: execute also what is up to date.
        executor: `processes` or `dask://HOST:PORT`.
    """
    done: dict[str, Outcome] = {}
    columns = TextColumn("notebooks"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(jobs))

        def finished(outcome: Outcome) -> None:
            done[outcome.name] = outcome
            console.print(_line(outcome), markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)

        for gathers in (False, True):
            turn = [after_the_others(job) if gathers else job for job in jobs if job.gathers == gathers]
            todo = [job for job in turn if force or not job.is_done()]
            for job in turn:
                if job not in todo:
                    finished(_ended(job, "cached"))
            if todo:
                _execute_all(todo, workers, threads, finished, executor)
    return [done[job.name] for job in jobs]


def _line(outcome: Outcome) -> str:
    """How a notebook ended."""
    match outcome.status:
        case "cached":
            how = "up to date"
        case "executed":
            how = f"executed in {outcome.seconds:.1f} s"
        case "failed":
            how = f"FAILED: {outcome.error}\n{'':17}read {outcome.notebook.as_posix()} up to there"
    return f"{outcome.name:<16} {how}"


def _execute_all(
    todo: Sequence[NotebookJob],
    workers: int,
    threads: int,
    finished: Callable[[Outcome], None],
    executor: str,
) -> None:
    """Everything that is to be done; a worker that dies takes no other notebook with it."""
    broken: list[NotebookJob] = []
    with opened(executor, workers=min(workers, len(todo))) as pool:
        running: dict[Future[Outcome], NotebookJob] = {}
        for job in reversed(todo):
            try:
                running[pool.submit(execute_in_worker, job, threads)] = job
            except BrokenExecutor:
                broken.append(job)
        for future in as_completed(running):
            if isinstance(future.exception(), BrokenExecutor):
                broken.append(running[future])
            else:
                finished(_outcome(future, running[future]))
    for job in broken:  # which of them broke it is not known: each once more, alone
        with opened(executor, workers=1) as pool:
            finished(_outcome(pool.submit(execute_in_worker, job, threads), job))


def _outcome(future: Future[Outcome], job: NotebookJob) -> Outcome:
    """What the worker returned; that it died, or could not begin, is the failure of one notebook only."""
    error = future.exception()
    if error is None:
        return future.result()
    where = "".join(traceback.format_exception(error))
    said = f"the worker failed with {type(error).__name__}: {error}"
    return replace(_ended(job, "failed"), error=said, traceback=where)


def _ended(job: NotebookJob, status: Status) -> Outcome:
    """The outcome of a notebook that was not executed."""
    return Outcome(topic=job.topic, point=job.point, status=status, seconds=0.0, notebook=job.output)
