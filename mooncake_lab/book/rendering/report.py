"""What a batch leaves for people and for other programs: tables, and an index that links every notebook.

`summary/notebooks.csv` and `.json` say what ran with which parameters and how it ended; `summary/verdicts.csv` has
every quantity that the chapters set beside the papers, at every point of a sweep; `summary/numbers/` has each
table that a chapter put on record, those of all points below each other. `index.html` opens from a disk.
It loads nothing from another machine.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final
from urllib.parse import quote

import msgspec
import pandas as pd

from mooncake_lab.book.paper.scorecard import TABLE
from mooncake_lab.book.rendering.chapters import tables
from mooncake_lab.book.rendering.pages import notebook_html
from mooncake_lab.book.rendering.plan import NotebookJob
from mooncake_lab.book.rendering.run import Outcome

FOLDER: Final = "summary"
"""Where the tables go, in the folder of a batch; apart from the numbers of the chapters."""


def rows(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One row a notebook: topic, notebook, parameters, status, seconds, record, cell, error, traceback.

    The seconds are those of the execution, also where the status is "cached".
    """
    return [
        {
            "topic": job.topic,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 3),
            "notebook": job.output.as_posix(),
            "record": job.record.as_posix() if (job.root / job.record).is_file() else None,
            "parameters": job.told,
            "cell": outcome.cell,
            "error": outcome.error,
            "traceback": outcome.traceback,
        }
        for outcome in outcomes
        for job in [outcome.job]
    ]


def verdicts(jobs: Iterable[NotebookJob]) -> pd.DataFrame:
    """Every quantity that the chapters compare with a paper, one row at every point: the sweep beside the claims.

    Columns: topic, the parameters, then what the chapter recorded, such as quantity, paper, ours, verdict.
    """
    return pd.DataFrame(
        [
            {"topic": job.topic, **job.told, **row}
            for job in jobs
            if (job.root / job.record).is_file()
            for row in msgspec.json.decode((job.root / job.record).read_bytes()).get("numbers", {}).get(TABLE, [])
        ]
    )


def recorded(jobs: Iterable[NotebookJob]) -> dict[str, pd.DataFrame]:
    """Every table on record but the verdicts, by `topic.name`: the parameters, then the chapter's columns.

    A column that is called like a parameter is left out where it says the same, else it is `table.NAME`.
    """
    found: dict[str, list[pd.DataFrame]] = {}
    for job in jobs:
        kept = tables(job.root / job.record) if (job.root / job.record).is_file() else {}
        for name, table in kept.items():
            if name != TABLE:
                found.setdefault(f"{job.topic}.{name}", []).append(_beside(job.told, table))
    return {name: pd.concat(parts, ignore_index=True) for name, parts in found.items()}


def _beside(told: Mapping[str, Any], table: pd.DataFrame) -> pd.DataFrame:
    doubled = [name for name in told if name in table.columns]
    same = [name for name in doubled if (table[name] == told[name]).all()]
    own = table.drop(columns=same).rename(columns={name: f"table.{name}" for name in doubled})
    return pd.concat([pd.DataFrame([told] * len(own), index=own.index), own], axis=1)


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


_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.6 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 56rem; }
pre { overflow-x: auto; padding: .7em; border: 1px solid #8886; border-radius: 6px; font-size: .82rem; }
table { border-collapse: collapse; font-size: .9rem; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .3em .8em; border-bottom: 1px solid #8886; vertical-align: top; }
img, svg { max-width: 100%; background: #fff; }
</style>
</head>
<body><main>
$body
</main></body>
</html>
""")


def write_gallery(
    folder: Path,
    jobs: Sequence[NotebookJob],
    summary: Sequence[Mapping[str, Any]],
    judged: pd.DataFrame,
    numbers: Sequence[str] = (),
) -> Path:
    """Write `index.html` and one page per notebook beside its executed copy; return the index.

    A page that is newer than its notebook stays.
    """
    failed = sum(row["status"] == "failed" for row in summary)
    body = f"<h1>Batch</h1><p>{len(summary)} notebooks, {failed} failed.</p>"
    names = ["notebooks", "verdicts", *(f"numbers/{name}" for name in numbers)]
    links = (f'<a href="{FOLDER}/{quote(name)}.csv">{escape(Path(name).name)}</a>' for name in names)
    body += f"<p>Tables of all points (CSV): {', '.join(links)}.</p>"
    rows = pd.DataFrame(
        {
            "notebook": _link(folder, job),
            **{name: escape(str(value)) for name, value in row["parameters"].items()},
            "status": row["status"],
            "seconds": f"{row['seconds']:.1f}",
            "error": f"<pre>{escape(row['traceback'] or row['error'])}</pre>" if row["error"] else "",
        }
        for job, row in zip(jobs, summary, strict=True)
    )
    body += rows.to_html(index=False, border=0, escape=False)
    index = folder / "index.html"
    _write_page(index, "Batch", body + "".join(_spread(judged)))
    return index


def _write_page(path: Path, title: str, body: str) -> None:
    path.write_text(_PAGE.substitute(title=escape(title), body=body), encoding="utf-8")


def _link(folder: Path, job: NotebookJob) -> str:
    """The topic of a notebook, with a link to its page, which is written if it is older than the executed copy."""
    source = job.root / job.output
    target = source.with_suffix(".html")
    if not source.is_file():
        target.unlink(missing_ok=True)  # of an earlier batch: what failed now is not what it shows
        return escape(job.topic)
    if not target.is_file() or target.stat().st_mtime_ns <= source.stat().st_mtime_ns:
        back = Path(os.path.relpath(folder / "index.html", target.parent)).as_posix()
        _write_page(
            target, job.name, f'<p><a href="{back}">All notebooks of this batch</a></p>{notebook_html(source)}'
        )
    return f'<a href="{escape(target.relative_to(folder).as_posix())}">{escape(job.topic)}</a>'


def _spread(judged: pd.DataFrame) -> Iterator[str]:
    """What the papers were compared with, over all points: least, median and largest, and the verdicts."""
    if judged.empty or not {"quantity", "paper", "ours", "verdict"} <= {*judged.columns}:
        return
    yield "<h2>Beside the papers, over all points</h2>"
    for topic, rows in judged.groupby("topic", sort=False):
        table = pd.DataFrame([_over_points(group) for _, group in rows.groupby("quantity", sort=False)])
        shown = table.to_html(index=False, border=0, na_rep="–", float_format="{:.4g}".format)
        yield f"<h3>{escape(str(topic))}</h3>{shown}"


def _over_points(rows: pd.DataFrame) -> dict[str, Any]:
    first, ours = rows.iloc[0], rows["ours"].astype(float)
    said = rows["verdict"].value_counts().items()
    return {
        "quantity": first["quantity"],
        "paper": first["paper"],
        "points": len(rows),
        "least": ours.min(),
        "median": ours.median(),
        "largest": ours.max(),
        "verdicts": ", ".join(f"{number} x {verdict}" for verdict, number in said),
    }
