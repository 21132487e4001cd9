"""The index of a batch: every notebook with its parameters and how it ended, linked to a page that shows it.

`index.html` opens from a disk, and nothing of it comes from another machine.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from mooncake_lab.batch.pages import notebook_page, page
from mooncake_lab.batch.plan import Job
from mooncake_lab.batch.report import FOLDER


def write_gallery(
    folder: Path,
    jobs: Sequence[Job],
    summary: Sequence[Mapping[str, Any]],
    judged: pd.DataFrame,
    numbers: Sequence[str] = (),
) -> Path:
    """Write `index.html` and one page a notebook beside its executed copy; return the index.

    A page that is newer than its notebook stays.

    Args:
        folder: of the batch.
        jobs: what was executed.
        summary: one row a notebook.
        judged: one row a quantity that is set beside a paper.
        numbers: names of the tables in `summary/numbers`.
    """
    for job in jobs:
        _write_page(folder, job)
    names = list(summary[0]["parameters"])
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("notebook", *names, "status", "seconds", "error"))
    body = "".join(_row(folder, job, row) for job, row in zip(jobs, summary, strict=True))
    failed = sum(row["status"] == "failed" for row in summary)
    said = f"{len(summary)} notebooks, {failed} failed."
    tables = (
        f'Tables: <a href="{FOLDER}/notebooks.csv">notebooks</a>, <a href="{FOLDER}/verdicts.csv">verdicts</a>'
    )
    links = ", ".join(f'<a href="{FOLDER}/numbers/{quote(name)}.csv">{escape(name)}</a>' for name in numbers)
    data = f"<p>Numbers of all points (CSV): {links}.</p>" if links else ""
    content = (
        f"<h1>Batch</h1><p>{said} {tables} (CSV).</p>{data}"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{''.join(_spread(judged))}"
    )
    index = folder / "index.html"
    index.write_text(page("Batch", content), encoding="utf-8")
    return index


def _page_of(job: Job) -> Path:
    return (job.root / job.output).with_suffix(".html")


def _write_page(folder: Path, job: Job) -> None:
    source, target = job.root / job.output, _page_of(job)
    if not source.is_file():
        target.unlink(missing_ok=True)  # of an earlier batch: what failed now is not what it shows
        return
    if target.is_file() and target.stat().st_mtime_ns > source.stat().st_mtime_ns:
        return

    back = Path(os.path.relpath(folder / "index.html", target.parent)).as_posix()
    target.write_text(notebook_page(source, title=job.name, back=back), encoding="utf-8")


def _row(folder: Path, job: Job, row: Mapping[str, Any]) -> str:
    target = _page_of(job)
    name = escape(row["topic"])
    if target.is_file():
        name = f'<a href="{escape(target.relative_to(folder).as_posix())}">{name}</a>'
    seconds = "" if row["status"] == "cached" else f"{row['seconds']:.1f}"
    status = f'<span class="failed">{row["status"]}</span>' if row["status"] == "failed" else row["status"]
    trace = (
        f"<details><summary>traceback</summary><pre>{escape(row['traceback'])}</pre></details>"
        if row["traceback"]
        else ""
    )
    values = [escape(str(value)) for value in row["parameters"].values()]
    cells = (name, *values, status, seconds, escape(row["error"] or "") + trace)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


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
