"""What a person sees while notebooks run: live bars on a terminal, one line a notebook elsewhere.

Progress is read from the executed copies themselves, which papermill saves after each cell; the
processes that do the work need not report their progress.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

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

from mooncake_lab.batch.execute import Outcome
from mooncake_lab.batch.notebook import read_notebook
from mooncake_lab.batch.plan import Job


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

    def waiting(self, job: Job) -> None:
        """Show a notebook that will run."""
        cells = len(read_notebook(job.root / job.source).cells) + 1  # papermill puts one in
        self._bars[job.name] = self._progress.add_task(job.name, total=cells, start=False)

    def look(self, jobs: Iterable[Job]) -> None:
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
