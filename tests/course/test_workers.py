"""A worker that ends costs its own work a second try; everything else is done, once, and nothing is lost."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fragile
import pytest
from submissions import SOURCES, hand_in, needs_confinement
from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.course.grading import whole_class, workers
from mooncake_lab.course.grading.whole_class import Journal, page_of
from mooncake_lab.course.grading.workers import work_through


def tries(notes):
    """How often each item was begun."""
    return {path.name: len(path.read_text()) for path in notes.iterdir()}


@pytest.mark.parametrize("jobs", [1, 2])
def test_work_that_ends_its_worker_is_tried_twice(tmp_path, jobs):
    """Whatever its neighbours do, each item is done once; what ended two workers is None."""
    names = ["always-1", "a", "once-1", "b", "always-2", "c", "once-2", "d"]
    found = dict(work_through([(name, tmp_path) for name in names], fragile.work, jobs))
    expected = {name: None if name.startswith("always") else name.upper() for name in names}
    assert {name: result for (name, _), result in found.items()} == expected
    assert tries(tmp_path) == {name: 1 if len(name) == 1 else 2 for name in names}


def test_what_work_raises_is_raised(tmp_path):
    """An error that is none of a worker's end reaches whoever asked."""
    with pytest.raises(ValueError, match="raises"):
        list(work_through([("raises", tmp_path)], fragile.work, 1))


def test_workers_that_never_come_up_are_an_error(tmp_path, monkeypatch):
    """Where each new process ends at once, nobody is graded as if it were their fault."""
    monkeypatch.setattr(workers, "_begin", fragile.end_at_start)
    with pytest.raises(ChildProcessError, match="5 in a row ended at once"):
        list(work_through([("a", tmp_path)], fragile.work, 2))
    assert tries(tmp_path) == {}


def test_an_idle_worker_may_end(tmp_path):
    """A worker that ends between two items is replaced."""
    found = work_through([("a", tmp_path), ("b", tmp_path)], fragile.work, 1)
    assert next(found)[1] == "A"
    for child in children(os.getpid()):
        os.kill(child, signal.SIGKILL)
    time.sleep(0.5)
    assert next(found)[1] == "B"
    assert tries(tmp_path) == {"a": 1, "b": 1}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what a process holds")
def test_a_worker_that_has_grown_gets_no_more_work():
    """Work begins only in processes that hold little; those that hold little are kept."""
    most_mib = workers._MOST_KEPT_BYTES // 2**20
    sizes = [1, 2, most_mib, 3, 4, most_mib, 5]
    found = [result for _, result in work_through(sizes, fragile.keep, 1)]
    assert [before for _, before in found] == [0, 1, 3, 0, 3, 7, 0]
    processes = [pid for pid, _ in found]
    assert processes[0] == processes[1] == processes[2] != processes[3]
    assert processes[3] == processes[4] == processes[5] != processes[6]


def children(pid):
    """The grading processes below one, without multiprocessing's own tracker."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:
                continue
            if b"spawn_main" in command:
                found.append(int(child))
    return found


def test_a_notebook_that_ends_its_grader_twice_is_graded_as_that(tmp_path, monkeypatch):
    """The others get their points, the exit code is 1 also the next time, and deleting a page grades it again."""
    monkeypatch.setattr(whole_class, "_grade", fragile.grade)
    monkeypatch.setattr("mooncake_lab.course.grading.confine.check_confinable", lambda: None)
    monkeypatch.setattr("mooncake_lab.course.grading.confine.bounds", lambda: "nothing is confined here")
    for student in ("ada", "always", "bob", "once"):
        (tmp_path / "in" / student).mkdir(parents=True)
        (tmp_path / "in" / student / "keys.ipynb").write_text("{}")
    out = tmp_path / "out"
    arguments = ["classroom", "grade", str(tmp_path / "in"), "--out", str(out), "--jobs", "2"]
    for run in (1, 2):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1, (run, result.output)
        assert (
            "always keys has no points, because the grader's process ended while it graded this notebook, twice"
            in (result.stderr)
        )
        assert "to grade it again, use classroom regrade" in result.stderr
        assert "ada keys has no points" not in result.stderr
        with (out / "totals.csv").open(newline="") as file:
            assert {row["student"]: row["total"] for row in csv.DictReader(file)} == {
                "ada": "2",
                "always": "0",
                "bob": "2",
                "once": "2",
            }
        assert len((tmp_path / "in" / "always" / "always").read_text()) == 2, "the second run tries nothing anew"
    page = page_of("always", "keys", out)
    assert "ended while it graded this notebook, twice" in page.read_text()
    page.unlink()
    CliRunner().invoke(app, arguments)
    assert len((tmp_path / "in" / "always" / "always").read_text()) == 4
    assert len(Journal(out).grades) == 4


def test_a_fault_of_the_grader_costs_one_grade(tmp_path, monkeypatch):
    """An error in our own code is named as ours on the page of that notebook, and the exit code is 1."""

    def broken(path, *_, student, **__):
        if student == "bob":
            raise AssertionError(f"unforeseen in {path}")
        return fragile.grade(("", whole_class._Order(whole_class.HandedIn(student, path, path), "", None)))

    monkeypatch.setattr(whole_class, "grade", broken)
    for student in ("ada", "bob"):
        (tmp_path / student).mkdir()
        order = whole_class._Order(
            whole_class.HandedIn(student, tmp_path / student / "keys.ipynb", SOURCES / "keys.ipynb"), "", None
        )
        found = whole_class._grade(("key", order))
        assert found.failed == (student == "bob")
    assert found.marks[0].said.startswith(
        "the grader failed while it graded this notebook: AssertionError: unforeseen"
    )
    assert str(tmp_path) not in found.marks[0].said


@needs_confinement
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_killed_workers_do_not_end_the_class(tmp_path, jobs):
    """Workers of a real class are killed while they grade: everybody is graded, once, and the exit code is 0."""
    students = [f"student-{n}" for n in range(4)]
    for student in students:
        hand_in(tmp_path / "in" / student, "keys")
    command = [sys.executable, "-m", "mooncake_lab", "classroom", "grade", str(tmp_path / "in")]
    command += ["--out", str(tmp_path / "out"), "--sources", str(SOURCES), "--jobs", jobs, "--json"]
    grader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    killed = set()

    def kill():
        journal = tmp_path / "out" / "grades.jsonl"
        while grader.poll() is None and len(killed) < 2:
            lines = journal.read_bytes().count(b"\n") if journal.exists() else 0
            for child in children(grader.pid) if lines > len(killed) else ():
                if child not in killed and len(killed) < 2:
                    killed.add(child)
                    os.kill(child, signal.SIGKILL)
                    break
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    output, errors = grader.communicate(timeout=500)
    killer.join()
    assert killed
    assert grader.returncode == 0, errors
    assert [(one["student"], one["earned"]) for one in json.loads(output)["grades"]] == [(s, 10) for s in students]
    lines = (tmp_path / "out" / "grades.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["grade"]["student"] for line in lines) == students
