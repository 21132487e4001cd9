"""What continuous integration does, in which order, and which skipped tests it accepts."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEWCOMER = ("make book SCALE=smoke", "make test PYTEST_FLAGS=--durations=25 --junitxml=build/newcomer.xml")
COMMAND = """#!/bin/bash
printf '%s|%s|%s|%s\\n' "${0##*/} $*" "${OFFLINE:-}" "${MOONCAKE_LAB_DATA:-}" "${LD_LIBRARY_PATH:-}" >> "$CALLS"
[[ ${0##*/} != ldconfig ]] || echo "libibverbs.so.1 (libc6,x86-64) => /usr/lib/libibverbs.so.1"
[[ ${0##*/} != id ]] || echo 0
[[ "${0##*/} $1" != "$FAILS" ]]
"""


def run_ci(folder, fails=""):
    """The exit status of `.ci/run`, and each command that it called: text, OFFLINE, traces, library path."""
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    commands = [folder / "bin" / name for name in ("make", "apt-get", "ldconfig", "id", "chromium")]
    for path in (*commands, folder / ".venv" / "bin" / "python"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(COMMAND)
        path.chmod(0o755)
    calls = folder / "calls"
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "FAILS": fails,
        "MOONCAKE_LAB_DATA": "/the/traces",
    }
    command = ["bash", str(folder / ".ci" / "run")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [line.split("|") for line in calls.read_text().splitlines()]
    return ended.returncode, [call for call in found if not call[0].startswith(("ldconfig", "id "))]


def test_a_newcomers_commands_come_first(tmp_path):
    """Without traces, network and libraries of Mooncake, before anything is installed or checked."""
    status, calls = run_ci(tmp_path)
    assert status == 0
    names = [call[0] for call in calls]
    assert tuple(names[:2]) == NEWCOMER
    assert names[2] == "python .ci/check_skips build/newcomer.xml .ci/newcomer_skips.txt"
    for _, offline, traces, libraries in calls[:2]:
        assert (offline, traces) == ("1", "")
        with pytest.raises(OSError, match="file too short"):
            ctypes.CDLL(str(Path(libraries.split(":")[0]) / "libibverbs.so.1"))
    assert next(name for name in names if name.startswith("apt-get")).startswith("apt-get update")


def test_what_is_not_a_newcomers_comes_behind(tmp_path):
    """Style and types, the other Pythons, tests of traces and wheel, and the book with traces are all checked."""
    _, calls = run_ci(tmp_path)
    behind = [call[0] for call in calls[3:] if call[0].startswith("make")]
    assert behind[:3] == ["make check", "make test-pythons", "make test-kernels PYTEST_FLAGS=-q"]
    assert behind[3].startswith("make test TEST_MARKS=(traces or wheel) and ")
    assert behind[-2:] == ["make book OFFLINE=1 REQUIRE_RECORD=/the/traces", "make test-site PYTEST_FLAGS=-q"]


@pytest.mark.parametrize(
    "step", ["make book", "make test", "make check", "make test-pythons", "python .ci/check_skips"]
)
def test_a_step_that_fails_ends_the_run(tmp_path, step):
    """Nothing that follows hides it."""
    status, calls = run_ci(tmp_path, fails=step)
    assert status != 0
    assert calls[-1][0].startswith(step)


SKIPPED = '<testcase><skipped message="{}"/></testcase>'
WHOLE_FILE = "<skipped message=\"collection skipped\">('/a/test.py', 3, 'Skipped: no conda')</skipped>"


@pytest.mark.parametrize(
    ("skips", "status", "said"),
    [
        ([], 0, "0 tests were skipped"),
        ([SKIPPED.format("no trace of today"), SKIPPED.format("no trace of old"), WHOLE_FILE], 0, "3 tests"),
        ([SKIPPED.format("no trace of today")] * 3, 1, "3 tests are skipped, at most 2 are allowed"),
        ([SKIPPED.format("a new reason")], 1, "1 tests are skipped, at most 0 are allowed"),
    ],
    ids=["none", "allowed", "too many", "new"],
)
def test_a_new_skip_fails(tmp_path, skips, status, said):
    """A reason that is not on the list, or that skips more tests than the list allows, is named and fails."""
    report, allowed = tmp_path / "report.xml", tmp_path / "allowed.txt"
    report.write_text(f"<testsuites>{''.join(skips)}</testsuites>")
    allowed.write_text("# a comment\n2\tno trace of *\n1\tno conda\n")
    command = [sys.executable, str(ROOT / ".ci" / "check_skips"), str(report), str(allowed)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == status
    assert said in ended.stdout + ended.stderr


def test_what_will_be_skipped_is_said_at_the_start(tmp_path):
    """Where the released traces are missing, the first lines of a run say so, and how they are fetched."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--collect-only",
        "tests/core/test_sums.py",
    ]
    environment = {**os.environ, "MOONCAKE_LAB_DATA": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    head = ended.stdout.partition("collected")[0]
    assert (
        "skipped here, tests of released traces: the released conversation and synthetic trace is not here" in head
    )
    assert "`make traces` fetches it" in head
