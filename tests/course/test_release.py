"""What students get holds no solution and no hidden test; it runs, and so does what it was made from."""

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from mooncake_lab.batching import BATCHING_POLICIES
from mooncake_lab.conductor import ADMISSION_POLICIES, PLACEMENT_POLICIES
from mooncake_lab.course.grading.collect import MARKS, release
from mooncake_lab.store.eviction import EVICTION_POLICIES

SOURCES = sorted((Path(__file__).parents[2] / "notebooks" / "assignments").glob("*.ipynb"))
TOPICS = [path.stem for path in SOURCES]

OURS = {
    type(made()).__name__
    for policies in (ADMISSION_POLICIES, BATCHING_POLICIES, PLACEMENT_POLICIES)
    for made in policies.values()
} | {type(made(8)).__name__ for made in EVICTION_POLICIES.values()}
"""The package's own policies: a student's notebook is not to show who has done the work already."""


def between(text: str, begin: str, end: str) -> list[str]:
    """The lines between two marks, stripped, that say something."""
    parts = [part.split(end)[0] for part in text.split(begin)[1:]]
    return [line.strip() for part in parts for line in part.splitlines() if len(line.strip()) > 20]


def code_of(path: Path) -> str:
    """All code of a notebook."""
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])


def code_cells_of(path: Path) -> str:
    """The code cells of a notebook as one module."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def executed(path: Path, folder: Path):
    """The cells of a notebook after a run from top to bottom; raises where a cell raises that may not."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()
    return notebook.cells


def is_graded(cell) -> bool:
    """Whether a cell is a test that gives points."""
    return cell.metadata.get("nbgrader", {}).get("grade", False)


def failures(cell) -> list[str]:
    """The errors that a cell shows, by class."""
    return [output.ename for output in cell.get("outputs", ()) if output.output_type == "error"]


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
def test_no_cell_names_one_of_our_policies(source, released):
    """The cells a student gets neither import nor call a policy of the package: that would be the solution."""
    nodes = list(ast.walk(ast.parse(code_cells_of(released[source.stem]))))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names & OURS == set()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_instructors_version_passes_its_own_tests(source, tmp_path):
    """Every cell runs, hidden tests included, and none writes a warning."""
    text = source.read_text(encoding="utf-8")
    assert MARKS[2] in text, "an assignment has hidden tests"
    cells = executed(source, tmp_path)
    assert all(cell.execution_count for cell in cells if cell.cell_type == "code")
    assert [o.text for cell in cells for o in cell.get("outputs", ()) if o.get("name") == "stderr"] == []


@pytest.mark.parametrize("topic", [pytest.param(t, marks=() if t == "keys" else pytest.mark.slow) for t in TOPICS])
def test_the_students_version_runs_from_top_to_bottom(topic, released, tmp_path):
    """Each visible test says that something is missing, no other cell fails, and none stops those behind it."""
    cells = executed(released[topic], tmp_path)
    assert all(cell.execution_count for cell in cells if cell.cell_type == "code")
    for cell in cells:
        assert len(failures(cell)) == is_graded(cell), cell.source
        said = "".join(output.get("text", "") for output in cell.get("outputs", ()))
        assert not is_graded(cell) or "NotImplementedError" in [*failures(cell), *re.findall(r"\w+", said)]
    assert any(map(is_graded, cells))
