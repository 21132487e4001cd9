"""Many notebooks at once, in processes, with a display for whoever watches."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Final

from mooncake_lab.batch.display import Display
from mooncake_lab.batch.execute import Outcome, execute, prepare_worker
from mooncake_lab.batch.plan import Job, after_the_others

__all__ = ["Outcome", "run"]

_LOOK_EVERY_S: Final = 0.5


def run(
    jobs: Sequence[Job], *, workers: int, threads: int, display: Display, force: bool = False
) -> list[Outcome]:
    """Execute what is not up to date; the outcomes come in the order of the jobs.

    All of them run, also after one failed: the next build then finds the good ones done. Those that gather the
    numbers of others run last.

    Args:
        jobs: what `plan` returned.
        workers: notebooks at a time.
        threads: of the numeric libraries, in each notebook.
        display: shows what happens.
        force: execute also what is up to date.
    """
    done: dict[str, Outcome] = {}
    with display:
        for gathers in (False, True):
            turn = [after_the_others(job) if gathers else job for job in jobs if job.gathers == gathers]
            kept = {job.topic: _cached(job) for job in turn if not force and job.is_done()}
            for outcome in kept.values():
                display.finished(outcome)
            todo = [job for job in turn if job.topic not in kept]
            done |= kept | (_execute_all(todo, workers, threads, display) if todo else {})
    return [done[job.topic] for job in jobs]


def _cached(job: Job) -> Outcome:
    return Outcome(topic=job.topic, status="cached", seconds=0.0, notebook=job.output)


def _execute_all(todo: Sequence[Job], workers: int, threads: int, display: Display) -> dict[str, Outcome]:
    done: dict[str, Outcome] = {}
    context = get_context("spawn")  # a fresh interpreter: papermill's event loops do not survive a fork
    with ProcessPoolExecutor(
        max_workers=min(workers, len(todo)), mp_context=context, initializer=prepare_worker, initargs=(threads,)
    ) as pool:
        running: dict[Future[Outcome], Job] = {}
        for job in todo:
            running[pool.submit(execute, job)] = job
            display.waiting(job)
        while running:
            finished, _ = wait(running, timeout=_LOOK_EVERY_S, return_when=FIRST_COMPLETED)
            for future in finished:
                job = running.pop(future)
                done[job.topic] = future.result()
                display.finished(done[job.topic])
            display.look(running.values())
    return done
