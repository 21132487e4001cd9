"""A progress bar for a run, shown only on a terminal."""

import contextlib
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mooncake_lab.core import Arrived, Finished, FirstToken, Record, Rejected


@contextlib.contextmanager
def watched(requests: int) -> Generator[Callable[[Record], None], None, None]:
    """A progress bar on stderr over the requests of a run; call the yielded function with each record."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}"),
    )
    counts = {"arrived": 0, "decoding": 0, "rejected": 0}
    with Progress(*columns, console=Console(stderr=True), disable=not Console(stderr=True).is_terminal) as bar:
        task = bar.add_task("requests", total=requests, said="")

        def note(record: Record) -> None:
            match record:
                case Arrived():
                    counts["arrived"] += 1
                case FirstToken():
                    counts["decoding"] += 1
                case Finished():
                    counts["decoding"] -= 1
                    bar.advance(task)
                case Rejected():
                    counts["rejected"] += 1
                    bar.advance(task)
                case _:
                    return
            bar.update(task, said="  ".join(f"{count} {name}" for name, count in counts.items()))

        yield note
