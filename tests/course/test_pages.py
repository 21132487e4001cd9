"""What students and teachers find in the folder of grades: no folder of the teacher, and nothing overwritten."""

import csv
import json
import shutil
import tempfile

import pytest
from submissions import SOURCES, hand_in, needs_confinement
from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.course.grading.collect import collect, in_short
from mooncake_lab.course.grading.grade import Grade, Mark
from mooncake_lab.course.grading.own_files import OwnFiles
from mooncake_lab.course.grading.remarks import one_line
from mooncake_lab.course.grading.whole_class import Journal, write_tables


def given(student="ada", points=2):
    """A grade of one task."""
    return Grade(student=student, topic="keys", marks=(Mark(task="a task", points=2, earned=points, said="fine"),))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[Errno 2] No such file: '/home/Prof Smith/in/x.csv'", "[Errno 2] No such file: '…/x.csv'"),
        ("from 'a.b' (/srv/course/a/b/__init__.py)", "from 'a.b' (…/__init__.py)"),
        ('File "/srv/x/y.py", line 3', 'File "…/y.py", line 3'),
        ("PosixPath('/srv/submission-1')", "PosixPath('…/submission-1')"),
        ("file:///srv/x/y and error:/srv/x/y, //srv/x/y; path=/srv/x", "…/y and error:…/y, …/y; path=…/x"),
        ("['/usr/lib', '/srv/secret/é.txt']", "['…/lib', '…/é.txt']"),
        ("PATH=/usr/bin:/srv/bin", "PATH=…/bin:…/bin"),
        ("3 / 4, 1/2, a//b, ../x/y, https://host/a/b", "3 / 4, 1/2, a//b, ../x/y, https://host/a/b"),
    ],
)
def test_a_remark_has_no_folders(text, shown):
    """Of an absolute path its last name stays; what only looks like a path is not touched."""
    assert one_line(text) == shown


HOSTILE = {
    "its own place": "import os\nraise ValueError(os.getcwd())",
    "the package": "import mooncake_lab.core\nraise ValueError(mooncake_lab.core.__file__)",
    "a wrong import": "from mooncake_lab.core import no_such_name",
    "a wrong module": "import mooncake_lab.no_such_module",
    "a file": "open('/{folder}/x.csv')",
    "a file beside it": "open('data.csv')",
    "the path of Python": "import sys\nraise ValueError(sys.path, sys.prefix, sys.executable)",
    "the environment": "import os\nraise ValueError(dict(os.environ))",
    "a traceback": "import traceback, json\ntry:\n    json.loads('')\nexcept ValueError:\n"
    "    raise ValueError(traceback.format_exc())",
    "a warning": "import warnings\nwarnings.simplefilter('error')\nwarnings.warn(__import__('json').__file__)",
    "a name": "raise type(__import__('json').__file__, (ValueError,), {})",
    "an answer": "def chain_keys(tokens, n):\n    import json\n    return [json]",
    "an argument": "def chain_keys(tokens, n):\n    raise KeyError(__import__('json').__file__)",
}
FILES = {
    "text": b"hello",
    "nothing": b"",
    "UTF-16": "{}".encode("utf-16"),
    "half": b'{"cells": [',
    "no cells": b"{}",
    "deep": b'{"cells": ' + b"[" * 50_000,
    "bytes": b'{"cells": ["\xff"]}',
}


@needs_confinement
def test_nothing_of_the_teachers_folders_reaches_a_student(tmp_path):
    """Neither pages nor tables name where submissions, notebooks, grades, Python and the package lie."""
    root = tmp_path / "the teachers own folder"
    (root / "sources").mkdir(parents=True)
    shutil.copy(SOURCES / "keys.ipynb", root / "sources")
    for name, code in HOSTILE.items():
        hand_in(root / "in" / name, "keys", {"chain-keys": code.replace("{folder}", str(root))})
    for name, raw in FILES.items():
        path = root / "in" / name / "keys.ipynb"
        path.parent.mkdir()
        path.write_bytes(raw)
    (root / "in" / "twice" / "keys").mkdir(parents=True)
    for place in ("keys.ipynb", "keys/keys.ipynb"):
        (root / "in" / "twice" / place).write_bytes(b"{}")
    (root / "in" / "link").mkdir()
    (root / "in" / "link" / "keys.ipynb").symlink_to(root / "sources" / "keys.ipynb")
    (root / "in" / "none").mkdir()
    out = tmp_path / "out"
    arguments = ["classroom", "grade", str(root / "in"), "--sources", str(root / "sources"), "--out", str(out)]
    CliRunner().invoke(app, [*arguments, "--reply-s", "60"], catch_exceptions=False)
    written = [*out.glob("feedback/*/*.html"), *out.glob("*.csv")]
    assert len(written) == len(HOSTILE) + len(FILES) + 1 + 2
    package = str(SOURCES.parents[1])
    secrets = (root.name, package, tempfile.gettempdir() + "/", "/lib/python", "/usr/", "/home/", "/root", ".venv")
    for path in written:
        remarks = path.read_text(encoding="utf-8").split("<h2>What was graded</h2>")[0]
        assert not [secret for secret in secrets if secret in remarks], (path.parent.name, remarks)
    with (out / "grades.csv").open(newline="") as file:
        said = [(row["student"], row["remark"]) for row in csv.DictReader(file)]
    assert (
        sum(who == "half" and one.startswith("keys.ipynb is not a Jupyter notebook: ") for who, one in said) == 5
    )
    assert any(who == "a file beside it" and "data.csv" in one for who, one in said)


def test_a_bad_line_of_the_journal_costs_one_grade(tmp_path):
    """It is named and kept in a file beside the journal; the grades before and behind it stay."""
    journal = Journal(tmp_path)
    for n in range(8):
        journal.add(f"key {n}", given(f"student {n}"))
    path = tmp_path / "grades.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"X" + lines[1]
    lines[3] = lines[3].replace(b'"points":2', b'"points":"two"')
    lines[5] = b"\xff\n"
    lines[6] = b"[" * 100_000 + b"\n"
    path.write_bytes(b"".join(lines))
    said = []
    journal = Journal(tmp_path, said.append)
    assert {*journal.grades} == {f"key {n}" for n in (0, 2, 4, 7)}
    assert [each.split(" cannot be read")[0] for each in said] == [
        f"line {n} of grades.jsonl" for n in (2, 4, 6, 7)
    ]
    kept = (tmp_path / "grades.unreadable.jsonl").read_bytes()
    assert kept == b"".join(lines[n] for n in (1, 3, 5, 6))
    assert path.read_bytes() == b"".join(lines[n] for n in (0, 2, 4, 7))
    said.clear()
    journal = Journal(tmp_path, said.append)
    journal.add("key 9", given())
    assert said == []
    assert len(Journal(tmp_path).grades) == 5


@pytest.mark.parametrize(
    "change", [lambda raw: raw.rstrip(b"\n"), lambda raw: raw.replace(b"\n", b"\r\n") + b"\n"]
)
def test_an_editor_that_changes_line_ends_costs_nothing(tmp_path, change):
    """Without its last line end, with those of Windows, or with empty lines, a journal has the same grades."""
    journal = Journal(tmp_path)
    journal.add("one", given())
    journal.add("two", given("bob"))
    path = tmp_path / "grades.jsonl"
    path.write_bytes(change(path.read_bytes()))
    journal = Journal(tmp_path, pytest.fail)
    journal.add("three", given("cleo"))
    assert {*Journal(tmp_path, pytest.fail).grades} == {"one", "two", "three"}


@pytest.mark.parametrize("name", ["totals.csv", "grades.csv", "feedback/ada/keys.html"])
def test_what_a_teacher_edited_is_kept_beside(tmp_path, name):
    """The grader writes its own file, keeps the edited one under another name, and says so; each time."""
    path, said = tmp_path / name, []
    contents = [f"{n}\n".encode() for n in range(4)]
    files = OwnFiles(tmp_path, said.append)
    files.write(path, contents[0])
    files.write(path, contents[1])
    OwnFiles(tmp_path, said.append).write(path, contents[2])
    assert said == []
    for n, edit in enumerate((b"mine", b"mine again"), start=1):
        path.write_bytes(edit)
        OwnFiles(tmp_path, said.append).write(path, contents[2 + n % 2])
        assert path.with_name(f"{path.stem}.edited-{n}{path.suffix}").read_bytes() == edit
        assert path.read_bytes() == contents[2 + n % 2]
        assert len(said) == n
        assert said[-1].startswith(
            f"{path.name} is not as the grader wrote it; the edited file is now {path.stem}."
        )


def test_a_run_that_was_cut_leaves_no_edited_tables(tmp_path, monkeypatch):
    """Wherever the grader ends while it writes, the next run takes the tables for its own."""
    whole_class = OwnFiles(tmp_path, pytest.fail)
    write_tables([given()], whole_class, tmp_path, {})
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_tables([given(), given("bob")], whole_class, tmp_path, {})
    monkeypatch.undo()
    write_tables([given(), given("cleo")], OwnFiles(tmp_path, pytest.fail), tmp_path, {})
    assert "cleo" in (tmp_path / "totals.csv").read_text()


def test_a_folder_of_many_files_is_one_line(tmp_path):
    """Of 20,000 files ten are named and the others counted; every other student is named as before."""
    for name in ("ada/keys.ipynb", "bob/notes.txt", "loose.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for n in range(2000):
        (tmp_path / "eve" / f"{n % 40}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "eve" / f"{n % 40}" / f"{n}.csv").touch()
    found = collect(tmp_path, SOURCES)
    lines = [*in_short(found.ungraded, tmp_path)]
    assert len(lines) == 2 + 1 + 10 + 2
    (counted,) = [line for line in lines if "1,990 more below" in line]
    assert counted.startswith(f"1,990 more below {tmp_path}/eve, the first of them {tmp_path}/eve/")
    for name in ("bob/notes.txt is not named", "bob holds nothing", "eve holds nothing", "loose.txt lies in no"):
        assert any(line.startswith(f"{tmp_path}/{name}") for line in lines)
    assert len(found.ungraded) == 2004, "the JSON output lists them all"
    result = CliRunner().invoke(
        app, ["classroom", "grade", str(tmp_path), "--json", "--out", str(tmp_path / "x"), "--sources", "/nowhere"]
    )
    assert result.exit_code != 0


def test_the_json_output_is_json(tmp_path):
    """Names of any bytes, and files that are not graded, are in it."""
    (tmp_path / "in" / "b\udcff").mkdir(parents=True)
    (tmp_path / "in" / "ada").mkdir()
    (tmp_path / "in" / "ada" / "keys.ipynb").write_text("{}")
    arguments = ["classroom", "grade", str(tmp_path / "in"), "--json", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--sources", str(SOURCES)])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["not_graded"][0]["path"].endswith("b?")
