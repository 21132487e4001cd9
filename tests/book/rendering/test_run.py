"""Notebooks really executed, in processes of their own."""

import io
import json
import os
import sys
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from mooncake_lab.book.rendering import Outcome, plan, run
from mooncake_lab.book.rendering.notebook import read_notebook
from mooncake_lab.book.rendering.plan import MARK
from mooncake_lab.book.rendering.report import rows
from mooncake_lab.book.rendering.run import execute


def execute_all(root: Path, **options) -> tuple[dict[str, Outcome], str]:
    """The outcomes by topic, and what was shown on the way."""
    shown = io.StringIO()
    parameters = {"scale": options.pop("scale", "classroom"), "seed": 0}
    jobs = plan(
        (root / "notebooks").glob("*.ipynb"),
        root=root,
        out=Path("chapters"),
        records=Path("numbers"),
        parameters=parameters,
        surroundings="the same",
        topics=options.pop("topics", ()),
    )
    console = Console(file=shown, force_terminal=options.pop("watched", False))
    outcomes = run(jobs, workers=2, threads=1, console=console, **options)
    return {outcome.job.topic: outcome for outcome in outcomes}, shown.getvalue()


def stderr_of(path: Path) -> str:
    """All that the cells of a notebook wrote to stderr."""
    outputs = [output for cell in read_notebook(path).cells for output in cell.outputs]
    return "".join("".join(o["text"]) for o in outputs if o.get("name") == "stderr")


def test_executes_then_keeps(repository):
    """The first run executes and records; the second finds everything done; another scale does not.

    A reader sees the parameters twice only if the second are others.
    """
    first, _ = execute_all(repository)
    assert {topic: outcome.status for topic, outcome in first.items()} == {"alpha": "executed", "beta": "executed"}
    assert hides_injected(repository)
    assert (repository / "numbers" / "alpha.json").read_text() == '{"scale": "classroom", "seed": 0}'
    second, shown = execute_all(repository)
    assert {outcome.status for outcome in second.values()} == {"cached"}
    assert {topic: outcome.seconds for topic, outcome in second.items()} == {
        topic: outcome.seconds for topic, outcome in first.items()
    }
    assert all(outcome.seconds > 0 for outcome in first.values())
    (row, _) = rows(second.values())
    assert (row["status"], row["seconds"]) == ("cached", round(first["alpha"].seconds, 3))
    assert shown.split() == ["alpha", "up", "to", "date", "beta", "up", "to", "date"]
    third, _ = execute_all(repository, scale="smoke", topics=["alpha"], watched=True)
    assert third["alpha"].status == "executed"
    assert (repository / "numbers" / "alpha.json").read_text() == '{"scale": "smoke", "seed": 0}'
    assert not hides_injected(repository)


def test_a_copy_of_before_has_the_seconds_of_papermill(repository):
    """A copy that does not say how long its execution took says how long its cells took."""
    executed, _ = execute_all(repository, topics=["beta"])
    path = repository / "chapters" / "02_beta.ipynb"
    notebook = json.loads(path.read_text())
    assert notebook["metadata"][MARK].pop("seconds") == executed["beta"].seconds
    path.write_text(json.dumps(notebook))
    again, _ = execute_all(repository, topics=["beta"])
    assert again["beta"].status == "cached"
    assert again["beta"].seconds == notebook["metadata"]["papermill"]["duration"] > 0


class _Scheduler(Executor):
    """Executes some notebooks here, and ends before the others."""

    def __init__(self, done):
        self._done = done

    def submit(self, execute, job, threads):
        future = Future()
        if job.topic in self._done:
            future.set_result(execute(job, threads))
        else:
            future.cancel()
            future.set_running_or_notify_cancel()
        return future


def test_a_scheduler_that_ends_costs_only_what_it_had_not_given_back(repository, write_notebook, monkeypatch):
    """Each of these notebooks fails in one sentence; what was done stays, and the same command does the rest."""
    path = write_notebook(repository / "notebooks" / "03_sum.ipynb", "1")
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["metadata"]["tags"].append("gathers")
    path.write_text(json.dumps(notebook))
    places = iter([_Scheduler({"alpha"}), OSError("Timed out trying to connect")])

    @contextmanager
    def opened(*_, **__):
        place = next(places)
        if isinstance(place, OSError):
            raise place
        yield place

    monkeypatch.setattr(sys.modules[run.__module__], "opened", opened)
    first, shown = execute_all(repository, executor="dask://node1:8786")
    assert {topic: outcome.status for topic, outcome in first.items()} == {
        "alpha": "executed",
        "beta": "failed",
        "sum": "failed",
    }
    assert first["beta"].error == (
        "the scheduler dask://node1:8786 ended, or could not be reached any more, before this notebook was done;"
        " start it again, and the same command executes only what is missing"
    )
    assert first["sum"].error == "dask://node1:8786 cannot be used any more: Timed out trying to connect"
    assert first["beta"].traceback is None
    assert "up to there" not in shown, "there is nothing to read"
    monkeypatch.undo()
    second, _ = execute_all(repository)
    assert {topic: outcome.status for topic, outcome in second.items()} == {
        "alpha": "cached",
        "beta": "executed",
        "sum": "executed",
    }


def test_a_scheduler_that_was_never_there_is_an_error_of_the_command(repository, monkeypatch):
    """Nothing was executed, so nothing is said of single notebooks."""

    @contextmanager
    def opened(*_, **__):
        raise OSError("Timed out trying to connect")
        yield

    monkeypatch.setattr(sys.modules[run.__module__], "opened", opened)
    with pytest.raises(OSError, match="Timed out"):
        execute_all(repository, executor="dask://node1:8786")


def hides_injected(root):
    """Whether the first notebook's injected parameters are left out of the page."""
    (cell,) = read_notebook(root / "chapters" / "01_alpha.ipynb").tagged("injected-parameters")
    return "remove-cell" in cell.tags


def test_a_gathering_notebook_runs_last_and_follows_what_it_gathers(repository, write_notebook, monkeypatch):
    """It is kept while the numbers of the others stay, and runs again when they change; force runs everything."""
    path = write_notebook(repository / "notebooks" / "00_sum.ipynb", "1")
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["metadata"]["tags"].append("gathers")
    path.write_text(json.dumps(notebook))
    ran = []

    def pretend(todo, _workers, _threads, finished, _executor):
        """Execute nothing, and leave behind what an execution leaves."""
        for job in todo:
            copy, record = job.root / job.output, job.root / job.record
            for made in (copy, record):
                made.parent.mkdir(exist_ok=True)
            copy.write_text(
                json.dumps({"cells": [], "metadata": {MARK: {"digest": job.digest, "recorded": True}}})
            )
            record.write_text("{}")
            ran.append(job.topic)
            finished(Outcome(job=job, status="executed"))

    monkeypatch.setattr(sys.modules[run.__module__], "_execute_all", pretend)
    execute_all(repository)
    assert ran == ["alpha", "beta", "sum"]
    execute_all(repository)
    assert ran == ["alpha", "beta", "sum"]
    (repository / "numbers" / "gamma.json").write_text("{}")
    third, _ = execute_all(repository)
    assert [third[topic].status for topic in ("alpha", "beta", "sum")] == ["cached", "cached", "executed"]
    execute_all(repository, force=True)
    assert ran == ["alpha", "beta", "sum", "sum", "alpha", "beta", "sum"]


def test_failure_names_the_cell_and_leaves_the_notebook(repository, write_notebook):
    """A failing chapter says where and why, is readable up to there, and does not take the others along."""
    source = repository / "notebooks" / "02_beta.ipynb"
    write_notebook(source, "print('so far so good')", "half = 1 / 0", "print('never')")
    outcomes, shown = execute_all(repository)
    assert outcomes["alpha"].status == "executed"
    assert outcomes["beta"].status == "failed"
    assert outcomes["beta"].error == "cell 3 ('half = 1 / 0') raised ZeroDivisionError: division by zero"
    assert outcomes["beta"].error in shown
    partial = (repository / "chapters" / "02_beta.ipynb").read_text()
    assert "so far so good" in partial
    assert "ZeroDivisionError" in partial


def test_a_worker_that_dies_takes_no_other_notebook_with_it(repository, write_notebook):
    """A cell that kills its kernel, or the process executing it, fails its chapter at once and no other one."""
    source = repository / "notebooks" / "02_beta.ipynb"
    marker = "with open('lives', 'a') as f: f.write('x')"
    write_notebook(source, marker, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "1 + 1")
    died = execute_all(repository, topics=["beta"])[0]["beta"]
    assert "the kernel died in cell 3 ('import os, signal')" in died.error
    assert died.cell == 3
    assert "os.kill(os.getpid(), signal.SIGKILL)" in died.traceback
    assert (repository / "lives").read_text() == "x", "only starts are repeated"
    write_notebook(source, "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    outcomes, _ = execute_all(repository)
    assert {topic: outcome.status for topic, outcome in outcomes.items()} == {
        "alpha": "executed",
        "beta": "failed",
    }
    assert "BrokenProcessPool" in outcomes["beta"].error


def test_a_kernel_that_does_not_start_is_tried_again(repository, monkeypatch):
    """A port taken in between costs a try, not the chapter."""
    import papermill

    real, tries = papermill.execute_notebook, []

    def shaky(*arguments, **options):
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return real(*arguments, **options)

    monkeypatch.setattr(papermill, "execute_notebook", shaky)
    (job, *_) = plan(
        [repository / "notebooks" / "01_alpha.ipynb"],
        root=repository,
        out=Path("chapters"),
        records=Path("numbers"),
        parameters={},
        surroundings="",
    )
    assert execute(job).status == "executed"
    assert len(tries) == 3


def test_kernels_inherit_their_share(repository, write_notebook, monkeypatch):
    """A chapter sees its number of threads, works offline, and its kernel greets nobody."""
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    keep = "import os\nopen('seen', 'w').write(os.environ['OMP_NUM_THREADS'] + os.environ['HF_HUB_OFFLINE'])"
    write_notebook(repository / "notebooks" / "01_alpha.ipynb", keep)
    execute_all(repository, topics=["alpha"])
    assert (repository / "seen").read_text() == "11"
    assert stderr_of(repository / "chapters" / "01_alpha.ipynb") == ""
    assert "OMP_NUM_THREADS" not in os.environ
