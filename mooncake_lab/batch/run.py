"""Many notebooks at once, in processes or on a cluster, with a progress display."""

import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from typing import Final

from mooncake_lab.batch.display import Display
from mooncake_lab.batch.execute import Outcome, execute_in_worker
from mooncake_lab.batch.executors import PROCESSES, opened
from mooncake_lab.batch.plan import Job, after_the_others

__all__ = ["Outcome", "run"]

_LOOK_EVERY_S: Final = 0.5


def run(
    jobs: Sequence[Job],
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


def _cached(job: Job) -> Outcome:
    return Outcome(topic=job.topic, point=job.point, status="cached", seconds=0.0, notebook=job.output)


def _execute_all(
    todo: Sequence[Job], workers: int, threads: int, display: Display, executor: str
) -> dict[str, Outcome]:
    """Everything that is to be done; a worker that dies takes no other notebook with it."""
    done: dict[str, Outcome] = {}
    broken: list[Job] = []
    with opened(executor, workers=min(workers, len(todo))) as pool:
        running: dict[Future[Outcome], Job] = {}
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


def _outcome(future: Future[Outcome], job: Job) -> Outcome:
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
