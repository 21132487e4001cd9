"""Every chapter runs at the smallest scale, the way the book runs it."""

import io
import json
from pathlib import Path

from rich.console import Console

from mooncake_lab.batch import plan, run
from mooncake_lab.batch.display import Display
from mooncake_lab.batch.notebook import read_notebook


def test_chapter_runs_at_smoke_scale(chapter, root, tmp_path):
    """It finishes, records its numbers, and writes nothing on stderr."""
    (job,) = plan(
        [chapter],
        root=root,
        out=tmp_path / "chapters",
        records=tmp_path / "numbers",
        parameters={"scale": "smoke", "seed": 0},
        surroundings="a test",
    )
    (outcome,) = run([job], workers=1, threads=1, display=Display(Console(file=io.StringIO())))
    assert outcome.error is None
    numbers = json.loads(Path(job.record).read_text(encoding="utf-8"))
    assert numbers["numbers"]
    outputs = [output for cell in read_notebook(outcome.notebook).cells for output in cell.outputs]
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
