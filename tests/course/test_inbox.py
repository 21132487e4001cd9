"""Zip files of Canvas and Moodle become folders of students; hostile files are named, and nothing is lost."""

import csv
import io
import stat
import struct
import zipfile
from datetime import datetime

import pytest
from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.course.grading.collect import COLLECTED
from mooncake_lab.course.grading.inbox import UNKNOWN_DAYS, read_collected, unpack
from mooncake_lab.course.grading.roster import read_roster

DUE = datetime(2026, 11, 20, 23, 59)  # noqa: DTZ001  # a zip file has no time zone
TOPICS = ("admission", "chunked", "eviction", "keys", "placement")
CANVAS_ROSTER = """Student,ID,SIS User ID,SIS Login ID,Section,keys (77),Final Score
    Points Possible,,,,,10,(read only)
"Lovelace, Ada",98765,u1,ada1,S1,,
"Öz, Çağla",98766,u2,cagla,S1,4,
"Last, Nobody",98767,u3,nobody,S2,,
"""
MOODLE_ROSTER = """Identifier,Full name,ID number,Email address,Status,Grade
Participant 12345,Ada Lovelace,u1,ada@example.edu,Submitted,
Participant 12346,Bob O'Neil,u2,bob@example.edu,Submitted,
"""


def packed(path, entries):
    """A zip file of names and contents, in order; a name may be a `ZipInfo`."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return path


def held(folder):
    """What lies in a folder, hidden files too, by its path."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found.pop(COLLECTED, None)
    return found


def collected(tmp_path, entries, system="canvas", **options):
    """What comes of a zip file with these entries, and the folder."""
    folder = tmp_path / "in"
    folder.mkdir(exist_ok=True)
    return unpack(packed(tmp_path / "all.zip", entries), system, folder, TOPICS, **options), folder


def test_a_zip_file_of_canvas(tmp_path):
    """Names are joined as Canvas joins them.

    `get_filename` and `add_upload_submission` in lib/content_zipper.rb of instructure/canvas-lms: the sortable
    name in lower case without what is no letter, digit or underscore, LATE, the ID of the user and that of the
    attachment, the file; an anonymous submission has anon_ and another ID. A file handed in again gets a number.
    """
    roster = tmp_path / "gradebook.csv"
    roster.write_text(CANVAS_ROSTER, encoding="utf-8")
    entries = [
        ("lovelaceada_98765_4321_keys.ipynb", b"ada"),
        ("özçağla_LATE_98766_4322_keys-2.ipynb", b"late"),
        ("o_neil_7_LATE_9_4323_12_34_keys.ipynb", b"other name"),
        ("anon_x7Ab9_4324_keys.ipynb", b"anonymous"),
        ("lovelaceada_98765_4325_notes.pdf", b"pdf"),
        ("lovelaceada_98765_text.html", b"text"),
    ]
    found, folder = collected(tmp_path, entries, roster=read_roster(roster))
    assert held(folder) == {
        "lovelaceada_98765/keys.ipynb": b"ada",
        "özçağla_98766/keys.ipynb": b"late",
        "anon_x7Ab9/keys.ipynb": b"anonymous",
    }
    rows = {each.student: each for each in read_collected(folder)}
    assert (rows["lovelaceada_98765"].login, rows["lovelaceada_98765"].days_late) == ("ada1", "")
    assert (rows["özçağla_98766"].name, rows["özçağla_98766"].days_late) == ("Öz, Çağla", UNKNOWN_DAYS)
    assert [each.name for each in found.missing] == ["Last, Nobody"]
    left = [str(each) for each in found.left]
    assert [line.split()[0] for line in left] == [name for name, _ in (entries[2], *entries[4:])]
    assert "say which one it is with --topic" in left[0]
    assert all("it stays in the zip file" in line for line in left)


def test_students_may_name_their_files_as_they_like(tmp_path):
    """With the assignment given, every notebook is one of it."""
    _, folder = collected(tmp_path, [("a_1_2_my best work.IPYNB", b"x")], only_topic="keys")
    assert held(folder) == {"a_1/keys.ipynb": b"x"}


@pytest.mark.parametrize(
    "name",
    [
        "Ada Lovelace_12345_assignsubmission_file_/keys.ipynb",
        "Ada Lovelace_12345_assignsubmission_file/keys.ipynb",
        "Ada Lovelace_12345_assignsubmission_file_keys.ipynb",
        "Ada Lovelace_12345_assignsubmission_file_/week 1/keys.ipynb",
    ],
)
def test_a_zip_file_of_moodle(tmp_path, name):
    """Folders are named as Moodle names them, and a file is late by its own time.

    docs.moodle.org, Using Assignment: each student's files are in a folder of full name, participant number and
    `assignsubmission_file_`, or have this before their names if submissions are downloaded without folders.
    """
    roster = tmp_path / "worksheet.csv"
    roster.write_text("\ufeff" + MOODLE_ROSTER, encoding="utf-8")
    late = zipfile.ZipInfo(name, (2026, 11, 22, 0, 0, 2))
    online = ("Bob O'Neil_12346_assignsubmission_onlinetext_/onlinetext.html", b"typed")
    found, folder = collected(tmp_path, [(late, b"x"), online], "moodle", roster=read_roster(roster), due=DUE)
    assert held(folder) == {"Ada Lovelace_12345/keys.ipynb": b"x"}
    (row,) = read_collected(folder)
    assert (row.email, row.number, row.days_late) == ("ada@example.edu", "u1", "2")
    assert "typed into Moodle" in str(found.left[0])
    assert [each.email for each in found.missing] == ["bob@example.edu"]


HOSTILE = {
    "../../keys.ipynb": "leads out of the folder",
    "a_1_2_../../../etc/keys.ipynb": "leads out of the folder",
    "/etc/a_1_2_keys.ipynb": "leads out of the folder",
    "C:a_1_2_keys.ipynb": "leads out of the folder",
    "..\\a_1_2_keys.ipynb": "leads out of the folder",
    "a_1_2_new\nline/keys.ipynb": "cannot be printed",
    "a_1_2_\x1b[31mkeys.ipynb": "cannot be printed",
    "a_1_2_\u202ekeys.ipynb": "cannot be printed",
    "keys.ipynb": "is not named as Canvas names",
    "a_1_2_keys.ipynb.exe": "is no notebook",
    f"a_1_{'9' * 5000}_keys.ipynb": "is not named as Canvas names",
    f"a_1_{'_1' * 20_000}": "is no notebook",
    "a_1_2_=cmd|' /C calc'!A0.ipynb": "is not named after an assignment",
}


@pytest.mark.parametrize("name", HOSTILE, ids=map(str, range(len(HOSTILE))))
def test_a_hostile_name_is_refused_and_the_others_are_collected(tmp_path, name):
    """Nothing is written outside the folders of students, and the sentence about it is one printable line."""
    before = {path for path in tmp_path.parent.rglob("*") if tmp_path not in path.parents}
    found, folder = collected(tmp_path, [(name, b"evil"), ("good_7_8_keys.ipynb", b"good")])
    assert held(folder) == {"good_7/keys.ipynb": b"good"}
    (left,) = map(str, found.left)
    assert HOSTILE[name] in left
    assert left.isprintable()
    assert {path for path in tmp_path.parent.rglob("*") if tmp_path not in path.parents} == before


def test_the_folder_of_a_student_is_never_a_path(tmp_path):
    """Names of dots or formulas, and long ones, lead nowhere, hide nothing and compute nothing."""
    entries = [
        (".._1_assignsubmission_file_/keys.ipynb", b"dots"),
        ("=HYPERLINK(1)_2_assignsubmission_file_/keys.ipynb", b"formula"),
        (f"{'x' * 300}_3_assignsubmission_file_/keys.ipynb", b"long"),
    ]
    _, folder = collected(tmp_path, entries, "moodle")
    assert sorted(held(folder).values()) == [b"dots", b"formula", b"long"]
    assert all(path.parent.parent == folder for path in folder.rglob("*.ipynb"))
    assert not list(folder.glob(".*")), "grading passes over hidden folders"
    with (folder / COLLECTED).open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
    assert {each.student for each in read_collected(folder)} == {
        path.parent.name for path in folder.rglob("*.ipynb")
    }


def special(kind):
    """An entry that is no plain file."""
    entry = zipfile.ZipInfo("a_1_2_keys.ipynb")
    entry.external_attr = (kind | 0o777) << 16
    return entry


@pytest.mark.parametrize(("kind", "said"), [(stat.S_IFLNK, "is a link"), (stat.S_IFIFO, "is not a file")])
def test_links_and_devices_are_refused(tmp_path, kind, said):
    """A link to the teacher's files is not followed, and not written."""
    found, folder = collected(tmp_path, [(special(kind), b"/etc/passwd")])
    assert not held(folder)
    assert said in str(found.left[0])


def test_a_bomb_is_not_unpacked(tmp_path):
    """A file of zeros that says its size is refused by it, one that lies is not read beyond what it says."""
    path = tmp_path / "all.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a_1_2_keys.ipynb", bytes(60_000_000))
        archive.writestr("good_7_8_keys.ipynb", b"good")
    (tmp_path / "in").mkdir()
    found = unpack(path, "canvas", tmp_path / "in", TOPICS)
    assert "is larger than 50,000,000 bytes" in str(found.left[0])
    raw = bytearray(path.read_bytes())
    size = struct.pack("<I", 60_000_000)
    while (place := raw.find(size)) >= 0:
        raw[place : place + 4] = struct.pack("<I", 3)
    path.write_bytes(raw)
    found = unpack(path, "canvas", tmp_path / "in", TOPICS)
    assert "stays in the zip file" in str(found.left[0])
    assert held(tmp_path / "in") == {"good_7/keys.ipynb": b"good"}


def test_damaged_and_encrypted_files_are_named(tmp_path):
    """One student's damaged file costs the others nothing."""
    path = packed(tmp_path / "all.zip", [("a_1_2_keys.ipynb", b"damage me"), ("good_7_8_keys.ipynb", b"good")])
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"damage me", b"DAMAGE ME"))
    (tmp_path / "in").mkdir()
    found = unpack(path, "canvas", tmp_path / "in", TOPICS)
    assert "cannot be unpacked: Bad CRC-32" in str(found.left[0])
    assert held(tmp_path / "in") == {"good_7/keys.ipynb": b"good"}
    where = raw.rfind(b"PK\x01\x02", 0, raw.rfind(b"PK\x01\x02"))
    encrypted = bytearray(raw)
    encrypted[where + 8] |= 1
    path.write_bytes(encrypted)
    assert "is encrypted" in str(unpack(path, "canvas", tmp_path / "in", TOPICS).left[0])


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x05\x06" + bytes(10), b"\x1f\x8b" + bytes(50)])
def test_what_is_no_zip_file_is_refused(tmp_path, content):
    """One sentence names the file, and nothing is written."""
    (tmp_path / "all.zip").write_bytes(content)
    with pytest.raises(ValueError, match=r"all\.zip is no zip file"):
        unpack(tmp_path / "all.zip", "canvas", tmp_path, TOPICS)
    assert [path.name for path in tmp_path.iterdir()] == ["all.zip"]


def test_of_two_notebooks_of_a_student_the_later_one_counts(tmp_path):
    """The higher attachment is the later one; the earlier one is named and stays in the zip file."""
    entries = [
        ("a_1_20_keys-1.ipynb", b"later"),
        ("a_1_3_keys.ipynb", b"earlier"),
        ("a_1_4_eviction.ipynb", b"other"),
    ]
    for order in (entries, entries[::-1]):
        found, folder = collected(tmp_path, order)
        assert held(folder) == {"a_1/keys.ipynb": b"later", "a_1/eviction.ipynb": b"other"}
        (left,) = map(str, found.left)
        assert left.startswith("a_1_3_keys.ipynb is an earlier one of this student's keys; a_1_20_keys-1.ipynb is")


def test_collecting_again_loses_nothing(tmp_path):
    """What was collected before stays in a hidden folder, also in the table; the same file changes nothing."""
    for content in (b"one", b"one", b"two", b"three"):
        collected(tmp_path, [("a_1_2_keys.ipynb", content)])
    _, folder = collected(tmp_path, [("b_5_6_eviction.ipynb", b"b")])
    assert held(folder) == {
        "a_1/keys.ipynb": b"three",
        "a_1/.earlier/keys-1.ipynb": b"one",
        "a_1/.earlier/keys-2.ipynb": b"two",
        "b_5/eviction.ipynb": b"b",
    }
    assert [(each.student, each.assignment) for each in read_collected(folder)] == [
        ("a_1", "keys"),
        ("b_5", "eviction"),
    ]


def test_what_a_teacher_wrote_into_the_table_stays(tmp_path):
    """By how much a notebook of Canvas is late is known to the teacher only, and stays until another one comes."""
    late = "a_LATE_1_2_keys.ipynb"
    _, folder = collected(tmp_path, [(late, b"one")])
    table = folder / COLLECTED
    table.write_text(table.read_text(encoding="utf-8").replace(UNKNOWN_DAYS, "3"), encoding="utf-8")
    collected(tmp_path, [(late, b"one")])
    assert [each.days_late for each in read_collected(folder)] == ["3"]
    collected(tmp_path, [(late, b"two")])
    assert [each.days_late for each in read_collected(folder)] == [UNKNOWN_DAYS]


def test_what_cannot_be_written_is_named(tmp_path):
    """A file where a student's folder should be costs the other students nothing."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a_1").write_text("a file")
    found, folder = collected(tmp_path, [("a_1_2_keys.ipynb", b"x"), ("b_3_4_keys.ipynb", b"y")])
    assert "a_1_2_keys.ipynb cannot be written: " in str(found.left[0])
    assert held(folder) == {"a_1": b"a file", "b_3/keys.ipynb": b"y"}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("Student,ID\nAda,1\nBob,1\n", "row 3: the ID '1' is also in roster.csv, row 2"),
        ("Name\nAda\n", "tells no student apart"),
        ("", "tells no student apart"),
        ("ID,ID\n1,2\n", "has the column 'ID' twice"),
        ("ID,name\n1,Ada,Lovelace\n", "row 2 has 3 cells; allowed are 2"),
        ("ID,name\n1,\x00\n", "holds a zero byte"),
    ],
)
def test_a_roster_that_cannot_be_used_is_refused(tmp_path, table, said):
    """The sentence names the file, the row and what is allowed."""
    path = tmp_path / "roster.csv"
    path.write_text(table, encoding="utf-8")
    with pytest.raises(ValueError, match=r"roster\.csv") as caught:
        read_roster(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_roster_in_another_encoding_is_refused(tmp_path, encoding):
    """Not read with wrong letters, which would match nobody."""
    path = tmp_path / "roster.csv"
    path.write_text("ID,name\n1,Çağla\n" if encoding == "utf-16" else "ID,name\n1,José\n", encoding=encoding)
    with pytest.raises(ValueError, match=r"roster\.csv is not UTF-8 text|holds a zero byte"):
        read_roster(path)


def test_a_roster_with_semicolons_is_read(tmp_path):
    """As spreadsheets write it where the comma is for decimals."""
    path = tmp_path / "roster.csv"
    path.write_text("id;name\n1;Lovelace, Ada\n", encoding="utf-8")
    assert [(each.id, each.name) for each in read_roster(path)] == [("1", "Lovelace, Ada")]


def test_the_command_lists_what_it_left_and_exits_with_1(tmp_path):
    """Whoever calls it in a script notices that something was not collected."""
    path = packed(tmp_path / "all.zip", [("a_LATE_1_2_keys.ipynb", b"{}"), ("a_1_3_notes.txt", b"")])
    arguments = ["classroom", "collect", str(path), "--from", "canvas", "--out", str(tmp_path / "in")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stdout == "a_1 keys, unknown days late\n"
    assert "a_1_3_notes.txt is no notebook; it stays in the zip file" in result.stderr
    (tmp_path / "all.zip").write_bytes(io.BytesIO(b"no").getvalue())
    again = CliRunner().invoke(app, arguments)
    assert (again.exit_code, again.stdout) == (1, "")
