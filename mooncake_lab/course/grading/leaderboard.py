"""A page on which a class compares the scores of open tasks, under pseudonyms.

A pseudonym is chosen by a student (`pseudonyms.csv`), or made of the secret of the class: without the secret,
nobody can find out whose it is.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from mooncake_lab.course.grading.grade import ASSIGNMENTS, Grade
from mooncake_lab.course.grading.remarks import one_line
from mooncake_lab.course.grading.tables import TableRow, number_in, read_csv

PSEUDONYMS: Final = "pseudonyms.csv"
TEACHER: Final = "the teacher's solution"
OPTIMUM: Final = "the optimum"
_LONGEST: Final = 40
"""Letters of a pseudonym."""


@dataclass(frozen=True, slots=True)
class Place:
    """One line of a board."""

    who: str
    score: float
    marked: bool = False
    """Whether it is the teacher's or the optimum's."""


def pseudonym(student: str, secret: str) -> str:
    """The name of a student who has chosen none."""
    return f"team {hashlib.blake2b(student.encode(), key=secret.encode()[:64], digest_size=4).hexdigest()}"


def read_pseudonyms(out: Path) -> dict[str, str]:
    """The pseudonyms that students chose.

    Raises:
        ValueError: when two have chosen the same, or one that the page itself uses.
    """
    path = out / PSEUDONYMS
    chosen = dict[str, str]()
    taken = {TEACHER: "the page", OPTIMUM: "the page"}
    for row in read_csv(path, ("student", "pseudonym")) if path.exists() else []:
        name = one_line(row["pseudonym"])[:_LONGEST]
        if not name:
            raise ValueError(f"{row.where}: the pseudonym is empty")
        if name in taken:
            raise ValueError(
                f"{row.where}: the pseudonym {name!r} is already that of {taken[name]}; allowed is once"
            )
        taken[name] = row["student"]
        chosen[row["student"]] = name
    return chosen


def board_of(topic: str, rows: Iterable[TableRow], teacher: Grade | None, names: Mapping[str, str]) -> list[Place]:
    """The places of an assignment, the best first.

    Args:
        topic: of the assignment.
        rows: of `grades.csv`.
        teacher: the grade of the teacher's own notebook, with the same hidden workload.
        names: the pseudonym of each student.
    """
    task = next((one for one in ASSIGNMENTS[topic].tasks if one.board), None)
    if task is None or task.board is None:
        return []
    places = [
        Place(names[row["student"]], number_in(row, "score", -math.inf, math.inf))
        for row in rows
        if row["assignment"] == topic and row["task"] == task.name and row["score"]
    ]
    scores = [mark.score for mark in teacher.marks if mark.task == task.name] if teacher else []
    places += [Place(TEACHER, score, marked=True) for score in scores if score is not None]
    if task.board.optimum is not None:
        places.append(Place(OPTIMUM, task.board.optimum, marked=True))
    return sorted(places, key=lambda place: (-place.score, not place.marked, place.who))


_STYLE: Final = """
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif; }
body { max-width: 48rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8886; }
td.score { text-align: right; font-variant-numeric: tabular-nums; width: 6rem; }
td.bar { width: 45%; }
td.bar div { height: .8rem; background: #4477aa; }
tr.marked { font-weight: bold; }
tr.marked td.bar div { background: #bb5566; }
"""


def page(boards: Mapping[str, Sequence[Place]]) -> str:
    """The boards of all assignments; nothing on the page is executed or loaded from elsewhere."""
    parts = "".join(_section(topic, places) for topic, places in boards.items() if places)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Leaderboard</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main><h1>Leaderboard</h1>"
        f"{parts or '<p>No open task has a score yet.</p>'}</main></body></html>\n"
    )


def _section(topic: str, places: Sequence[Place]) -> str:
    measures = next(task.board.measures for task in ASSIGNMENTS[topic].tasks if task.board)
    most = max(*(place.score for place in places), 1e-9)
    rows = "".join(
        f"<tr{' class=marked' if place.marked else ''}><td>{escape(place.who)}</td>"
        f'<td class="score">{place.score:.3f}</td>'
        f'<td class="bar"><div style="width:{max(place.score, 0) / most:.1%}"></div></td></tr>'
        for place in places
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("who", "score", ""))
    return (
        f"<h2>{escape(topic)}</h2><p>Score: {escape(measures)}.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )
