"""A live view of a run, for people who watch; silent where nobody does."""

import contextlib
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mooncake_lab.core import Arrived, Finished, FirstToken, Record, Rejected


@contextlib.contextmanager
def watched(requests: int) -> Generator[Callable[[Record], None], None, None]:
    """A bar on stderr over the requests of a run; what it yields is to be told of each record."""
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
