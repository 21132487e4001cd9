"""Chapters x parameters: which points there are, where they go, and what is left for a reader."""

import csv
import json
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from mooncake_lab.book.rendering.plan import NotebookJob
from mooncake_lab.book.rendering.report import recorded
from mooncake_lab.cli.batch import batch

VERDICT = """
import json
from pathlib import Path
if seed == 2:
    raise ValueError("no second seed")
row = {"quantity": "answer", "paper": 40.0, "ours": 40.0 + seed, "verdict": "reproduced"}
Path(out_dir).mkdir(exist_ok=True, parents=True)
curve = [{"x": 1, "y": seed}, {"x": 2, "y": 2 * seed}]
numbers = {"beside_papers": [row], "curve": curve, "scalar": 3}
Path(out_dir, "beta.json").write_text(json.dumps({"topic": "beta", "numbers": numbers}))
"""


@pytest.fixture
def shell(repository, write_notebook, monkeypatch):
    """A function that runs the command in a repository whose second notebook judges, and fails for one seed."""
    write_notebook(repository / "notebooks" / "02_beta.ipynb", VERDICT.strip())
    monkeypatch.chdir(repository)
    monkeypatch.setattr(sys.modules[batch.__module__], "surroundings_digest", lambda *_: "the same")
    app = Typer()
    app.command()(batch)
    return lambda *arguments: CliRunner().invoke(app, arguments)


class _Links(HTMLParser):
    """The links and sources of a page."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, _tag, attrs):
        self.found += [value for name, value in attrs if name in {"href", "src"}]


def test_a_sweep_is_isolated_reported_indexed_and_resumed(shell, repository):
    """One point fails; the others are done, the failure is told with notebook, cell and traceback, and again."""
    arguments = ("--topics", "beta", "--scale", "smoke", "--seed", "0,2,4", "--out", "results")
    result = shell(*arguments)
    assert result.exit_code == 1
    assert "results/seed=2/02_beta.ipynb, cell 2:" in result.stderr
    assert 'raise ValueError("no second seed")' in result.stderr
    with (repository / "results/summary/notebooks.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["seed"], row["status"], row["cell"]) for row in table] == [
        ("0", "executed", ""),
        ("2", "failed", "2"),
        ("4", "executed", ""),
    ]
    with (repository / "results/summary/verdicts.csv").open() as file:
        assert [(row["seed"], row["ours"]) for row in csv.DictReader(file)] == [("0", "40.0"), ("4", "44.0")]
    with (repository / "results/summary/numbers/beta.curve.csv").open() as file:
        curves = [(row["seed"], row["x"], row["y"]) for row in csv.DictReader(file)]
    assert curves == [("0", "1", "0"), ("0", "2", "0"), ("4", "1", "4"), ("4", "2", "8")]
    index = (repository / "results/index.html").read_text()
    assert "no second seed" in index
    assert re.search(r"<td>40</td>\s*<td>2</td>\s*<td>40</td>\s*<td>42</td>\s*<td>44</td>", index)
    for name in ("index.html", *(f"seed={seed}/02_beta.html" for seed in (0, 2, 4))):
        page = repository / "results" / name
        links = [link for link in _Links(page.read_text()).found if not link.startswith(("data:", "#"))]
        assert links
        assert all((page.parent / link).is_file() for link in links), links
    again = json.loads(shell(*arguments, "--json").stdout)
    assert [row["status"] for row in again["notebooks"]] == ["cached", "failed", "cached"]
    assert again["parameters"]["seed"] == [0, 2, 4]


@contextmanager
def cluster(folder):
    """A Dask scheduler, as `HOST:PORT`, and one worker in a folder."""
    told = folder / "scheduler.json"
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1", "--no-dashboard"]
    shared = ["--scheduler-file", str(told)]
    with subprocess.Popen([*scheduler, *shared], stderr=subprocess.DEVNULL) as first:
        (folder / "scheduler.pid").write_text(str(first.pid))
        while not told.is_file():
            time.sleep(0.1)
        with subprocess.Popen([*worker, *shared], stderr=subprocess.DEVNULL, cwd=folder) as second:
            try:
                yield json.loads(told.read_text())["address"].removeprefix("tcp://")
            finally:
                second.terminate()
                first.terminate()


@pytest.mark.slow
def test_a_cluster_executes_a_sweep(shell, repository):
    """Workers of a Dask scheduler execute the notebooks, and what fails there is told as if it had failed here."""
    pytest.importorskip("distributed")
    with cluster(repository) as address:
        arguments = ("--topics", "beta", "--seed", "1,2", "--out", "far", "--executor", f"dask://{address}")
        result = shell(*arguments, "--json")
    assert [row["status"] for row in json.loads(result.stdout)["notebooks"]] == ["executed", "failed"]
    assert (repository / "far/seed=1/02_beta.html").is_file()


@pytest.mark.slow
def test_a_scheduler_that_is_killed_leaves_what_was_done(shell, repository, write_notebook):
    """The notebook that it had not given back fails in a sentence, without a traceback; the other one is kept."""
    pytest.importorskip("distributed")
    killer = "import os, pathlib, signal\nos.kill(int(pathlib.Path('scheduler.pid').read_text()), signal.SIGKILL)"
    write_notebook(repository / "notebooks" / "01_alpha.ipynb", killer, "import time\ntime.sleep(15)")
    with cluster(repository) as address:
        result = shell("--out", "far", "--executor", f"dask://{address}", "--json")
    assert [row["status"] for row in json.loads(result.stdout)["notebooks"]] == ["failed", "executed"]
    assert "ended, or could not be reached any more" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_column_called_like_a_parameter_hides_nothing(repository):
    """Where it says the same it is left out, else it gets a name of its own; tables by name are there, too."""
    record = repository / "beta.json"
    rows = [{"seed": 1, "node": "old", "y": 2.0}]
    record.write_text(json.dumps({"topic": "beta", "numbers": {"curve": rows, "peaks": {"a": 3, "b": 4}}}))
    job = NotebookJob(
        topic="beta", source=Path("x"), output=Path("y"), record=Path("beta.json"), root=repository, digest="",
        parameters={"seed": 1, "node": "new", "out_dir": "out"},
    )  # fmt: skip
    found = recorded([job])
    assert found["beta.curve"].to_dict(orient="records") == [
        {"seed": 1, "node": "new", "table.node": "old", "y": 2.0}
    ]
    assert list(found["beta.peaks"]["value"]) == [3, 4]
