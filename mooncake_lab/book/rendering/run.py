"""Many notebooks at once with papermill, in processes of this machine or on workers of a Dask cluster.

A worker of a cluster works in the same folder as here, under the same path (a shared file system), with the same
environment; results come back through that folder.
"""

import logging
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mooncake_lab.book.rendering.notebook import read_notebook
from mooncake_lab.book.rendering.plan import MARK, NotebookJob, after_the_others, parameter_defaults
from mooncake_lab.book.rendering.provenance import found_traces
from mooncake_lab.workload.releases import DATA_VARIABLE

_STARTS: Final = 3
"""Kernels talk over ports that another process may take in between; a start that fails is tried again."""

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_PUT_IN: Final = frozenset({"injected-parameters", "papermill-error-cell-tag"})
"""Tags of the cells that papermill added to its author's."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one job; its executed copy ends at the failing cell where it failed."""

    job: NotebookJob
    status: Literal["executed", "cached", "failed"] = "failed"
    seconds: float = 0.0
    """How long its execution took, also where it was executed by an earlier batch."""
    error: str | None = None
    """One line: the cell, its first line, and what it raised."""
    cell: int | None = None
    """The number of the cell that failed, as the author counts them."""
    traceback: str | None = None
    """What a reader of the notebook sees below that cell, without colours."""


def execute_in_worker(job: NotebookJob, threads: int) -> Outcome:
    """`execute`, in a process of a batch: its kernel inherits its share of the cores, and calls nobody.

    What the caller has set already is left alone.
    """
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm misses widgets; pages have none
    return execute(job)


def execute(job: NotebookJob) -> Outcome:
    """Execute one notebook and write its copy, marked with the digest of what it was made from.

    A failing cell is an outcome, not an exception; the copy then ends there, for reading. Where other traces are
    found than the job was planned with, no cell runs: the digest would speak of traces that were not read.
    """
    started = time.monotonic()
    output = job.root / job.output
    output.parent.mkdir(parents=True, exist_ok=True)
    for made_before in (output, job.root / job.record):
        made_before.unlink(missing_ok=True)
    outcome = _other_traces(job) or _run_cells(job, output)
    outcome = replace(outcome, seconds=time.monotonic() - started)
    if outcome.status == "executed":
        _mark(output, job, outcome.seconds)
    return outcome


def _other_traces(job: NotebookJob) -> Outcome | None:
    """Say which traces are others here than where the job was planned; None where all are the same."""
    here = found_traces() if job.traces else {}
    others = [name for name, planned in job.traces.items() if here.get(name) != planned]
    if not others:
        return None

    def sha(digest: str | None) -> str:
        return "none" if digest is None else f"SHA-256 {digest[:12]}"

    told = ", ".join(f"{name} (planned {sha(job.traces[name])}, here {sha(here.get(name))})" for name in others)
    error = (
        f"the worker on {socket.gethostname()} finds other released traces than the batch was planned with:"
        f" {told}; set {DATA_VARIABLE} for the workers to a folder with the files it was planned with"
    )
    return Outcome(job=job, error=error)


def _run_cells(job: NotebookJob, output: Path) -> Outcome:
    import papermill  # takes seconds to import, which a build with nothing to do does not spend
    from papermill.exceptions import PapermillExecutionError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    for attempt in range(1, _STARTS + 1):
        output.unlink(missing_ok=True)
        try:
            papermill.execute_notebook(
                job.root / job.source,
                output,
                parameters=dict(job.parameters),
                progress_bar=False,
                cwd=job.root,
                extra_arguments=["--log-level=CRITICAL"],  # neither greetings nor the interrupt that ends it
            )
        except PapermillExecutionError as failure:
            return _failed(job, failure, output)
        except RuntimeError as failure:  # the kernel died, or never came up
            death = _died(job, failure, output)
            if death is not None or attempt == _STARTS:
                return death or Outcome(job=job, error=f"the kernel did not start: {failure}")
            _log.warning("%s: the kernel did not start (%s); trying again", job.topic, failure)
        else:
            return Outcome(job=job, status="executed")
    raise AssertionError("the loop above returns")


def _failed(job: NotebookJob, failure: Any, partial: Path) -> Outcome:
    """Name the cell as the author counts them: without the cells that papermill put in."""
    cells = read_notebook(partial).cells
    failed = next(i for i, cell in enumerate(cells) if cell.metadata.get("papermill", {}).get("exception"))
    number = sum(_PUT_IN.isdisjoint(cell.tags) for cell in cells[: failed + 1])
    error = f"{_named(number, failure.source)} raised {failure.ename}: {failure.evalue}"
    traceback = _COLOUR.sub("", "\n".join(failure.traceback))
    return Outcome(job=job, error=error, cell=number, traceback=traceback)


def _died(job: NotebookJob, failure: RuntimeError, partial: Path) -> Outcome | None:
    """Name the cell in which the kernel died, with its source for want of a traceback; None if none had begun."""
    try:
        cells = [cell for cell in read_notebook(partial).cells if _PUT_IN.isdisjoint(cell.tags)]
    except (OSError, ValueError):
        return None
    begun = [(number, cell) for number, cell in enumerate(cells, 1) if cell.has_begun]
    if not begun:
        return None
    number, cell = begun[-1]
    error = f"the kernel died in {_named(number, cell.text)}: {failure}"
    shown = f"{cell.text}\n\n{error}\nA dead kernel leaves no traceback; memory may be short."
    return Outcome(job=job, error=error, cell=number, traceback=shown)


def _named(number: int, source: str) -> str:
    """A cell by its number and its first line."""
    line = next((line.strip() for line in source.splitlines() if line.strip()), "")
    return f"cell {number} ({line[:70]!r})"


def _mark(output: Path, job: NotebookJob, seconds: float) -> None:
    """Write into the copy what it depends on and how long it took; show injected parameters if they differ."""
    import nbformat

    executed: Any = nbformat.read(output, as_version=nbformat.NO_CONVERT)
    recorded = (job.root / job.record).is_file()
    executed.metadata[MARK] = {"digest": job.digest, "recorded": recorded, "seconds": seconds}
    executed.metadata["papermill"].update(input_path=job.source.as_posix(), output_path=job.output.as_posix())
    defaults = parameter_defaults(read_notebook(job.root / job.source))
    if all(defaults.get(name) == value for name, value in job.told.items()):
        for cell in executed.cells:
            if "injected-parameters" in cell.metadata.get("tags", []):
                cell.metadata["tags"].append("remove-cell")
    nbformat.write(executed, output)


PROCESSES: Final = "processes"
"""The executor of this machine."""

_DASK: Final = "dask"
_PRELOADED: Final = ("papermill", "mooncake_lab.book.rendering.run")


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

    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # outcomes say that a scheduler ended
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
            done[outcome.job.name] = outcome
            console.print(_line(outcome), markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)

        for gathers in (False, True):
            turn = [after_the_others(job) if gathers else job for job in jobs if job.gathers == gathers]
            todo = [job for job in turn if force or not job.is_done()]
            for job in turn:
                if job not in todo:
                    finished(Outcome(job=job, status="cached", seconds=job.seconds()))
            if todo:
                try:
                    _execute_all(todo, workers, threads, finished, executor)
                except OSError as error:  # a cluster that executed some, and ended before the others began
                    if all(outcome.status == "cached" for outcome in done.values()):
                        raise
                    for job in (job for job in todo if job.name not in done):
                        finished(Outcome(job=job, error=f"{executor} cannot be used any more: {error}"))
    return [done[job.name] for job in jobs]


def _line(outcome: Outcome) -> str:
    """How a notebook ended."""
    match outcome.status:
        case "cached":
            how = "up to date"
        case "executed":
            how = f"executed in {outcome.seconds:.1f} s"
        case "failed":
            how = f"FAILED: {outcome.error}"
            if outcome.cell is not None:
                how += f"\n{'':17}read {outcome.job.output.as_posix()} up to there"
    return f"{outcome.job.name:<16} {how}"


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
            if isinstance(_raised(future), BrokenExecutor):
                broken.append(running[future])
            else:
                finished(_outcome(future, running[future], executor))
    for job in broken:  # which of them broke it is not known: each once more, alone
        with opened(executor, workers=1) as pool:
            finished(_outcome(pool.submit(execute_in_worker, job, threads), job, executor))


def _raised(future: Future[Outcome]) -> BaseException | None:
    """What execution raised; a scheduler that ends cancels all that it has not given back."""
    try:
        return future.exception()
    except CancelledError as error:
        return error


def _outcome(future: Future[Outcome], job: NotebookJob, executor: str) -> Outcome:
    """What the worker returned; that it died, or could not begin, is the failure of one notebook only."""
    error = _raised(future)
    if error is None:
        return future.result()
    if isinstance(error, CancelledError):
        ended = (
            f"the scheduler {executor} ended, or could not be reached any more, before this notebook was done;"
            " start it again, and the same command executes only what is missing"
        )
        return Outcome(job=job, error=ended)
    where = "".join(traceback.format_exception(error))
    return Outcome(job=job, error=f"the worker failed with {type(error).__name__}: {error}", traceback=where)
