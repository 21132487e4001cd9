"""Points leave in the formats of Canvas, Moodle and Gradescope; nobody's are lost or given to somebody else."""

import csv
import io
import json
import zipfile

import pytest
from submissions import SOURCES, hand_in, needs_confinement
from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.course.grading.export import canvas_csv, gradescope_results, moodle_csv
from mooncake_lab.course.grading.grade import ASSIGNMENTS, Grade, Mark
from mooncake_lab.course.grading.inbox import Collected
from mooncake_lab.course.grading.roster import read_roster
from mooncake_lab.course.grading.tables import TableRow

CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section,Keys (77),Essay (78),Final Score
    Points Possible,,,,,10,5,(read only)
"Lovelace, Ada",98765,u1,ada1,S1,3,5,8
"O'Neil, Bob",98766,u2,bob1,S1,4,,4
"=cmd|' /C calc'!A0",98767,u3,eve1,S2,,,
"Same, Name",98768,u4,same1,S2,,,
"Same, Name",98769,u5,same2,S2,,,
"""
MOODLE = """Identifier,Full name,ID number,Email address,Status,Grade
Participant 12345,Ada Lovelace,u1,ada@example.edu,Submitted,
Participant 12346,Bob O'Neil,u2,bob@example.edu,Submitted,
"""


def roster(tmp_path, text):
    """The members of a table."""
    path = tmp_path / "roster.csv"
    path.write_text(text, encoding="utf-8")
    return read_roster(path)


def totals(*rows):
    """The table of points, as it is read."""
    columns = ("student", "eviction", "keys", "total")
    return [TableRow(dict(zip(columns, row, strict=True)), "totals.csv") for row in rows]


def collected(student, number):
    """What is known of a folder."""
    return Collected(student=student, assignment="keys", days_late="", id=number, name="")


def parsed(text):
    """The rows of a table."""
    return list(csv.reader(io.StringIO(text)))


def as_canvas_reads(text):
    """The points by user and assignment, by the rules of Canvas's importer.

    lib/gradebook_importer.rb of instructure/canvas-lms: `Student` and `ID` begin the header, `SIS User ID` and
    `SIS Login ID` are third and fourth, the last column about students is `Section`; each further column is an
    assignment, by the number in brackets or else by its title; the row `Points Possible` is not a student; a
    student is found by the ID.
    """
    head, *rows = parsed(text)
    assert len(head) > 3
    assert "Student" in head[0]
    assert "ID" in head[1]
    assert head[2:4] == ["SIS User ID", "SIS Login ID"]
    assert "Section" in head[4]
    assert len({len(row) for row in (head, *rows)}) == 1
    students = [row for row in rows if "Points Possible" not in row[0]]
    assert len(rows) == len(students) + 1
    return {
        (row[1], title): cell.strip() for row in students for title, cell in zip(head[5:], row[5:], strict=True)
    }


def test_canvas_imports_the_points_of_each_student(tmp_path):
    """By the ID of the zip file or by a login, into columns that exist; without points, what Canvas has stays."""
    rows = totals(("lovelaceada_98765", "2", "9.5", "11.5"), ("bob1", "7", "", "7"), ("eve_98767", "", "10", "10"))
    known = [collected("lovelaceada_98765", "98765"), collected("eve_98767", "98767")]
    made = canvas_csv(rows, roster(tmp_path, CANVAS), known)
    assert as_canvas_reads(made.text) == {
        ("98765", "Keys (77)"): "9.5",
        ("98765", "eviction"): "2",
        ("98766", "Keys (77)"): "4",
        ("98766", "eviction"): "7",
        ("98767", "Keys (77)"): "10",
        ("98767", "eviction"): "",
    }
    assert parsed(made.text)[1][5:] == ["10", "10"]
    assert not made.unmatched
    assert not [cell for row in parsed(made.text) for cell in row if cell.startswith(("=", "+", "@"))]


def test_students_that_cannot_be_told_apart_are_named(tmp_path):
    """Nobody gets another one's points: an unknown folder, two of the same name, two folders of one member."""
    rows = totals(
        ("nobody", "", "1", "1"), ("Same, Name", "", "2", "2"), ("bob1", "", "3", "3"), ("u2", "", "4", "4")
    )
    made = canvas_csv(rows, roster(tmp_path, CANVAS), [])
    assert made.unmatched == ("nobody", "Same, Name", "u2")
    assert [cell for (_, title), cell in as_canvas_reads(made.text).items() if title == "Keys (77)"] == ["3"]


def test_moodle_imports_the_points_by_number_or_address(tmp_path):
    """Columns that Moodle maps to `useridnumber` or `useremail`, and one for each assignment; no feedback.

    docs.moodle.org, Grade import: the first row has the names of columns, a user is mapped from an ID number or
    an e-mail address, and a column of feedback without its points would delete them.
    """
    rows = totals(("Ada Lovelace_12345", "2", "9.5", "11.5"), ("Bob O'Neil_12346", "", "10", "10"))
    known = [collected("Ada Lovelace_12345", "12345"), collected("Bob O'Neil_12346", "12346")]
    made = moodle_csv(rows, roster(tmp_path, MOODLE), known)
    assert parsed(made.text) == [
        ["Full name", "ID number", "Email address", "eviction", "keys"],
        ["Ada Lovelace", "u1", "ada@example.edu", "2", "9.5"],
        ["Bob O'Neil", "u2", "bob@example.edu", "", "10"],
    ]
    assert not made.unmatched


def test_results_of_gradescope():
    """A test for each task, and a leaderboard for an open one.

    gradescope-autograders.readthedocs.io, Autograder Specifications, Output Format: `tests` with `score`,
    `max_score`, `status` (passed or failed), `name` and `output`; `leaderboard` with `name` and `value`;
    `visibility` and `stdout_visibility` are hidden, after_due_date, after_published or visible. Without `score`,
    the tests add up.
    """
    tasks = ASSIGNMENTS["eviction"].tasks
    marks = tuple(Mark(task=task.name, points=task.points, earned=0, said="no") for task in tasks[:-1])
    last = Mark(task=tasks[-1].name, points=2, earned=2, said="yes", score=0.4321987)
    found = gradescope_results(Grade(student="x", topic="eviction", marks=(*marks, last), remarks=("left out",)))
    assert json.loads(json.dumps(found)) == found
    assert [(each["score"], each["status"]) for each in found["tests"]] == [(0, "failed")] * 4 + [(2, "passed")]
    assert sum(each["max_score"] for each in found["tests"]) == 10
    assert [each["value"] for each in found["leaderboard"]] == [0.4322]
    assert found["output"] == "left out"
    assert (found["visibility"], found["stdout_visibility"]) == ("visible", "hidden")
    assert "score" not in found


def test_an_autograder_for_gradescope(tmp_path):
    """`setup.sh` and `run_autograder` at the root of the zip file, executable, with the notebook and the secret.

    gradescope-autograders.readthedocs.io, Autograder Specifications: the two scripts lie at the root, the archive
    is unpacked to /autograder/source, the submission to /autograder/submission, and the results are expected at
    /autograder/results/results.json.
    """
    file = tmp_path / "keys.zip"
    arguments = ["classroom", "export", "--to", "gradescope", "--topic", "keys", "--file", str(file)]
    result = CliRunner().invoke(
        app, [*arguments, "--out", str(tmp_path / "out"), "--package", "/autograder/source/x"]
    )
    assert result.exit_code == 0, result.stderr
    with zipfile.ZipFile(file) as archive:
        assert {*archive.namelist()} == {"setup.sh", "run_autograder", "keys.ipynb", "secret"}
        for name in ("setup.sh", "run_autograder"):
            assert archive.getinfo(name).external_attr >> 16 & 0o111
            assert archive.read(name).startswith(b"#!/usr/bin/env bash\n")
        run = archive.read("run_autograder").decode()
        assert archive.read("secret").decode() == (tmp_path / "out" / "secret").read_text()
        assert b"pip install '/autograder/source/x'" in archive.read("setup.sh")
    assert "/autograder/submission" in run
    assert "/autograder/results/results.json" in run


@needs_confinement
@pytest.mark.parametrize(("name", "points"), [("keys", 10), ("my best work", 10)])
def test_the_autograders_command_grades_one_submission(tmp_path, name, points):
    """Whatever the student called the one notebook; results.json has all points of a right solution."""
    hand_in(tmp_path / "in", "keys")
    (tmp_path / "in" / "keys.ipynb").rename(tmp_path / "in" / f"{name}.ipynb")
    (tmp_path / "secret").write_text("0" * 32)
    out = tmp_path / "results.json"
    arguments = ["classroom", "gradescope", str(tmp_path / "in"), "--topic", "keys", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--secret", str(tmp_path / "secret"), "--sources", str(SOURCES)])
    assert result.exit_code == 0, result.stderr
    assert sum(each["score"] for each in json.loads(out.read_text())["tests"]) == points


@pytest.mark.parametrize("count", [0, 2])
def test_gradescope_says_what_to_hand_in(tmp_path, count):
    """No notebook, or two of which none is named after the assignment: no points, and a sentence."""
    (tmp_path / "in").mkdir()
    for number in range(count):
        (tmp_path / "in" / f"{number}.ipynb").write_text("{}")
    (tmp_path / "secret").write_text("0" * 32)
    out = tmp_path / "results.json"
    arguments = ["classroom", "gradescope", str(tmp_path / "in"), "--topic", "keys", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--secret", str(tmp_path / "secret"), "--sources", str(SOURCES)])
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text())
    assert (found["score"], f"there are {count} notebooks" in found["output"]) == (0, True)


@needs_confinement
def test_a_teachers_run_from_a_zip_file_to_an_import(tmp_path):
    """Collect, grade with a late rule, adjust, regrade, export: each command reads what the one before wrote."""
    given = hand_in(tmp_path, "keys").read_bytes()
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("lovelaceada_98765_1_keys.ipynb", given)
        archive.writestr("oneilbob_LATE_98766_2_keys.ipynb", given)
    (tmp_path / "gradebook.csv").write_text(CANVAS, encoding="utf-8")
    where = {"in": str(tmp_path / "in"), "out": str(tmp_path / "out"), "roster": str(tmp_path / "gradebook.csv")}

    def run(*arguments):
        result = CliRunner().invoke(app, ["classroom", *arguments])
        assert result.exit_code == 0, result.stderr
        return result

    run(
        "collect", str(tmp_path / "all.zip"), "--from", "canvas", "--roster", where["roster"], "--out", where["in"]
    )
    run("grade", where["in"], "--out", where["out"], "--late", "10%/day")
    adjust = "student,assignment,points,why\nlovelaceada_98765,keys,-2.5,oral exam\n"
    (tmp_path / "out" / "adjust.csv").write_text(adjust)
    run("regrade", "oneilbob_98766", "keys", "--why", "asked for it", "--out", where["out"])
    run("grade", where["in"], "--out", where["out"], "--late", "10%/day")
    arguments = ("--roster", where["roster"], "--submissions", where["in"], "--out", where["out"])
    run("export", "--to", "canvas", *arguments, "--file", str(tmp_path / "import.csv"))
    assert as_canvas_reads((tmp_path / "import.csv").read_text(encoding="utf-8")) == {
        ("98765", "Keys (77)"): "7.5",
        ("98766", "Keys (77)"): "9",
    }
    pages = {path.parent.name: path.read_text() for path in (tmp_path / "out" / "feedback").rglob("*.html")}
    assert "-2.5 points: oral exam" in pages["lovelaceada_98765"]
    assert "1 days late (the true number is unknown): -1 points" in pages["oneilbob_98766"]
    assert "asked for it; 10 points before, 10 now" in pages["oneilbob_98766"]
    run("leaderboard", "--out", where["out"])
    assert "No open task has a score yet" in (tmp_path / "out" / "leaderboard.html").read_text()
