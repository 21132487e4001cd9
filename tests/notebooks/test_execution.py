"""Every chapter runs at the smallest scale, the way the book runs it.

Those that take more than a few seconds of it are slow tests; `make book` executes all of them, and tests/site
looks at what came out.
"""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from mooncake_lab.book.rendering import plan, run
from mooncake_lab.book.rendering.notebook import read_notebook

ROOT = Path(__file__).parents[2]


QUICK = {"13_scorecard"}


def pytest_generate_tests(metafunc):
    """One test a chapter, the long ones marked."""
    chapters = sorted((ROOT / "notebooks").glob("*.ipynb"))
    marked = [pytest.param(c, id=c.stem, marks=() if c.stem in QUICK else pytest.mark.slow) for c in chapters]
    metafunc.parametrize("any_chapter", marked)


def test_chapter_runs_at_smoke_scale(any_chapter, root, tmp_path):
    """It finishes, records its numbers, and writes nothing on stderr."""
    (job,) = plan(
        [any_chapter],
        root=root,
        out=tmp_path / "chapters",
        records=tmp_path / "numbers",
        parameters={"scale": "smoke", "seed": 0},
        surroundings="a test",
    )
    (outcome,) = run([job], workers=1, threads=1, console=Console(file=io.StringIO()))
    assert outcome.error is None
    numbers = json.loads(Path(job.record).read_text(encoding="utf-8"))
    assert numbers["numbers"]
    outputs = [output for cell in read_notebook(outcome.job.output).cells for output in cell.outputs]
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
