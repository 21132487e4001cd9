"""Grading gives a submission what it earned, and believes it nothing."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
from submissions import SOURCES, hand_in, needs_confinement
from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.course.grading.confine import Allowance, UnconfinableError
from mooncake_lab.course.grading.grade import ASSIGNMENTS, grade
from mooncake_lab.course.grading.messages import Code
from mooncake_lab.course.grading.remote import Submission, SubmissionError

QUICK = Allowance(reply_s=15.0, cpu_s=30)
FORGETFUL = (
    "def chain_keys(tokens, n):\n    return [hash(tuple(tokens[i : i + n])) for i in range(0, len(tokens), n)]"
)

pytestmark = needs_confinement


def submit(code: str, allowance: Allowance = QUICK) -> Submission:
    """A confined process that has executed one cell."""
    return Submission([Code("one", code)], allowance)


def grade_keys(folder: Path, chain_keys: str, cell: str = "chain-keys"):
    """The grade of a submission to the assignment on keys, with this code in one of its cells."""
    path = hand_in(folder / "somebody", "keys", {cell: chain_keys})
    return grade(path, SOURCES / "keys.ipynb", student="somebody", seed=3, allowance=QUICK)


def test_every_assignment_has_a_notebook_and_ten_points():
    """Notebooks and graders name the same topics, and an evening is worth the same in each."""
    assert sorted(ASSIGNMENTS) == sorted(path.stem for path in SOURCES.glob("*.ipynb"))
    assert {assignment.points for assignment in ASSIGNMENTS.values()} == {10}


def test_each_task_is_paid_for_itself(tmp_path):
    """Keys that forget what came before lose the tasks about that; a cell that raises those that need it."""
    found = grade_keys(tmp_path, chain_keys=FORGETFUL)
    assert [mark.earned > 0 for mark in found.marks] == [True, False, False, True, True]
    assert "share the key" in found.marks[1].said
    found = grade_keys(tmp_path, chain_keys="raise RuntimeError('half done')")
    assert [mark.earned > 0 for mark in found.marks] == [False, False, False, True, True]
    for mark in found.marks[:3]:
        assert "defines no 'chain_keys'" in mark.said
        assert "cell 'chain-keys' raised RuntimeError: half done" in mark.said


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("raise ValueError('\\udce9')", "ValueError: \\udce9"),
        (
            "class Odd(Exception):\n    def __str__(self): raise KeyError\nraise Odd",
            "its text cannot be read: KeyError",
        ),
        (
            (
                "class Meta(type):\n    @property\n    def __name__(cls): raise KeyError\n"
                "class Odd(Exception, metaclass=Meta): pass\nraise Odd('x')"
            ),
            "Odd: x",
        ),
    ],
)
def test_an_exception_whose_text_cannot_be_sent_costs_its_own_cell_only(tmp_path, raised, said):
    """Halves of surrogate pairs, a text that raises, a class without a readable name: remarks of one task each."""
    found = grade_keys(tmp_path, raised, cell="matched-blocks")
    assert [mark.earned > 0 for mark in found.marks] == [True, True, True, False, True]
    assert said in found.marks[3].said


def test_tampering_with_the_tests_earns_nothing(tmp_path):
    """Test cells of the student are not run, and patching the grader's code happens in the wrong process."""
    patch = (
        "import mooncake_lab.course.grading.cache_assignments as g, mooncake_lab.course.grading.task as t\n"
        "t.require = g.require = lambda *_: None\n"
        "def chain_keys(tokens, n):\n    return []"
    )
    path = hand_in(tmp_path, "keys", {"chain-keys": patch, "test-chain-keys": "assert True"})
    source = SOURCES / "keys.ipynb"
    found = grade(path, source, student="somebody", seed=3, allowance=QUICK)
    assert [mark.earned > 0 for mark in found.marks] == [False, False, False, True, True]


FORBIDDEN = {
    "PermissionError": (
        "import os; os.fork()",
        "open('/etc/shadow').read()",
        "open('/etc/passwd').read()",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.kill(os.getppid(), 9)",
        "open({outside!r}, 'w')",
        "open({secret!r}).read()",
        "import os; os.truncate({secret!r}, 0)",
        "import os; os.chmod({secret!r}, 0)",
        "import os; os.chown({secret!r}, 1, 1)",
        "import os; os.utime({secret!r}, (1, 1))",
        "import os; os.setxattr({secret!r}, 'user.x', b'x')",
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (9, 9))",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import os; os.sched_setaffinity(os.getppid(), {{0}})",
        "import os; os.memfd_create('flood')",
        "import fcntl, os; fcntl.fcntl(open('x', 'w'), fcntl.F_SETOWN, os.getppid())",
    ),
    "PermissionError|ValueError": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",),
    "AssertionError": (
        "import ctypes; assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
        "import ctypes; assert ctypes.CDLL(None).shmget(0, 4096, 0o600) >= 0",
        "import ctypes, os; assert not ctypes.CDLL(None).tgkill(os.getppid(), os.getppid(), 9)",
        "import ctypes, os; assert not ctypes.CDLL(None).syscall(234, os.getppid(), os.getppid(), 9)",
    ),
    "MemoryError": ("x = bytearray(8 * 2**30)",),
    "can't start new thread": ("import threading; threading.Thread(target=print).start()",),
    "SystemExit": ("raise SystemExit",),
}
"""What the kernel refuses, and how Python says so."""


def test_what_a_submission_may_not_do(tmp_path):
    """It cannot flood, leave, multiply, call out, kill, or touch what is not its own."""
    secret, outside = tmp_path / "secret", tmp_path / "written"
    secret.write_text("the hidden tests")
    pairs = [(said, code) for said, codes in FORBIDDEN.items() for code in codes]
    cells = [
        Code(str(i), code.format(outside=str(outside), secret=str(secret))) for i, (_, code) in enumerate(pairs)
    ]
    with Submission(cells, QUICK) as submission:
        refused = submission.failed_cells
    for (said, code), found in zip(pairs, refused, strict=True):
        assert re.search(said, found), (code, found)
    assert not outside.exists()
    assert secret.read_text() == "the hidden tests"


ENDS = {
    "its process ended itself, with exit status 0, before": "import os; os._exit(0)",
    "its process ended itself, with exit status 9, before": "import os; os._exit(9)",
    "its process crashed (SIGSEGV)": "import ctypes; ctypes.string_at(0)",
    "its process crashed (SIGALRM)": "import signal, time; signal.alarm(1); time.sleep(9)",
    "system call that is not allowed": "import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 39)",
    "it used more than 1 s of processor time in all": "while True: pass",
}
"""How a process may end before it answers, by what is said of it."""


@pytest.mark.parametrize("said", ENDS)
def test_how_a_submission_ended_is_said(said):
    """An exit, a crash, a forbidden system call and too much processor time have sentences of their own."""
    with pytest.raises(SubmissionError, match=re.escape(said)):
        submit(ENDS[said], Allowance(reply_s=60.0, cpu_s=1 if "processor" in said else 60))


@pytest.mark.parametrize(
    "body",
    [
        "import asyncio\n    async def one(): return 1\n    return asyncio.run(one())",
        "import socket\n    return socket.socketpair()",
        "import subprocess\n    return subprocess.run(['true'])",
    ],
)
def test_what_the_kernel_refuses_is_said_in_words(body):
    """A socket or a process that a function asks for, itself or through asyncio, is named as not allowed."""
    with (
        submit(f"def f():\n    {body}") as submission,
        pytest.raises(SubmissionError, match=r"opens no socket, as `asyncio\.run` does .* and starts no process"),
    ):
        submission.call("f")


def test_a_submission_that_is_killed_says_so():
    """What kills a process from outside is most often that memory ran out, and the sentence says so."""
    with submit("pass") as submission:
        submission._kill()
        with pytest.raises(SubmissionError, match=r"was killed \(SIGKILL\), as when it needs more memory"):
            submission.call("print")


def test_an_endless_loop_ends():
    """No answer in time is an answer, and the process is gone afterwards."""
    with submit("def spin():\n    while True: pass", Allowance(reply_s=2.0)) as submission:
        process = submission._process
        with pytest.raises(SubmissionError, match=r"no answer within 2 s"):
            submission.call("spin")
    assert process.poll() is not None


def test_a_machine_that_cannot_confine_is_the_teachers_affair(tmp_path, monkeypatch):
    """Where the process does not even start confined, nobody gets a zero for it."""
    path = hand_in(tmp_path, "keys")
    monkeypatch.setattr("mooncake_lab.course.grading.remote._START_S", 0.01)
    with pytest.raises(UnconfinableError, match="no confined process starts here"):
        grade(path, SOURCES / "keys.ipynb", student="somebody", seed=0)


@pytest.mark.parametrize(
    "code",
    [
        "from mooncake_lab.store import NothingToEvictError\nraise NothingToEvictError(0)",
        "raise KeyboardInterrupt",
    ],
)
def test_nothing_that_a_cell_raises_stops_the_class(tmp_path, code):
    """Whatever it is, it is a grade: without the points of that cell."""
    assert grade_keys(tmp_path, chain_keys=code).earned == 4


def test_keys_may_be_large():
    """An integer of any size can be answered; an answer of another type than asked for is refused."""
    with submit("def f():\n    return [2**100, 3]") as submission:
        assert submission.call("f", gives=list[int | str]) == [str(2**100), 3]
        with pytest.raises(SubmissionError, match=r"f returned an answer of the wrong type"):
            submission.call("f", gives=int)


def test_secrets_of_the_environment_stay_outside(monkeypatch):
    """A submission inherits no variable but those it needs."""
    monkeypatch.setenv("TEACHER_TOKEN", "secret")
    with submit("import os\ndef names():\n    return sorted(os.environ)") as submission:
        assert "TEACHER_TOKEN" not in submission.call("names", gives=list[str])
    assert "TEACHER_TOKEN" in os.environ


def test_a_class_is_graded(tmp_path):
    """The command grades every folder, writes a table and pages, and a bad submission is no failure."""
    hand_in(tmp_path / "in" / "ada", "keys")
    hand_in(tmp_path / "in" / "bob", "keys", {"chain-keys": "raise ValueError('<b>no</b>')"})
    arguments = ["classroom", "grade", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    found = {each["student"]: each["earned"] for each in json.loads(result.stdout)["grades"]}
    assert found == {"ada": 10, "bob": 4}
    assert (tmp_path / "out" / "grades.csv").read_text().count("\n") == 1 + 2 * 5
    assert (tmp_path / "out" / "totals.csv").read_text() == "student,keys,total\nada,10,10\nbob,4,4\n"
    page = (tmp_path / "out" / "feedback" / "bob" / "keys.html").read_text()
    assert "&lt;b&gt;no&lt;/b&gt;" in page
    assert "<b>no" not in page


def test_nobody_is_lost(tmp_path):
    """What cannot be graded is named, has a row in the table, and makes the exit code 1."""
    empty = CliRunner().invoke(app, ["classroom", "grade", str(tmp_path)])
    assert empty.exit_code == 1
    assert "STUDENT/TOPIC.ipynb" in empty.stderr
    folder = tmp_path / "in"
    mine = hand_in(folder / "ada", "keys")
    for lost in ("keys.ipynb", "bob/keys.zip", "bob/KEYS.IPYNB", "cleo/week1/keys/keys.ipynb"):
        (folder / lost).parent.mkdir(parents=True, exist_ok=True)
        (folder / lost).write_bytes(mine.read_bytes())
    (folder / "dan").mkdir()
    arguments = ["classroom", "grade", str(folder), "--out", str(tmp_path / "out"), "--seed", "7"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stdout.split() == ["ada", "keys", "10", "/", "10"]
    lines = [line for line in result.stderr.splitlines() if "not graded: " in line]
    named = [line.split("not graded: ")[1].split()[0].removeprefix(f"{folder}/") for line in lines]
    assert named == [
        "bob/KEYS.IPYNB",
        "bob/keys.zip",
        "bob",
        "cleo/week1/keys/keys.ipynb",
        "cleo",
        "dan",
        "keys.ipynb",
    ]
    with (tmp_path / "out" / "grades.csv").open(newline="") as file:
        rows = [(row["student"], row["points"], row["out_of"]) for row in csv.DictReader(file)]
    assert {row[0] for row in rows[:5]} == {"ada"}
    assert rows[5:] == [("bob", "0", "0"), ("cleo", "0", "0"), ("dan", "0", "0")]
