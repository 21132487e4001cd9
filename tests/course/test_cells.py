"""Notebooks as students write them are executed as they were meant, and what is left out or taken is named."""

import json

import pytest
from submissions import SOURCES

from mooncake_lab.course.grading.cells import prepare, without_magics

TOPICS = sorted(path.stem for path in SOURCES.glob("*.ipynb"))
ROLE = {"nbgrader": {"grade": False, "solution": True, "locked": False, "schema_version": 3}}


def cell(text, name=""):
    """A code cell; with a name a solution of the assignment, without one added by the student."""
    metadata = {"nbgrader": {**ROLE["nbgrader"], "grade_id": name}} if name else {}
    return {"cell_type": "code", "source": text, "metadata": metadata, "outputs": [], "execution_count": None}


def prepared(folder, *cells):
    """A submission to `keys` with these cells for its first solution, made ready."""
    notebook = json.loads((SOURCES / "keys.ipynb").read_text(encoding="utf-8"))
    place = next(i for i, each in enumerate(notebook["cells"]) if "chain-keys" in str(each["metadata"]))
    notebook["cells"][place : place + 1] = cells
    path = folder / "keys.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return prepare(path, SOURCES / "keys.ipynb")


def names_of(handed):
    """What the cells define, executed one after the other."""
    names = {}
    for each in handed.code:
        exec(compile(each.text, each.name, "exec"), names)  # noqa: S102  # cells of this test
    return names


@pytest.mark.parametrize("topic", TOPICS)
def test_the_teachers_notebook_needs_nothing(topic):
    """Nothing of it is left out or joined, and its tests are not run."""
    handed = prepare(SOURCES / f"{topic}.ipynb", SOURCES / f"{topic}.ipynb")
    assert handed.remarks == ()
    assert not any("HIDDEN TESTS" in each.text for each in handed.code)


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        ("%%time\ndef chain_keys(t, n):\n    return 1", ("%%time",)),
        ("!pip install xxhash\ndef chain_keys(t, n):\n    return 1", ("!pip install xxhash",)),
        ("def chain_keys(t, n):\n    %timeit 3\n    return 1\nchain_keys?", ("%timeit 3", "chain_keys?")),
        ("def chain_keys(t, n):\n    return (7\n% 2)", ()),
    ],
)
def test_what_only_jupyter_understands_is_left_out_and_named(tmp_path, text, dropped):
    """Magics and shell lines go, the rest stays; an operator at the start of a line is no magic."""
    handed = prepared(tmp_path, cell(text, "chain-keys"))
    assert names_of(handed)["chain_keys"](0, 0) == 1
    assert handed.remarks == tuple(f"left out of cell 'chain-keys': {line}" for line in dropped)
    assert without_magics(text)[1] == dropped


HALVES = ("def chain_keys(t, n):\n    x = 1", "    return x")


def test_a_split_cell_is_joined(tmp_path):
    """Jupyter gives both halves the name of the cell; the solution is what it was before."""
    handed = prepared(tmp_path, *(cell(text, "chain-keys") for text in HALVES))
    assert names_of(handed)["chain_keys"](0, 0) == 1
    assert any("joined" in each for each in handed.remarks)


def test_a_syntax_error_costs_its_own_cell(tmp_path):
    """An added cell that is no Python is named; the others are executed."""
    handed = prepared(tmp_path, cell("def chain_keys(t, n):\n    return 1", "chain-keys"), cell("x = = 1"))
    assert names_of(handed)["chain_keys"](0, 0) == 1
    assert [each for each in handed.remarks if "is not Python" in each]


def test_code_is_bounded_before_it_is_parsed(tmp_path, monkeypatch):
    """Megabytes of code would be gigabytes of syntax tree in the grader: such a notebook is refused unparsed."""
    monkeypatch.setattr("ast.parse", lambda *_: pytest.fail("it was parsed"))
    long = "x = [" + "0," * 60_000 + "0]"
    with pytest.raises(ValueError, match="letters of code; allowed are 100,000"):
        prepared(tmp_path, cell("def chain_keys(t, n): ...", "chain-keys"), cell(long))


def test_of_added_cells_the_definitions_are_kept(tmp_path):
    """Helper functions, imports and constants are executed; experiments are not."""
    added = (
        "import math\nSIZE = 4\nheld = dict(a=1)\n"
        "def helper():\n    return SIZE\n"
        "for _ in iter(int, 1): pass\nx = sum(iter(int, 1))"
    )
    handed = prepared(tmp_path, cell(added), cell("def chain_keys(t, n):\n    return helper()", "chain-keys"))
    names = names_of(handed)
    assert names["chain_keys"](0, 0) == 4
    assert {"math", "held"} < names.keys()
    assert "x" not in names
