"""One notebook, executed with papermill in the process that calls this."""

import logging
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from mooncake_lab.batch.notebook import read_notebook
from mooncake_lab.batch.plan import MARK, NotebookJob, parameter_defaults
from mooncake_lab.batch.provenance import found_traces
from mooncake_lab.workload.releases import DATA_VARIABLE

Status = Literal["executed", "cached", "failed"]

_STARTS: Final = 3
"""Kernels talk over ports that another process may take in between; a start that fails is tried again."""

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_PUT_IN: Final = frozenset({"injected-parameters", "papermill-error-cell-tag"})
"""Tags of the cells that papermill added to its author's."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one job."""

    topic: str
    status: Status
    seconds: float
    notebook: Path
    """The executed copy; up to the failing cell where it failed."""
    point: str = ""
    """As in the job: which point of a sweep."""
    error: str | None = None
    """One line: the cell, its first line, and what it raised."""
    cell: int | None = None
    """The number of the cell that failed, as the author counts them."""
    traceback: str | None = None
    """What a reader of the notebook sees below that cell, without colours."""

    @property
    def name(self) -> str:
        """As the job's: the topic, and the point of a sweep."""
        return f"{self.topic} {self.point}".strip()


@dataclass(frozen=True, slots=True)
class _Failure:
    error: str
    cell: int | None = None
    traceback: str | None = None


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
    failure = _other_traces(job) or _run_cells(job, output)
    return Outcome(
        topic=job.topic,
        point=job.point,
        status="failed" if failure else "executed",
        seconds=time.monotonic() - started,
        notebook=job.output,
        error=failure and failure.error,
        cell=failure and failure.cell,
        traceback=failure and failure.traceback,
    )


def _other_traces(job: NotebookJob) -> _Failure | None:
    """Say which traces are others here than where the job was planned; None where all are the same."""
    here = found_traces() if job.traces else {}
    others = [name for name, planned in job.traces.items() if here.get(name) != planned]
    if not others:
        return None
    told = ", ".join(
        f"{name} (planned {_sha_or_none(job.traces[name])}, here {_sha_or_none(here.get(name))})"
        for name in others
    )
    return _Failure(
        f"the worker on {socket.gethostname()} finds other released traces than the batch was planned with:"
        f" {told}; set {DATA_VARIABLE} for the workers to a folder with the files it was planned with"
    )


def _sha_or_none(digest: str | None) -> str:
    return "none" if digest is None else f"SHA-256 {digest[:12]}"


def _run_cells(job: NotebookJob, output: Path) -> _Failure | None:
    import nbformat  # both take seconds to import, which a build with nothing to do does not spend
    import papermill
    from papermill.exceptions import PapermillExecutionError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    for attempt in range(1, _STARTS + 1):
        output.unlink(missing_ok=True)
        try:
            executed = papermill.execute_notebook(
                job.root / job.source,
                output,
                parameters=dict(job.parameters),
                progress_bar=False,
                cwd=job.root,
                extra_arguments=["--log-level=CRITICAL"],  # neither greetings nor the interrupt that ends it
            )
        except PapermillExecutionError as failure:
            return _failure(failure, output)
        except RuntimeError as failure:  # the kernel died, or never came up
            death = _death(failure, output)
            if death is not None or attempt == _STARTS:
                return death or _Failure(f"the kernel did not start: {failure}")
            _log.warning("%s: the kernel did not start (%s); trying again", job.topic, failure)
        else:
            _mark(executed, job)
            nbformat.write(executed, output)
            return None
    raise AssertionError("the loop above returns")


def _failure(failure: Any, partial: Path) -> _Failure:
    """Name the cell as the author counts them: without the cells that papermill put in."""
    cells = read_notebook(partial).cells
    failed = next(i for i, cell in enumerate(cells) if cell.metadata.get("papermill", {}).get("exception"))
    number = sum(_PUT_IN.isdisjoint(cell.tags) for cell in cells[: failed + 1])
    error = f"{_named(number, failure.source)} raised {failure.ename}: {failure.evalue}"
    return _Failure(error, number, _COLOUR.sub("", "\n".join(failure.traceback)))


def _death(failure: RuntimeError, partial: Path) -> _Failure | None:
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
    return _Failure(
        error, number, f"{cell.text}\n\n{error}\nA dead kernel leaves no traceback; memory may be short."
    )


def _named(number: int, source: str) -> str:
    """A cell by its number and its first line."""
    line = next((line.strip() for line in source.splitlines() if line.strip()), "")
    return f"cell {number} ({line[:70]!r})"


def _mark(executed: Any, job: NotebookJob) -> None:
    """Remember what the copy depends on, and show injected parameters only where they say something new."""
    recorded = (job.root / job.record).is_file()
    executed.metadata[MARK] = {"digest": job.digest, "recorded": recorded}
    executed.metadata["papermill"].update(input_path=job.source.as_posix(), output_path=job.output.as_posix())
    defaults = parameter_defaults(read_notebook(job.root / job.source))
    told = {name: value for name, value in job.parameters.items() if name != "out_dir"}
    if all(defaults.get(name) == value for name, value in told.items()):
        for cell in executed.cells:
            if "injected-parameters" in cell.metadata.get("tags", []):
                cell.metadata["tags"].append("remove-cell")
