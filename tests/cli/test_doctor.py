"""`mooncake-lab doctor`: what it looks at, and what it says."""

import importlib
import json

from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.workload import RELEASES

module = importlib.import_module("mooncake_lab.cli.doctor")  # the package has a command of that name
PYPROJECT_EXTRAS = {"book", "serve", "cluster", "classroom", "mooncake"}


def doctor(*arguments):
    """Run the command."""
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_machine_that_runs_the_tests_is_ready():
    """This environment lacks nothing that every user needs; no released trace and no extra is forgotten."""
    result = doctor("--json")
    assert result.exit_code == 0, result.stdout
    found = json.loads(result.stdout)
    assert found["ready"] is True
    looked_at = {finding["what"] for finding in found["findings"]}
    assert {f"trace: {name}" for name in RELEASES} | {f"extra: {name}" for name in PYPROJECT_EXTRAS} <= looked_at


def test_what_is_not_there_comes_with_a_way_to_get_it(monkeypatch):
    """Everything that is not ready has a remedy, and everything that is has none."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("MOONCAKE_LAB_DATA", "/nonexistent")
    findings = json.loads(doctor("--json").stdout)["findings"]
    assert all((finding["standing"] == "ready") == (finding["remedy"] == "") for finding in findings)
    assert {"browser", "C compiler"} <= {finding["what"] for finding in findings if finding["remedy"]}


def test_who_cannot_confine_is_told_before_grading(monkeypatch):
    """Where the kernel has no Landlock a teacher learns it here, and not with the first submission."""
    monkeypatch.setattr("mooncake_lab.course.grading.confine.platform.machine", lambda: "s390x")
    (finding,) = [one for one in json.loads(doctor("--json").stdout)["findings"] if one["what"] == "grading"]
    assert finding["standing"] != "ready"
    assert "s390x" in finding["found"]
    assert "Landlock" in finding["remedy"]


def test_who_cannot_give_private_folders_is_told_what_that_means(monkeypatch):
    """Where the system forbids private file systems, a teacher learns that submissions cannot write, and why."""
    monkeypatch.setattr("mooncake_lab.course.grading.confine.why_no_folder", lambda: "OSError: not here")
    found = [one for one in json.loads(doctor("--json").stdout)["findings"] if one["what"] == "grading: files"]
    assert [(one["standing"], one["found"]) for one in found] in (
        [],  # this kernel cannot confine at all
        [("optional", "submissions cannot write files: OSError: not here")],
    )


def test_what_everybody_needs_decides_the_exit_code(monkeypatch):
    """One missing thing ends the command with status 1, and a person reads the remedy."""
    lacking = module.Finding(what="Python", standing="missing", found="2.7", remedy="use Python 3.11")
    monkeypatch.setattr(module, "CHECKS", (lambda: iter([lacking]),))
    result = doctor()
    assert result.exit_code == 1
    assert "missing   Python  2.7" in result.stdout
    assert "-> use Python 3.11" in result.stdout
