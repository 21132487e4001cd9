"""The student's version of an assignment: nbgrader's own steps, without its gradebook."""

from pathlib import Path
from typing import Any, Final

MARKS: Final = ("### BEGIN SOLUTION", "### END SOLUTION", "### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")
"""Between these lie what a student must not see."""


def release(source: Path, folder: Path) -> Path:
    """Write an assignment without solutions and hidden tests, its other cells locked; the path of the copy.

    Args:
        source: the instructor's notebook.
        folder: where the copy goes, under the same name.

    Raises:
        ValueError: when a mark is left over, so that something would leak, or nbgrader's metadata are wrong.
    """
    import nbformat
    from nbgrader.preprocessors import (
        CheckCellMetadata,
        ClearHiddenTests,
        ClearOutput,
        ClearSolutions,
        ComputeChecksums,
        LockCells,
    )

    steps = (LockCells, ClearSolutions, ClearOutput, CheckCellMetadata, ClearHiddenTests, ComputeChecksums)
    notebook: Any = nbformat.read(source, as_version=4)
    resources: Any = {"nbgrader": {"assignment": source.stem, "notebook": source.stem, "student": "."}}
    for step in steps:
        notebook, resources = step().preprocess(notebook, resources)
    for cell in notebook.cells:  # a test of what is still missing must not stop the cells behind it
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "raises-exception"]
    text = nbformat.writes(notebook) + "\n"
    left = [mark for mark in MARKS if mark in text]
    if left:
        raise ValueError(f"{source}: {left[0]!r} is left over; every BEGIN needs its END in the same cell")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / source.name
    path.write_text(text, encoding="utf-8")
    return path
