"""No student costs the class its grades: tables stay readable, names stay apart, what was graded stays graded."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from submissions import SOURCES, needs_confinement

from mooncake_lab.course.grading import whole_class, workers
from mooncake_lab.course.grading.collect import collect, student_label
from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.grade import Grade, Mark
from mooncake_lab.course.grading.remarks import LONGEST_REMARK
from mooncake_lab.course.grading.whole_class import (
    Journal,
    Rules,
    class_secret,
    feedback_html,
    grade_class,
    grades_csv,
    page_of,
    totals_csv,
)

FORMULA = ("=", "+", "-", "@", "\t", "\r")
RULES = Rules(seed="any text", allowance=Allowance(reply_s=60, wall_s=600))


def given(student="ada", said="fine", points=2, topic="keys"):
    """A grade of one task."""
    mark = Mark(task="a task", points=2, earned=points, said=said)
    return Grade(student=student, topic=topic, marks=(mark,))


@pytest.fixture
def graded(monkeypatch):
    """Grading without a submission; the paths that were graded."""
    seen = []

    def grade(path, teacher, *, student, seed, allowance):
        seen.append((student, seed))
        if "stop" in path.read_text():
            raise KeyboardInterrupt
        return given(student, f"{len(seed) > 32} {allowance == RULES.allowance} {teacher.stem}")

    monkeypatch.setattr(whole_class, "grade", grade)
    monkeypatch.setattr(workers, "new_pool", lambda: ThreadPoolExecutor(1))
    return seen


def put(folder, *students, text="{}"):
    """A notebook for each student."""
    for student in students:
        path = folder / student / "keys.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def rows(out):
    """The table, as Python reads it."""
    with (out / "grades.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_what_was_graded_stays_when_grading_stops(tmp_path, graded):
    """Each grade is on disk before the next is begun; the next run grades what is missing, and only that."""
    submissions, out = put(tmp_path / "in", "ada", "bob"), tmp_path / "out"
    put(submissions, "cleo", text='"stop"')
    with pytest.raises(KeyboardInterrupt):
        grade_class(collect(submissions, SOURCES), out, RULES)
    assert [row["student"] for row in rows(out)] == ["ada", "bob"]
    assert page_of("bob", "keys", out).exists()
    put(submissions, "cleo")
    found = grade_class(collect(submissions, SOURCES), out, RULES)
    assert [one.student for one in found] == ["ada", "bob", "cleo"]
    assert [student for student, _ in graded] == ["ada", "bob", "cleo", "cleo"]


def test_only_what_changed_is_graded_again(tmp_path, graded):
    """A changed submission, another seed, other limits, a page that is gone: each is a reason, nothing else is."""
    submissions, out = put(tmp_path / "in", "ada", "bob"), tmp_path / "out"

    def again(rules=RULES):
        graded.clear()
        grade_class(collect(submissions, SOURCES), out, rules)
        return [student for student, _ in graded]

    assert again() == ["ada", "bob"]
    assert again() == []
    put(submissions, "bob", text="[]")
    assert again() == ["bob"]
    page_of("ada", "keys", out).unlink()
    assert again() == ["ada"]
    assert again(Rules(seed="another", allowance=RULES.allowance)) == ["ada", "bob"]
    assert again() == []


def test_a_torn_line_is_dropped(tmp_path):
    """A journal whose last line was cut by a crash goes on after the line before it."""
    journal = Journal(tmp_path)
    journal.add("one", given())
    journal.add("two", given("bob"))
    path = tmp_path / "grades.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    journal = Journal(tmp_path)
    assert journal.grades.get("one") == given()
    assert journal.grades.get("two") is None
    journal.add("three", given("cleo"))
    assert Journal(tmp_path).grades.get("three") == given("cleo")


def test_the_seed_of_a_class_cannot_be_tried(tmp_path, graded):
    """What reaches a task is the teacher's seed and 128 random bits that only the folder of grades holds."""
    submissions = put(tmp_path / "in", "ada")
    for name in ("one", "two"):
        grade_class(collect(submissions, SOURCES), tmp_path / name, RULES)
    (_, first), (_, second) = graded
    assert first != second
    assert first.startswith("any text/")
    secret = tmp_path / "one" / "secret"
    assert secret.stat().st_mode & 0o077 == 0
    assert int(class_secret(tmp_path / "one"), 16).bit_length() > 64
    (tmp_path / "two" / "secret").write_text(secret.read_text())
    assert class_secret(tmp_path / "two") == class_secret(tmp_path / "one")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_secret_that_was_saved_with_a_byte_order_mark_is_named(tmp_path, encoding):
    """An editor puts the mark where nobody sees it: the error names it, and the file."""
    digits = class_secret(tmp_path)
    (tmp_path / "secret").write_text(digits, encoding=encoding)
    with pytest.raises(ValueError, match=r"/secret begins with a byte order mark \(BOM\); 32 hexadecimal digits"):
        class_secret(tmp_path)


@pytest.mark.parametrize(("written", "shown"), [("4711", "4711"), ("ä" * 16, r"\\xc3\\xa4"), ("", "''")])
def test_a_secret_that_is_none_is_refused(tmp_path, written, shown):
    """Whatever a file holds, a sentence shows its beginning and says what is needed."""
    class_secret(tmp_path)
    (tmp_path / "secret").write_text(written, encoding="utf-8")
    with pytest.raises(ValueError, match="32 hexadecimal digits are needed") as told:
        class_secret(tmp_path)
    assert shown in str(told.value)


@pytest.mark.parametrize("said", ["A" * 3_000_000, "x\ny\x1b[2J\0\u202e" * 1000])
def test_a_remark_is_one_short_line(said):
    """Whatever a submission answers, its remark is a line that a table can hold."""
    mark = Mark(task="a task", points=1, earned=0, said=said)
    assert len(mark.said) <= LONGEST_REMARK
    assert mark.said.isprintable()


def test_the_table_can_be_read():
    """A class of long and strange remarks gives a table that Python's csv reads, of a size one can open."""
    table = grades_csv([given(f"s{n}", "A\n" * 1_000_000) for n in range(200)], {"bob": "why\0" * 100_000})
    assert len(table) < 200_000
    assert len(list(csv.DictReader(table.splitlines()))) == 201


@pytest.mark.parametrize("text", ["=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", "\t=1", "  =1"])
def test_no_cell_is_a_formula(text):
    """A name or a remark that a spreadsheet would compute is text."""
    (row,) = csv.DictReader(grades_csv([given(text, text)], {}).splitlines())
    assert not row["student"].lstrip().startswith(FORMULA)
    assert not row["remark"].lstrip().startswith(FORMULA)
    assert not totals_csv([given(text)], {}).splitlines()[1].lstrip().startswith(FORMULA)
    assert "<b>" not in feedback_html(given("<b>", "<b>"))


@pytest.mark.usefixtures("graded")
def test_every_student_has_a_page_of_their_own(tmp_path):
    """Names that differ only in what cannot be printed, or that are a table's, have pages and rows apart."""
    names = ["a\n", "a\t", "a?", "grades.csv", "feedback", "x" * 200, "x" * 201, "é" * 120, "-"]
    submissions, out = put(tmp_path / "in", *names), tmp_path / "out"
    found = grade_class(collect(submissions, SOURCES), out, RULES)
    assert len({one.student for one in found}) == len(names)
    assert len(list((out / "feedback").glob("*/keys.html"))) == len(names)
    assert len({row["student"] for row in rows(out)}) == len(names)
    assert student_label("ada") == "ada"


def test_totals_have_a_row_per_student():
    """Points by assignment, empty where nothing was graded, and their sum."""
    grades = [given("ada"), given("ada", topic="eviction", points=1), given("bob", topic="eviction")]
    assert totals_csv(grades, {"cleo": "nothing"}).splitlines() == [
        "student,eviction,keys,total",
        "ada,1,2,3",
        "bob,2,,2",
        "cleo,,,0",
    ]


@needs_confinement
def test_a_class_survives_the_death_of_its_grader(tmp_path):
    """A grader that is killed leaves what was done; started again, it goes on from there."""
    submissions, out = tmp_path / "in", tmp_path / "out"
    for student in ("ada", "bob", "cleo"):
        (submissions / student).mkdir(parents=True)
        shutil.copy(SOURCES / "keys.ipynb", submissions / student / "keys.ipynb")
    command = [sys.executable, "-m", "mooncake_lab", "classroom", "grade", str(submissions)]
    command += ["--out", str(out), "--sources", str(SOURCES), "--jobs", "2", "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as grader:
        journal = out / "grades.jsonl"
        deadline_s = time.monotonic() + 300
        while not (journal.exists() and journal.stat().st_size) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        grader.kill()
    kept = {
        json.loads(line)["grade"]["student"]
        for line in journal.read_text().splitlines(keepends=True)
        if line[-1:] == "\n"
    }
    assert kept
    size = journal.stat().st_size
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [one["earned"] for one in json.loads(done.stdout)["grades"]] == [10] * 3
    assert journal.stat().st_size > size
    again = [json.loads(line)["grade"]["student"] for line in journal.read_text().splitlines()]
    assert sorted(again) == ["ada", "bob", "cleo"], "nobody was graded twice"
    assert "confined by Landlock and seccomp" in done.stderr
    assert os.listdir(out / "feedback")  # noqa: PTH208
