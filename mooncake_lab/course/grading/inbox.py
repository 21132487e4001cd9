"""Submissions from the zip files of Canvas and Moodle, put into one folder per student.

The names in such a file are those that students chose, and its contents are theirs. Nothing is unpacked to a path
of the file: a notebook of an assignment is written to `STUDENT/TOPIC.ipynb`, and everything else stays in the zip
file and is named. What was collected before is never overwritten; it goes into a hidden folder beside.
"""

import re
import stat
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from math import ceil
from pathlib import Path
from typing import Final, Literal

from mooncake_lab.core import complete_file
from mooncake_lab.course.grading.collect import (
    COLLECTED,
    LARGEST_NOTEBOOK_BYTES,
    Ungraded,
    printable,
    student_label,
)
from mooncake_lab.course.grading.roster import Member, only_one
from mooncake_lab.course.grading.tables import read_csv, written_csv

System = Literal["canvas", "moodle"]
UNKNOWN_DAYS: Final = "unknown"
"""Late by a number of days that the platform does not tell."""

_MOST_FILES: Final = 20_000
_MOST_BYTES: Final = 4_000_000_000
"""Of all notebooks of one zip file, unpacked."""
_PART_BYTES: Final = 1 << 20
_EARLIER: Final = ".earlier"
_DAY_S: Final = 86_400

_ID: Final = "[0-9]{1,18}"
_CANVAS: Final = re.compile(
    rf"(?:(?P<late>LATE)_)?(?P<anonymous>anon_(?!\d+_)\w+?)_(?P<order>{_ID})_(?P<file>.+)"
    rf"|(?P<name>\w*?)_(?:(?P<late_>LATE)_)?(?P<id>{_ID})_(?P<order_>{_ID})_(?P<file_>.+)",
    re.DOTALL,
)
"""Student, LATE, user, attachment and file, as Canvas joins them (`content_zipper.rb` of its source)."""
_MOODLE: Final = re.compile(
    rf"(?P<name>[^/]+)_(?P<id>{_ID})_assignsubmission_(?P<kind>[a-z]+)_?(?:/(?P<below>.+)|(?P<file>[^/]*))",
    re.DOTALL,
)
"""Student, participant, kind of submission and file, in a folder or, if Moodle was told so, in one name."""
_AGAIN: Final = re.compile(r"(?P<topic>.+?)(?:-\d+| ?\(\d+\))")
"""A name to which Canvas or a browser has added a number: `keys-1`, `keys (1)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZippedNotebook:
    """A notebook in a zip file."""

    entry: zipfile.ZipInfo
    name: str
    """Of the student, as the platform writes it."""
    id: str
    topic: str
    late: bool
    order: tuple[int, ...]
    """Of two notebooks of a student, the one with the higher order was handed in later."""

    @property
    def student(self) -> str:
        """The folder of the student; it does not begin with a dot, because hidden folders are passed over."""
        return student_label(f"{self.name}_{self.id}".lstrip("._ "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A notebook that was collected, as a row of the table beside the submissions."""

    student: str
    assignment: str
    days_late: str
    """A number, empty where it came in time, or `UNKNOWN_DAYS`."""
    id: str
    name: str
    login: str = ""
    number: str = ""
    email: str = ""
    section: str = ""


_COLUMNS: Final = tuple(Collected.__dataclass_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    """What came of a zip file."""

    collected: tuple[Collected, ...]
    left: tuple[Ungraded, ...]
    """What stays in the zip file, and why."""
    missing: tuple[Member, ...]
    """Members of the roster of whom nothing came."""


def unpack(
    path: Path,
    system: System,
    folder: Path,
    topics: Iterable[str],
    *,
    roster: Sequence[Member] = (),
    only_topic: str = "",
    due: datetime | None = None,
) -> Inbox:
    """Collect the notebooks of a zip file that a platform made of one assignment.

    Args:
        path: of the zip file.
        system: that made it.
        folder: of the submissions, one folder per student.
        topics: of the assignments.
        roster: of the course; with it, addresses and numbers stand in the table of what was collected.
        only_topic: the assignment, where students named their notebooks as they liked.
        due: until when a notebook of Moodle is in time; Canvas marks late ones itself.

    Raises:
        ValueError: when the file is no zip file, or has too many files; nothing was written then.
        OSError: when the table of what was collected cannot be written.
    """
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"{path.name} is no zip file: {error}") from error
    with archive:
        entries = [entry for entry in archive.infolist() if not entry.filename.endswith("/")]
        if len(entries) > _MOST_FILES:
            raise ValueError(f"{path.name} holds {len(entries):,} files; allowed are {_MOST_FILES:,}")
        found, left = _sorted_out(entries, system, [*topics], only_topic)
        before = {(each.student, each.assignment): each for each in read_collected(folder)}
        now = dict[tuple[str, str], Collected]()
        unpacked = 0
        for each in found:
            raw, why = _read(archive, each.entry, _MOST_BYTES - unpacked)
            if why:
                left.append(_stays(each.entry, why))
                continue
            unpacked += len(raw)
            try:
                changed = _keep(folder / each.student / f"{each.topic}.ipynb", raw)
            except OSError as error:
                left.append(_stays(each.entry, f"cannot be written: {error.strerror}"))
                continue
            key = each.student, each.topic
            told = None if changed else before.get(key)  # a teacher may have written there by how much it is late
            now[key] = told or _row(each, roster, due)
            _write_collected(folder, {**before, **now})
    came = {each.id for each in now.values()}
    missing = tuple(each for each in roster if each.id and each.id not in came)
    return Inbox(collected=tuple(now.values()), left=tuple(left), missing=missing)


def read_collected(folder: Path) -> list[Collected]:
    """What was collected into a folder of submissions; nothing where students were put there by hand."""
    path = folder / COLLECTED
    if not path.exists():
        return []
    rows = read_csv(path, ("student", "assignment", "days_late"))
    return [Collected(**{name: row.get(name, "") for name in _COLUMNS}) for row in rows]


def _write_collected(folder: Path, rows: Mapping[tuple[str, str], Collected]) -> None:
    table = [[getattr(rows[key], name) for name in _COLUMNS] for key in sorted(rows)]
    with complete_file(folder / COLLECTED) as file:
        file.write(written_csv(_COLUMNS, table).encode())


def _sorted_out(
    entries: Iterable[zipfile.ZipInfo], system: System, topics: Sequence[str], only_topic: str
) -> tuple[list[ZippedNotebook], list[Ungraded]]:
    """The latest notebook of each student and assignment, and everything else."""
    newest = dict[tuple[str, str], ZippedNotebook]()
    left: list[Ungraded] = []
    for entry in entries:
        found = _arrival(entry, system, topics, only_topic)
        if isinstance(found, Ungraded):
            left.append(found)
            continue
        key = found.student, found.topic
        other = newest.get(key)
        if other is None or found.order > other.order:
            newest[key] = found
        older = other if newest[key] is found else found
        if older is not None:
            shown = printable(newest[key].entry.filename)
            left.append(
                _stays(older.entry, f"is an earlier one of this student's {found.topic}; {shown} is collected")
            )
    return list(newest.values()), left


def _arrival(
    entry: zipfile.ZipInfo, system: System, topics: Sequence[str], only_topic: str
) -> ZippedNotebook | Ungraded:
    name = entry.filename
    if why := _unsafe(entry):
        return _stays(entry, why)
    match = (_CANVAS if system == "canvas" else _MOODLE).fullmatch(name)
    if not match:
        return _stays(entry, f"is not named as {system.capitalize()} names what students hand in")
    parts = {key.rstrip("_"): value for key, value in match.groupdict().items() if value is not None}
    if parts.get("kind", "file") != "file":
        return _stays(entry, "is text that was typed into Moodle, not a file")
    file = Path(parts.get("below") or parts.get("file", ""))
    if file.suffix.lower() != ".ipynb":
        return _stays(entry, "is no notebook")
    again = _AGAIN.fullmatch(file.stem)
    topic = only_topic or next((one for one in (file.stem, again["topic"] if again else "") if one in topics), "")
    if not topic:
        return _stays(
            entry, f"is not named after an assignment ({', '.join(topics)}); say which one it is with --topic"
        )
    return ZippedNotebook(
        entry=entry,
        name=parts.get("name", "") if "id" in parts else "",
        id=parts.get("id") or parts["anonymous"],
        topic=topic,
        late="late" in parts,
        order=(int(parts["order"]),) if "order" in parts else tuple(entry.date_time),
    )


def _unsafe(entry: zipfile.ZipInfo) -> str:
    """Why a file of an archive is not unpacked; empty when it may be."""
    name, kind = entry.filename, stat.S_IFMT(entry.external_attr >> 16)
    if entry.flag_bits & 1:
        return "is encrypted"
    if kind not in {0, stat.S_IFREG}:
        return "is a link" if kind == stat.S_IFLNK else "is not a file"
    if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name) or re.match(r"[A-Za-z]:", name):
        return "leads out of the folder"
    if printable(name) != name:
        return "has a name that cannot be printed"
    if entry.file_size > LARGEST_NOTEBOOK_BYTES:
        return f"is larger than {LARGEST_NOTEBOOK_BYTES:,} bytes"
    return ""


def _stays(entry: zipfile.ZipInfo, why: str) -> Ungraded:
    return Ungraded(Path(entry.filename), f"{why}; it stays in the zip file")


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most_bytes: int) -> tuple[bytes, str]:
    """The contents of a file, and why there are none; no more than it may have is ever unpacked."""
    raw, most = bytearray(), min(most_bytes, LARGEST_NOTEBOOK_BYTES)
    try:
        with archive.open(entry) as file:
            while part := file.read(_PART_BYTES):
                raw += part
                if len(raw) > most:
                    return b"", f"is larger than {most:,} bytes"
    except (
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        EOFError,
        RuntimeError,
        OSError,
        ValueError,
    ) as error:
        return b"", f"cannot be unpacked: {error}"
    return bytes(raw), ""


def _keep(path: Path, raw: bytes) -> bool:
    """Write a notebook; another one that is there goes into a hidden folder beside it.

    Returns:
        Whether there was none, or another one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        if path.read_bytes() == raw:
            return False
        earlier = path.parent / _EARLIER
        earlier.mkdir(exist_ok=True)
        free = (earlier / f"{path.stem}-{number}.ipynb" for number in count(1))
        path.rename(next(one for one in free if not one.exists()))
    with complete_file(path) as file:
        file.write(raw)
    return True


def _row(each: ZippedNotebook, roster: Sequence[Member], due: datetime | None) -> Collected:
    days = UNKNOWN_DAYS if each.late else ""
    if due and len(each.order) > 1:
        days = _days_late(each.entry, due)
    row = Collected(student=each.student, assignment=each.topic, days_late=days, id=each.id, name=each.name)
    member = only_one(roster, lambda one: one.id == each.id) or only_one(
        roster, lambda one: one.name == each.name != ""
    )
    if member is None:
        return row
    told = {name: getattr(member, name) for name in ("name", "login", "number", "email", "section")}
    return replace(row, **told)


def _days_late(entry: zipfile.ZipInfo, due: datetime) -> str:
    """Begun days after the deadline, by the time that the zip file gives; it has no time zone."""
    try:
        late_s = (datetime(*entry.date_time) - due).total_seconds()  # noqa: DTZ001
    except ValueError:
        return UNKNOWN_DAYS
    return str(ceil(late_s / _DAY_S)) if late_s > 0 else ""
