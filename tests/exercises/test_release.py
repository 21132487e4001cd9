"""What students get holds no solution and no hidden test."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from mooncake_lab.exercises.grading.release import MARKS, release

SOURCES = sorted((Path(__file__).parents[2] / "notebooks" / "assignments").glob("*.ipynb"))


def between(text: str, begin: str, end: str) -> list[str]:
    """The lines between two marks, stripped, that say something."""
    parts = [part.split(end)[0] for part in text.split(begin)[1:]]
    return [line.strip() for part in parts for line in part.splitlines() if len(line.strip()) > 20]


def code_of(path: Path) -> str:
    """All code of a notebook."""
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Every assignment as students get it, by topic."""
    folder = tmp_path_factory.mktemp("release")
    return {source.stem: release(source, folder) for source in SOURCES}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nothing_leaks(source, released):
    """No line of a solution or of a hidden test is in the student's version, and no mark."""
    whole, theirs = code_of(source), code_of(released[source.stem])
    secret = between(whole, MARKS[0], MARKS[1]) + between(whole, MARKS[2], MARKS[3])
    assert secret, "an assignment has a solution"
    assert [line for line in secret if line in theirs] == []
    assert not any(mark in theirs for mark in MARKS)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_tests_are_locked_and_solutions_are_open(source, released):
    """A student can write where the solution goes, and nowhere else that counts."""
    for cell in json.loads(released[source.stem].read_text())["cells"]:
        role = cell["metadata"].get("nbgrader")
        if role and role["solution"]:
            assert "raise NotImplementedError()" in "".join(cell["source"])
            assert cell["metadata"]["editable"] is True if "editable" in cell["metadata"] else True
        elif role:
            assert cell["metadata"]["editable"] is False
            assert role["checksum"]


def test_a_mark_without_its_end_is_refused(tmp_path):
    """A solution that does not end would leak, and is an error."""
    source = tmp_path / "broken.ipynb"
    text = SOURCES[0].read_text().replace(MARKS[1], "### END")
    source.write_text(text)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)(begin|end).*"):
        release(source, tmp_path / "out")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_sources_are_kept_without_outputs(source):
    """The repository holds sources."""
    cells = json.loads(source.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells)


def test_the_students_version_runs_from_top_to_bottom(released, tmp_path):
    """Its visible tests say what is missing, and none of them stops those behind it."""
    notebook = nbformat.read(released["keys"], as_version=4)
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    failed = [
        output.ename
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "error"
    ]
    assert len(failed) == 3
    assert set(failed) == {"NotImplementedError"}
