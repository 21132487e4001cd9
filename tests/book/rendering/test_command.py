"""`mooncake-lab batch`, as a shell sees it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from mooncake_lab.cli.batch import batch

COMMAND = sys.modules[batch.__module__]
"""The module, which its package hides behind the function."""


@pytest.fixture
def shell(repository, monkeypatch):
    """A function that runs the command in the little repository."""
    monkeypatch.chdir(repository)
    app = Typer()
    app.command()(batch)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_json_says_what_was_done(shell, repository, monkeypatch):
    """One object: parameters, traces found, and for each notebook its copy and its numbers.

    A worker that then finds other traces than the command fails its notebook; nothing older stands in its place.
    """
    result = shell("--topics", "alpha", "--scale", "smoke", "--seed", "5", "--out", "results", "--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert said["parameters"] == {"scale": "smoke", "seed": 5, "out_dir": "results"}
    (notebook,) = said["notebooks"]
    assert notebook["status"] == "executed"
    assert notebook["error"] is None
    assert (repository / notebook["notebook"]).is_file()
    assert json.loads((repository / notebook["record"]).read_text()) == {"scale": "smoke", "seed": 5}
    assert json.loads((repository / "results" / "provenance.json").read_text())["scale"] == "smoke"
    monkeypatch.setattr(COMMAND, "found_traces", lambda: {"conversation": "0" * 64})
    for _ in range(2):
        result = shell("--topics", "alpha", "--scale", "smoke", "--seed", "5", "--out", "results", "--json")
        assert result.exit_code == 1
        (row,) = json.loads(result.stdout)["notebooks"]
        assert row["status"] == "failed"
        assert "conversation (planned SHA-256 000000000000, here " in row["error"]
        assert row["record"] is None
        assert 'href="01_alpha.html"' not in (repository / "results/index.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--scale", "huge"), "allowed are smoke, classroom, full, gpu"),
        (("--topics", "gamma"), "there are alpha, beta"),
        (("--set", "n"), "KEY=VALUE"),
        (("--set", "n=3"), "has no parameter 'n'"),
        (("--set", "scale=huge"), "its own option, --scale"),
        (("--seed", "0,1"), "needs its own folder"),
        (("--seed", "one"), "not a whole number"),
        (("--seed", "-1", "--out", "results"), "not a whole number from 0"),
        (("--seed", "0..99999999", "--out", "results"), "has 100000000 values; allowed are 10000"),
        (("--executor", "threads"), "allowed are processes and dask"),
        (("--executor", "dask://:8786"), "allowed are processes and dask"),
        (("--set", "n=1", "--set", "n=2"), "n is given twice"),
        (("--jobs", "2", "--executor", "dask://nowhere:8786"), "--jobs 2 limits the notebooks on this machine"),
    ],
)
def test_bad_usage_is_status_2(shell, arguments, complaint):
    """What the command cannot do it refuses in one sentence, before any notebook runs."""
    result = shell(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_a_folder_that_cannot_be_made_is_one_line(shell):
    """It is reported before any notebook runs, and not with a traceback after all have failed."""
    result = shell("--topics", "alpha", "--scale", "smoke", "--out", "/proc/nowhere")
    assert result.exit_code == 1
    assert "mooncake-lab batch: [Errno 2]" in result.stderr
    assert "alpha" not in result.stderr


def test_elsewhere_there_is_nothing_to_run(shell, tmp_path_factory, monkeypatch):
    """Outside the repository the command says where it should be run."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    result = shell()
    assert result.exit_code == 2
    assert "root of the repository" in result.stderr


def test_a_cluster_is_told_nothing_of_the_cores_here(shell, monkeypatch):
    """Notebooks share the cores of this machine; those on a cluster have one thread each."""
    told = {}

    def unreachable(_jobs, **options):
        told.update(options)
        raise OSError("nobody answers")

    monkeypatch.setattr(COMMAND, "run", unreachable)
    monkeypatch.setattr(COMMAND, "_cores", lambda: 8)
    assert shell("--topics", "alpha", "--jobs", "2").exit_code == 1
    assert (told["workers"], told["threads"]) == (2, 8)
    assert shell("--topics", "alpha", "--executor", "dask://nowhere:8786").exit_code == 1
    assert told["threads"] == 1


def test_the_book_is_of_one_piece(shell, repository):
    """Some chapters with other parameters would make the banner of all a lie: refused before anything runs."""
    beta = json.loads((repository / "notebooks/02_beta.ipynb").read_text())
    beta["metadata"]["papermill"] = {"parameters": {"scale": "smoke", "seed": 0, "out_dir": "book/_generated"}}
    (repository / "book/chapters").mkdir(parents=True)
    (repository / "book/chapters/02_beta.ipynb").write_text(json.dumps(beta))
    refused = shell("--topics", "alpha", "--scale", "classroom")
    assert refused.exit_code == 2
    assert "02_beta.ipynb was executed with scale=smoke, but scale=classroom was requested" in refused.stderr
    assert not (repository / "book/chapters/01_alpha.ipynb").exists()


def test_nothing_outlives_a_killed_batch(repository, write_notebook):
    """Killed without a word, the command leaves neither a worker nor a kernel behind."""
    begun = "import os, time\nopen('pids', 'w').write(f'{os.getpid()} {os.getppid()}')\ntime.sleep(60)"
    write_notebook(repository / "notebooks" / "01_alpha.ipynb", begun)
    command = [Path(sys.executable).with_name("mooncake-lab"), "batch", "--topics", "alpha"]
    with subprocess.Popen(command, cwd=repository, stderr=subprocess.DEVNULL) as running:
        await_that(lambda: (repository / "pids").is_file() and (repository / "pids").read_text(), 60)
        running.kill()
    pids = (repository / "pids").read_text().split()
    await_that(lambda: not any(Path("/proc", pid).exists() for pid in pids), 20)


def await_that(is_so, limit_s):
    """Wait until it is so, and not for ever."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
