"""Notebooks as Jupyter, its clients and students leave them: what is written is read, and damage costs little."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from IPython.core import inputtransformer2
from IPython.core.inputtransformer2 import TransformerManager
from submissions import SOURCES, hand_in, needs_confinement

from mooncake_lab.course.grading.cells import prepare
from mooncake_lab.course.grading.collect import collect
from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.grade import grade
from mooncake_lab.course.grading.jupyter_code import _transformed, is_python, without_magics
from mooncake_lab.course.grading.submitted import read_submission

TEACHER = SOURCES / "keys.ipynb"
PATIENT = Allowance(reply_s=60, wall_s=600)


def right():
    """The teacher's solution, as data."""
    return json.loads(TEACHER.read_text(encoding="utf-8"))


def named(notebook, name):
    """A cell of the assignment."""
    return next(c for c in notebook["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id") == name)


def written(folder, notebook, **how):
    """A notebook in a file."""
    path = folder / "keys.ipynb"
    path.write_text(json.dumps(notebook, **how), encoding="utf-8")
    return path


def solutions(path):
    """Text of the solution cells that are executed, by name."""
    handed = prepare(path, TEACHER)
    names = ("chain-keys", "matched-blocks", "lru-hit-rate")
    return {each.name: each.text for each in handed.code if each.name in names}, handed


WHOLE = {
    name: "".join(named(right(), name)["source"]) for name in ("chain-keys", "matched-blocks", "lru-hit-rate")
}


def with_outputs(outputs):
    notebook = right()
    named(notebook, "chain-keys")["outputs"] = outputs
    return notebook


def with_metadata(**changes):
    notebook = right()
    for cell in notebook["cells"]:
        cell["metadata"] |= changes
    return notebook


def without_ids():
    notebook = right()
    for cell in notebook["cells"]:
        cell.pop("id", None)
    return notebook


def as_format_3():
    """What `nbconvert --to notebook --nbformat 3` writes: worksheets, and `input` for the source of code."""
    cells = [
        {**{k: v for k, v in cell.items() if k != "source"}, "input": cell["source"]}
        if cell["cell_type"] == "code"
        else cell
        for cell in right()["cells"]
    ]
    return {"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": [{"cells": cells, "metadata": {}}]}


def with_sources(change):
    notebook = right()
    for cell in notebook["cells"]:
        cell["source"] = change("".join(cell["source"]))
    return notebook


READ = {
    "NaN": lambda: with_outputs([{"data": {"x": [float("nan"), float("inf"), -float("inf")]}}]),
    "half a pair": lambda: with_outputs([{"text": "\ud83d"}]),
    "outputs null": lambda: with_outputs(None),
    "outputs a text": lambda: with_outputs("gone"),
    "no ids": without_ids,
    "format 3": as_format_3,
    "sources as texts": lambda: with_sources(str),
    "sources as lines": lambda: with_sources(lambda text: text.splitlines(keepends=True)),
    "Windows": lambda: with_sources(lambda text: text.replace("\n", "\r\n")),
    "attachments": lambda: with_metadata(attachments={"x.png": {"image/png": "AAAA"}}),
    "odd metadata": lambda: with_metadata(tags=None, collapsed="no", papermill=[1]),
    "no format": lambda: {"cells": right()["cells"]},
}


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_what_jupyter_writes_is_read(tmp_path, kind, bom):
    """The solutions are those of the notebook, whatever stands in its outputs and metadata and before its text."""
    path = written(tmp_path, READ[kind]())
    path.write_text(bom + path.read_text(encoding="utf-8"), encoding="utf-8")
    found, handed = solutions(path)
    assert {name: text.replace("\r\n", "\n") for name, text in found.items()} == WHOLE
    assert not handed.lost


@pytest.mark.parametrize("nbgrader", [None, [], "x", {"grade_id": None}, {"grade_id": 3}, {"grade_id": ["x"]}])
def test_odd_roles_cost_their_cell_only(tmp_path, nbgrader):
    """Where nbgrader's metadata of a cell are of another type, the cell has no name, and others keep theirs."""
    notebook = right()
    named(notebook, "lru-hit-rate")["metadata"]["nbgrader"] = nbgrader
    found, handed = solutions(written(tmp_path, notebook))
    assert {*found} == {"chain-keys", "matched-blocks"}
    assert {*handed.lost} == {"lru-hit-rate"}
    assert any("def lru_hit_rate" in each.text for each in handed.code), "it is executed as an added cell"


def test_raw_surrogates_and_control_characters_are_read(tmp_path):
    """Halves of pairs, as bytes and in escapes, and tabs inside texts are read: code is text of UTF-8."""
    notebook = right()
    named(notebook, "chain-keys")["source"] = "# \ud83d and \ud83d\ude00\n" + WHOLE["chain-keys"]
    path = written(tmp_path, notebook)
    path.write_bytes(path.read_bytes().replace(b"\\ud83d and", b"\xed\xa0\xbd\t and"))
    found, _ = solutions(path)
    assert found["chain-keys"].encode().startswith("# \ufffd\t and 😀\n".encode())


def test_outputs_are_never_built(tmp_path):
    """Forty megabytes of output cost no more memory than their text, and such a file is graded."""
    path = written(tmp_path, with_outputs("HERE"))
    path.write_bytes(path.read_bytes().replace(b'"HERE"', b"[" + b"[]," * 13_000_000 + b"[]]"))
    (tmp_path / "ada").mkdir()
    path = path.rename(tmp_path / "ada" / "keys.ipynb")
    assert [each.path for each in collect(tmp_path, SOURCES).notebooks] == [path]
    import tracemalloc

    tracemalloc.start()
    found, _ = solutions(path)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == WHOLE
    assert most_bytes < 1.5 * path.stat().st_size


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        ("{}".encode("utf-16"), "is UTF-16 or UTF-32 text"),
        ("{}".encode("utf-16-le"), "is UTF-16 or UTF-32 text"),
        ("{}".encode("utf-32"), "is UTF-16 or UTF-32 text"),
        (b"{}", "has no cells"),
        (b'{"cells": null}', "has no cells"),
        (b"[1]", "has no cells"),
        (b"<<<<<<< HEAD\n{}", "is not a Jupyter notebook: Expecting value"),
        (b'{"cells": [}', "is not a Jupyter notebook: Expecting value"),
        (b'{"cells": ["\xff"]}', "is not a Jupyter notebook: 'utf-8' codec"),
        (b'{"cells": ' + b"[" * 100_000, "nested too deeply"),
        (b"PK\x03\x04", "is not a Jupyter notebook"),
    ],
)
def test_what_is_no_notebook_is_refused_in_a_sentence(tmp_path, raw, said):
    """The sentence has the file's name and what is wrong, and no folder."""
    path = tmp_path / "keys.ipynb"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=said) as refused:
        read_submission(path)
    assert str(refused.value).startswith("keys.ipynb ")
    assert str(tmp_path) not in str(refused.value)


@pytest.mark.parametrize(
    "cells", [[1, None, "x"], [{}], [{"cell_type": 3, "source": 4}], [{"source": [1, "x = 1"]}]]
)
def test_cells_may_be_anything(tmp_path, cells):
    """What is no cell is passed over; every solution is lost then, and nothing is raised."""
    handed = prepare(written(tmp_path, {"cells": cells}), TEACHER)
    assert {*handed.lost} == {*WHOLE}


def turned(kind):
    def change(notebook):
        cell = named(notebook, "lru-hit-rate")
        cell["cell_type"] = kind
        cell.pop("outputs")
        cell.pop("execution_count")

    return change


def deleted(notebook):
    notebook["cells"].remove(named(notebook, "lru-hit-rate"))


def emptied(notebook):
    named(notebook, "lru-hit-rate")["source"] = []


def older_release(notebook):
    named(notebook, "lru-hit-rate")["metadata"]["nbgrader"]["grade_id"] = "hit-rate-2024"


def retyped_in_an_added_cell(notebook):
    cell = named(notebook, "lru-hit-rate")
    cell["metadata"] = {}


def merged(notebook):
    first, second = (named(notebook, name) for name in ("matched-blocks", "lru-hit-rate"))
    first["source"] = "".join([*first["source"], "\n\n", *second["source"]])
    notebook["cells"].remove(second)


def merged_into_a_given_cell(notebook):
    first, second = (named(notebook, name) for name in ("setup", "lru-hit-rate"))
    first["source"] = "".join([*first["source"], "\n\n", *second["source"]])
    notebook["cells"].remove(second)


def split(notebook):
    cell = named(notebook, "lru-hit-rate")
    lines = cell["source"]
    place = notebook["cells"].index(cell)
    notebook["cells"][place : place + 1] = [{**cell, "source": lines[:5]}, {**cell, "source": lines[5:]}]


def moved_up(notebook):
    cell = named(notebook, "lru-hit-rate")
    notebook["cells"].remove(cell)
    notebook["cells"].insert(0, cell)


def setup_moved_down(notebook):
    cell = named(notebook, "setup")
    notebook["cells"].remove(cell)
    notebook["cells"].append(cell)


def metadata_stripped(notebook):
    for cell in notebook["cells"]:
        cell["metadata"] = {}


def old_try_as_notes(notebook):
    cell = named(notebook, "lru-hit-rate")
    notebook["cells"].append({**cell, "cell_type": "markdown", "source": "My *first* try (wrong)"})


DAMAGE = [
    (turned("markdown"), 10, "has become markdown; its text was taken as code"),
    (turned("raw"), 10, "has become raw; its text was taken as code"),
    (deleted, 8, "keys.ipynb has lost the cell 'lru-hit-rate', in which the solution belongs"),
    (emptied, 8, "keys.ipynb has lost the cell 'lru-hit-rate', in which the solution belongs"),
    (older_release, 10, "has lost the cell 'lru-hit-rate'"),
    (retyped_in_an_added_cell, 10, "has lost the cell 'lru-hit-rate'"),
    (merged, 10, "has lost the cell 'lru-hit-rate'"),
    (merged_into_a_given_cell, 10, "has lost the cell 'lru-hit-rate'"),
    (split, 10, "was found in 2 parts"),
    (moved_up, 10, ""),
    (setup_moved_down, 10, ""),
    (metadata_stripped, 10, "has lost the cell 'chain-keys'"),
    (old_try_as_notes, 10, ""),
]


@needs_confinement
@pytest.mark.parametrize(("damage", "points", "remark"), DAMAGE)
def test_a_damaged_cell_costs_its_own_tasks_at_most(tmp_path, damage, points, remark):
    """The tasks of intact cells are paid; where code of the damaged one is left, so is its own."""
    notebook = right()
    damage(notebook)
    found = grade(written(tmp_path, notebook), TEACHER, student="ada", seed=1, allowance=PATIENT)
    assert found.earned == points, found
    assert remark in " ".join(found.remarks)
    if points == 8:
        assert remark in found.marks[-1].said
        assert "defines no 'lru_hit_rate'" in found.marks[-1].said


CODE = "def chain_keys(t, n):\n    return 1"
IPYTHON = [
    (f"%%time\nx = (7\n%2)\n{CODE}", ["%%time"]),
    (f"%%time\n%%capture out\n{CODE}", ["%%time", "%%capture out"]),
    (f"files = !ls\n{CODE}", ["!ls"]),
    (f"t = %timeit -o 3 + 4\n{CODE}", ["%timeit -o 3 + 4"]),
    (f"%time x = 3\n{CODE}\nassert x == 3", ["%time"]),
    (f"x = %time 3\n{CODE}\nassert x == 3", ["%time"]),
    (f"?help\n{CODE}", ["help?"]),
    (f"print??\nlen?\n{CODE}", ["print??", "len?"]),
    (
        f"%config InlineBackend.figure_format = 'svg'\n%matplotlib inline\n{CODE}",
        ["%config ", "%matplotlib inline"],
    ),
    (f"!pip install \\\n  xxhash\n%pip install x\n!!ls\n{CODE}", ["!pip install", "%pip install x", "!ls"]),
    (f"if True:\n    %cd ..\n    !ls\nelse:\n    !pwd\n{CODE}", ["%cd ..", "!ls", "!pwd"]),
    (f'text = """\n%not a magic\n!nor a command\n"""\n%who\n{CODE}\nassert text.count("\\n") == 3', ["%who"]),
    (f"é = 'é'; \nx = !echo é\n{CODE}", ["!echo é"]),
    (f"s = 'a\u2028b\x85c'  # \x0c\n%matplotlib inline\n{CODE}\nassert len(s) == 5", ["%matplotlib inline"]),
    (f"# page 1\x0c\nx = %pwd\n{CODE}\nassert x is None", ["%pwd"]),
    (f"x = 1\n%pwd\n{CODE}\nassert x == 1".replace("\n", "\r"), ["%pwd"]),
    (f"%load_ext autoreload\n%autoreload 2\n{CODE}  # what?", ["%load_ext autoreload", "%autoreload 2"]),
    (f"display(3)\nget_ipython().run_line_magic('matplotlib', 'inline')\n{CODE}", []),
    (f"{CODE}\nx = (9\n% 2)", []),
]


@pytest.mark.parametrize(("text", "dropped"), IPYTHON)
def test_magics_are_dropped_with_a_remark_and_the_code_stays(tmp_path, text, dropped):
    """In a solution and in an added cell alike: what IPython would take for a magic goes, and nothing else."""
    notebook = right()
    named(notebook, "chain-keys")["source"] = text
    handed = prepare(written(tmp_path, notebook), TEACHER)
    names = {}
    for each in handed.code:
        exec(compile(each.text, each.name, "exec"), names)  # noqa: S102  # cells of this test
    assert names["chain_keys"](0, 0) == 1
    assert len(handed.remarks) == len(dropped)
    for remark, line in zip(handed.remarks, dropped, strict=True):
        assert remark.startswith(f"left out of cell 'chain-keys': {line}")
    named(notebook, "chain-keys")["metadata"] = {}
    added = prepare(written(tmp_path, notebook), TEACHER)
    assert any("def chain_keys" in each.text for each in added.code)
    for line in dropped:
        assert any(line in remark for remark in added.remarks)


def test_thousands_of_magics_are_no_python(monkeypatch):
    """IPython reads what follows an open bracket again for each magic: it gets no cell of very many."""
    monkeypatch.setattr("IPython.core.inputtransformer2.TransformerManager", lambda: pytest.fail("it was asked"))
    for text in ("%x\n" * 30_000, "x?\n" * 30_000, "x = !ls\n" * 10_000):
        assert without_magics(text) == (text, ())


LINES = """\
%matplotlib inline|!ls 'a|x = 1|x = %pwd|foo?|?foo|np.x??|/f 1|,f a||for i in range(3):|    %timeit x|    !echo a
    pass|# it's|@dec|def g():|    return 1|z = '''|%not|'''|x = [1,|% 2,|]|f(|)|x = !echo 'it|a = b \\|    % 3\
""".replace("\n", "|").split("|")
"""Lines of cells: magics of every kind, and what may hold text that looks like one."""


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=9).map("\n".join))
@example("y = !ls (\nx = 1\nz = %pwd")
@example("    !echo (\n    x = [1,\n    2]\n    %pwd")
@example("!pip install \\\n  numpy\nx = (1,\n% 2)\n%pwd")
def test_magics_are_those_that_ipython_finds(text):
    """Where IPython makes Python of a cell, reading it statement by statement makes the same."""
    try:
        whole = TransformerManager().transform_cell(text)
    except SyntaxError:
        return
    if is_python(whole):
        assert _transformed(text) == whole


def test_magics_cost_what_their_lines_do(monkeypatch):
    """Twice as many magics in a cell let IPython read at most twice as many lines."""
    read = []
    whole = inputtransformer2.make_tokens_by_line
    monkeypatch.setattr(
        inputtransformer2, "make_tokens_by_line", lambda lines: (read.append(len(lines)), whole(lines))[1]
    )
    counts = []
    for lines in (10, 20):
        read.clear()
        without_magics("%time x = 1\ny = !ls\n" * (lines // 2))
        counts.append(sum(read))
    assert 0 < counts[1] <= 2 * counts[0]


@pytest.mark.parametrize("magic", ["%%bash", "%%html", "%%writefile x.py", "%%javascript", "%%script false"])
def test_a_cell_of_another_language_is_left_out(tmp_path, magic):
    """It is named, and its text is not executed as Python."""
    notebook = right()
    notebook["cells"].append({"cell_type": "code", "metadata": {}, "source": f"{magic}\nSIZE = 3", "outputs": []})
    handed = prepare(written(tmp_path, notebook), TEACHER)
    assert not [each for each in handed.code if "SIZE" in each.text]
    (remark,) = handed.remarks
    assert f"{magic}, and what is below it" in remark


@needs_confinement
def test_a_cell_may_await(tmp_path):
    """What IPython awaits at the top of a cell is awaited in the grader, in solutions and in added cells."""
    awaits = (
        "import asyncio\nasync def four():\n    await asyncio.sleep(0.01)\n    return 4\n"
        "four_now = await four()\nassert [4] == [await x for x in [four()]]\nasync with asyncio.timeout(9): pass\n"
    )
    for name in ("chain-keys", ""):
        text = f"{WHOLE['chain-keys']}\n" if not name else f"{awaits}{WHOLE['chain-keys']}\nassert four_now == 4"
        folder = tmp_path / (name or "added")
        path = hand_in(
            folder, "keys", {"chain-keys": text.replace("start in range(", "start in range(four_now - 4 + ")}
        )
        if not name:
            notebook = json.loads(path.read_text(encoding="utf-8"))
            notebook["cells"].insert(
                0, {"cell_type": "code", "metadata": {}, "source": awaits, "outputs": [], "execution_count": None}
            )
            path = written(folder, notebook)
        found = grade(path, TEACHER, student="ada", seed=1, allowance=PATIENT)
        assert found.earned == 10, found
