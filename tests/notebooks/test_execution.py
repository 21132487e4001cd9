"""Every chapter runs at the smallest scale, the way the book runs it."""

import json
from pathlib import Path

from mooncake_lab.batch import plan
from mooncake_lab.batch.execute import execute
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
    outcome = execute(job)
    assert outcome.error is None
    numbers = json.loads(Path(job.record).read_text(encoding="utf-8"))
    assert numbers["numbers"]
    outputs = [output for cell in read_notebook(outcome.notebook).cells for output in cell.outputs]
    assert [output["text"] for output in outputs if output.get("name") == "stderr"] == []
