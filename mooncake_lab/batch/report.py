"""What a batch leaves for people and for other programs: one row a notebook, one row a verdict.

`summary/notebooks.csv` and `.json` say what ran with which parameters and how it ended; `summary/verdicts.csv` has
every quantity that the chapters set beside the papers, at every point of a sweep; `summary/numbers/` has each
table that a chapter put on record, those of all points below each other.
"""

import shutil
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


def recorded(jobs: Iterable[Job]) -> dict[str, pd.DataFrame]:
    """Every table on record but the verdicts, by `topic.name`: the parameters, then the chapter's columns."""
    found: dict[str, list[dict[str, Any]]] = {}
    for job, told, numbers in _records(jobs):
        for name, rows in numbers.items():
            if name != TABLE and isinstance(rows, list):
                told_apart = ({**told, **row} for row in rows if isinstance(row, dict))
                found.setdefault(f"{job.topic}.{name}", []).extend(told_apart)
    return {name: pd.DataFrame(rows) for name, rows in found.items() if rows}


def shown(summary: Sequence[Mapping[str, Any]]) -> Table:
    """The summary as a table for a terminal."""
    table = Table("notebook", "parameters", "status", "seconds", "error")
    for row in summary:
        parameters = ", ".join(f"{name}={value}" for name, value in row["parameters"].items())
        seconds = "" if row["status"] == "cached" else f"{row['seconds']:.1f}"
        table.add_row(row["topic"], parameters, row["status"], seconds, row["error"] or "")
    return table


def write_tables(
    folder: Path,
    summary: Sequence[Mapping[str, Any]],
    judged: pd.DataFrame,
    numbers: Mapping[str, pd.DataFrame],
) -> None:
    """Write all tables below `folder/summary`; what an earlier batch left there is gone."""
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
    shutil.rmtree(target / "numbers", ignore_errors=True)
    (target / "numbers").mkdir()
    for name, table in numbers.items():
        table.to_csv(target / "numbers" / f"{name}.csv", index=False)


def _judged(jobs: Iterable[Job]) -> Iterator[dict[str, Any]]:
    for job, told, numbers in _records(jobs):
        for row in numbers.get(TABLE, []):
            yield {"topic": job.topic, **told, **row}


def _records(jobs: Iterable[Job]) -> Iterator[tuple[Job, dict[str, Any], dict[str, Any]]]:
    """The jobs that put numbers on record, with their parameters and those numbers."""
    for job in jobs:
        path = job.root / job.record
        if path.is_file():
            told = {name: value for name, value in job.parameters.items() if name != "out_dir"}
            yield job, told, msgspec.json.decode(path.read_bytes()).get("numbers", {})
