"""Points for learning platforms: a gradebook for Canvas, a table for Moodle, an autograder for Gradescope.

The formats are those of `gradebook_importer.rb` in the source of Canvas, of Moodle's page on importing grades, and
of Gradescope's specification of autograders.
"""

import io
import json
import math
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mooncake_lab.course.grading.grade import ASSIGNMENTS, Grade
from mooncake_lab.course.grading.inbox import Collected
from mooncake_lab.course.grading.roster import Member, only_one
from mooncake_lab.course.grading.tables import TableRow, number, written_csv

_CANVAS_COLUMNS: Final = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
"""What Canvas looks for before the assignments; the row of points begins with `Points Possible`."""
_MOODLE_COLUMNS: Final = ("Full name", "ID number", "Email address")
_ASSIGNMENT: Final = re.compile(r"(?P<title>.*?)(?: \(\d+\))?")
"""A column of Canvas: an assignment's title, and its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A table for a platform, and the students that are not in it."""

    text: str
    unmatched: tuple[str, ...]


def matched(
    totals: Sequence[TableRow], roster: Sequence[Member], collected: Iterable[Collected]
) -> tuple[list[tuple[Member, TableRow]], list[str]]:
    """Each student of the table of points with the member of the roster, and the students that have none.

    What was collected from a platform is matched by its ID, else by a name that no other member has. Folders that
    were made by hand are matched by login, number, address, ID or name, if only one member has it.
    """
    told = {each.student: each for each in collected}
    pairs: list[tuple[Member, TableRow]] = []
    unmatched: list[str] = []
    for row in totals:
        student = row["student"]
        known = told.get(student)
        member = None
        if known is not None:
            member = only_one(roster, lambda one, known=known: one.id == known.id != "")
        names = {student} if known is None else {known.name} - {""}
        member = member or only_one(roster, lambda one, names=names: not names.isdisjoint(one.known_as()))
        if member is None or any(member is other for other, _ in pairs):
            unmatched.append(student)
        else:
            pairs.append((member, row))
    return pairs, unmatched


def canvas_csv(totals: Sequence[TableRow], roster: Sequence[Member], collected: Iterable[Collected]) -> Export:
    """A gradebook that Canvas imports: a row for each student with points, with what Canvas exported of them.

    A cell without points keeps what the exported gradebook has there, because Canvas deletes what is empty. A
    column keeps its title with the number of the assignment, if there is one; a new title makes a new assignment.
    """
    pairs, unmatched = matched(totals, roster, collected)
    topics = _topics(totals)
    titles = {topic: _canvas_title(topic, roster) for topic in topics}
    rows: list[list[object]] = [
        ["    Points Possible", "", "", "", "", *(ASSIGNMENTS[topic].points for topic in topics)]
    ]
    for member, row in pairs:
        points = [_points(row.get(topic, "") or member.cells.get(titles[topic], "")) for topic in topics]
        rows.append([member.name, member.id, member.number, member.login, member.section, *points])
    return Export(text=written_csv((*_CANVAS_COLUMNS, *titles.values()), rows), unmatched=tuple(unmatched))


def moodle_csv(totals: Sequence[TableRow], roster: Sequence[Member], collected: Iterable[Collected]) -> Export:
    """A table that Moodle imports, in which ID numbers or addresses tell the students apart.

    It has no feedback: Moodle deletes points where an import has feedback without them.
    """
    pairs, unmatched = matched(totals, roster, collected)
    topics = _topics(totals)
    rows = [
        [member.name, member.number, member.email, *(_points(row.get(topic, "")) for topic in topics)]
        for member, row in pairs
    ]
    return Export(text=written_csv((*_MOODLE_COLUMNS, *topics), rows), unmatched=tuple(unmatched))


def _topics(totals: Sequence[TableRow]) -> list[str]:
    return [name for name in (totals[0] if totals else {}) if name in ASSIGNMENTS]


def _points(cell: str) -> object:
    """A number as a number, so that it gets no apostrophe; other text, such as `EX`, as it is."""
    try:
        found = number(cell)
    except ValueError:
        return cell
    if not math.isfinite(found):
        return cell
    return int(found) if found == int(found) else found


def _canvas_title(topic: str, roster: Sequence[Member]) -> str:
    """The column of an assignment in a gradebook of Canvas; the topic itself where there is none."""
    for column in roster[0].cells if roster else ():
        match = _ASSIGNMENT.fullmatch(column)
        if match and match["title"].strip().casefold() == topic:
            return column
    return topic


def gradescope_results(grade: Grade) -> Mapping[str, Any]:
    """The `results.json` of one submission."""
    result: dict[str, Any] = {
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "output": "\n".join(grade.remarks),
        "tests": [
            {
                "name": mark.task,
                "score": mark.earned,
                "max_score": mark.points,
                "status": "passed" if mark.earned else "failed",
                "output": mark.said,
            }
            for mark in grade.marks
        ],
    }
    boards = {task.name: task.board for task in ASSIGNMENTS[grade.topic].tasks if task.board}
    places = [
        {"name": boards[mark.task].measures, "value": round(mark.score, 4)}
        for mark in grade.marks
        if mark.score is not None and mark.task in boards
    ]
    return {**result, **({"leaderboard": places} if places else {})}


def ungraded_results(why: str) -> Mapping[str, Any]:
    """The `results.json` where nothing was graded: no points, and the reason for the student."""
    return {"visibility": "visible", "score": 0, "output": why}


_SETUP: Final = """#!/usr/bin/env bash
set -e
apt-get update
apt-get install -y python3 python3-venv
python3 -m venv /autograder/venv
/autograder/venv/bin/pip install '{requirement}'
"""
_RUN: Final = """#!/usr/bin/env bash
exec /autograder/venv/bin/mooncake-lab classroom gradescope /autograder/submission \\
  --topic {topic} --sources /autograder/source --secret /autograder/source/secret \\
  --out /autograder/results/results.json
"""


def autograder_zip(notebook: Path, secret: str, requirement: str) -> bytes:
    """What Gradescope runs for each submission of an assignment.

    Args:
        notebook: the instructor's, named after its topic.
        secret: the hidden seed of the class.
        requirement: what pip installs to get this package with the extra `classroom`.
    """
    files = {
        "setup.sh": (_SETUP.format(requirement=requirement).encode(), 0o755),
        "run_autograder": (_RUN.format(topic=notebook.stem).encode(), 0o755),
        notebook.name: (notebook.read_bytes(), 0o644),
        "secret": (f"{secret}\n".encode(), 0o600),
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (content, mode) in files.items():
            entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return packed.getvalue()


def as_json(results: Mapping[str, Any]) -> str:
    """A `results.json`."""
    return json.dumps(results, ensure_ascii=False, indent=1) + "\n"
