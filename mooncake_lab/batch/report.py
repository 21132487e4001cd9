"""What a batch leaves for people and for other programs: one row a notebook, one row a verdict.

`summary/notebooks.csv` and `.json` say what ran with which parameters and how it ended; `summary/verdicts.csv` has
every quantity that the chapters set beside the papers, at every point of a sweep.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pandas as pd
from rich.table import Table

from mooncake_lab.batch.execute import Outcome
from mooncake_lab.batch.plan import Job
from mooncake_lab.paper.scorecard import TABLE

FOLDER: Final = "summary"
"""Where the tables go, in the folder of a batch; apart from the numbers of the chapters."""


def rows(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row a notebook: topic, notebook, parameters, status, seconds, record, cell, error, traceback."""
    return [
        {
            "topic": outcome.topic,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 3),
            "notebook": outcome.notebook.as_posix(),
            "record": job.record.as_posix() if (job.root / job.record).is_file() else None,
            "parameters": {name: value for name, value in job.parameters.items() if name != "out_dir"},
            "cell": outcome.cell,
            "error": outcome.error,
            "traceback": outcome.traceback,
        }
        for job, outcome in zip(jobs, outcomes, strict=True)
    ]


def verdicts(jobs: Iterable[Job]) -> pd.DataFrame:
    """Every quantity that the chapters compare with a paper, one row at every point: the sweep beside the claims.

    Columns: topic, the parameters, then what the chapter recorded, such as quantity, paper, ours, verdict.
    """
    return pd.DataFrame(_judged(jobs))


def shown(summary: Sequence[Mapping[str, Any]]) -> Table:
    """The summary as a table for a terminal."""
    table = Table("notebook", "parameters", "status", "seconds", "error")
    for row in summary:
        parameters = ", ".join(f"{name}={value}" for name, value in row["parameters"].items())
        seconds = "" if row["status"] == "cached" else f"{row['seconds']:.1f}"
        table.add_row(row["topic"], parameters, row["status"], seconds, row["error"] or "")
    return table


def write_tables(folder: Path, summary: Sequence[Mapping[str, Any]], judged: pd.DataFrame) -> None:
    """Write both tables below `folder/summary`."""
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    (target / "notebooks.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    flat = [
        {"notebook": row["notebook"], **row["parameters"]}
        | {key: row[key] for key in ("status", "seconds", "cell", "error")}
        for row in summary
    ]
    pd.DataFrame(flat).astype({"cell": "Int64"}).to_csv(target / "notebooks.csv", index=False)
    judged.to_csv(target / "verdicts.csv", index=False)


def _judged(jobs: Iterable[Job]) -> Iterator[dict[str, Any]]:
    for job in jobs:
        path = job.root / job.record
        if not path.is_file():
            continue
        content: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        told = {name: value for name, value in job.parameters.items() if name != "out_dir"}
        for row in content.get("numbers", {}).get(TABLE, []):
            yield {"topic": job.topic, **told, **row}
