"""Notebooks really executed, in processes of their own."""

import io
import json
import os
import sys
from pathlib import Path

from rich.console import Console

from mooncake_lab.batch import Outcome, plan, run
from mooncake_lab.batch.notebook import read_notebook
from mooncake_lab.batch.plan import MARK
from mooncake_lab.batch.run import execute


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
    assert shown.split() == ["alpha", "up", "to", "date", "beta", "up", "to", "date"]
    third, _ = execute_all(repository, scale="smoke", topics=["alpha"], watched=True)
    assert third["alpha"].status == "executed"
    assert (repository / "numbers" / "alpha.json").read_text() == '{"scale": "smoke", "seed": 0}'
    assert not hides_injected(repository)


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
