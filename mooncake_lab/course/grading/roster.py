"""The members of a course, from the tables that Canvas and Moodle export."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooncake_lab.course.grading.tables import TableRow, read_csv

_IDS: Final = ("ID", "Identifier", "id")
_NAMES: Final = ("Student", "Full name", "name")
_FIRST_NAMES: Final = ("First name", "FirstName")
_LAST_NAMES: Final = ("Last name", "Surname", "LastName")
_LOGINS: Final = ("SIS Login ID", "Username", "login")
_NUMBERS: Final = ("SIS User ID", "ID number", "number")
_EMAILS: Final = ("Email address", "Email", "email")
_PARTICIPANT: Final = re.compile(r"Participant (\d+)")
_NOT_A_STUDENT: Final = "Points Possible"
"""Begins the row of Canvas that says the most points of each assignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One student of a course; what a platform does not tell is empty."""

    id: str
    """Of the platform: Canvas's user ID, or the number of Moodle's participant."""
    name: str
    login: str
    number: str
    """That the university gives: the SIS user ID, or Moodle's ID number."""
    email: str
    section: str
    cells: TableRow
    """The whole row of the table."""

    def known_as(self) -> tuple[str, ...]:
        """What may name this student's folder, where it was not made by `classroom collect`."""
        return tuple(filter(None, (self.login, self.number, self.email, self.id, self.name)))


def read_roster(path: Path) -> list[Member]:
    """The members in a gradebook of Canvas, a grading worksheet or gradebook of Moodle, or another table.

    Canvas writes the columns Student, ID, SIS User ID, SIS Login ID and Section; Moodle writes Identifier or ID
    number, Full name or First name and Last name, and Email address. Another table may have the columns id, name,
    login, number and email.

    Raises:
        ValueError: when the table has neither IDs nor names nor addresses, or tells an ID twice.
    """
    rows = [row for row in read_csv(path) if not next(iter(row.values()), "").startswith(_NOT_A_STUDENT)]
    members = [_member(row) for row in rows]
    if not any(each.id or each.email or each.login or each.number for each in members):
        raise ValueError(
            f"{path.name} tells no student apart: it needs one of the columns"
            f" {', '.join((*_IDS, *_LOGINS, *_NUMBERS, *_EMAILS))}"
        )
    seen = dict[str, str]()
    for each in members:
        if each.id and each.id in seen:
            raise ValueError(f"{each.cells.where}: the ID {each.id!r} is also in {seen[each.id]}; allowed is once")
        seen[each.id] = each.cells.where
    return members


def _member(row: TableRow) -> Member:
    found = _first(row, _IDS)
    participant = _PARTICIPANT.fullmatch(found)
    name = _first(row, _NAMES) or f"{_first(row, _FIRST_NAMES)} {_first(row, _LAST_NAMES)}".strip()
    return Member(
        id=participant[1] if participant else found,
        name=name,
        login=_first(row, _LOGINS),
        number=_first(row, _NUMBERS),
        email=_first(row, _EMAILS),
        section=row.get("Section", ""),
        cells=row,
    )


def _first(row: TableRow, names: Iterable[str]) -> str:
    return next((row[name] for name in names if row.get(name)), "")


def only_one(members: Sequence[Member], tells: Callable[[Member], bool]) -> Member | None:
    """The one member of whom something holds; None where it holds of none, or of several."""
    found = [each for each in members if tells(each)]
    return found[0] if len(found) == 1 else None
