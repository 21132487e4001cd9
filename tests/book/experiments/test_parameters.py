"""The parameters of a chapter are checked before it computes, whoever sets them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_lab.book.experiments import check_parameters
from mooncake_lab.book.rendering.notebook import read_notebook
from mooncake_lab.book.rendering.plan import parameter_defaults

ROOT = Path(__file__).parents[3]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCALES_ALLOWED = "one of smoke, classroom, full, gpu"
SEEDS_ALLOWED = "a whole number from 0 to 4294967295"
FOLDERS_ALLOWED = "a folder that exists or can be made, and that can be written to"
GOOD = {"scale": "smoke", "seed": 0, "out_dir": "out"}


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"seed": 2**32 - 1},
        {"scale": "gpu", "out_dir": Path("a/b/c")},
        {"trace": "arxiv"},
        {"trace": str(ROOT / "README.md"), "node": "nobody"},
    ],
)
def test_good_parameters_pass(tmp_path, monkeypatch, told):
    """Also a folder that is still to be made; nothing is made by the check."""
    monkeypatch.chdir(tmp_path)
    check_parameters(**(GOOD | told))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("told", "allowed"),
    [
        *(({"scale": wrong}, SCALES_ALLOWED) for wrong in ("smok", "Smoke", "", 1, None, [])),
        *(({"seed": wrong}, SEEDS_ALLOWED) for wrong in ("0", "abc", 1.0, -1, True, None, 2**32)),
        *(({"out_dir": wrong}, FOLDERS_ALLOWED) for wrong in ("", 5, None, "file", "file/in")),
        ({"out_dir": "/dev/null/here"}, FOLDERS_ALLOWED),
        ({"trace": "nobody"}, "neither a file nor a workload: conversation, synthetic, toolagent, arxiv"),
        *(({"trace": wrong}, "the path of a trace, or one of conversation") for wrong in (5, None)),
        *(({"node": wrong}, "the name of a node, such as a800-node") for wrong in (5, None)),
    ],
)  # fmt: skip
def test_wrong_parameters_are_refused_in_one_sentence(tmp_path, monkeypatch, told, allowed):
    """The sentence has the name, the value, and what is allowed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    ((name, value),) = told.items()
    with pytest.raises(ValueError, match=re.escape(allowed)) as found:
        check_parameters(**(GOOD | told))
    assert repr(value) in str(found.value)
    assert "\n" not in str(found.value)
    assert name in str(found.value) or name == "trace"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_each_chapter_checks_all_of_its_parameters_first(path):
    """The call stands in the first cell behind the parameters, before anything but imports."""
    notebook = read_notebook(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (at,) = [i for i, cell in enumerate(code) if "parameters" in cell.tags]
    first = next(
        each for each in ast.parse(code[at + 1].text).body if not isinstance(each, ast.Import | ast.ImportFrom)
    )
    call = ast.unparse(first)
    assert call.startswith("check_parameters(scale, seed, out_dir")
    assert {node.id for node in ast.walk(first) if isinstance(node, ast.Name)} - {"check_parameters"} == set(
        parameter_defaults(notebook)
    )


def test_plain_papermill_ends_in_the_sentence(tmp_path):
    """Without `mooncake-lab batch`, a mistyped scale is refused at the first cell."""
    source = ROOT / "notebooks" / "13_scorecard.ipynb"
    options = ["-p", "scale", "smok", "--cwd", str(tmp_path)]
    command = [sys.executable, "-m", "papermill", str(source), str(tmp_path / "done.ipynb"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ValueError: the parameter scale is 'smok'; allowed is one of smoke, classroom, full, gpu"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_what_plain_papermill_writes_is_ignored_by_git(path):
    """The folder of the numbers by default, in the repository or beside the notebook."""
    folder = parameter_defaults(read_notebook(path))["out_dir"]
    for place in (folder, f"notebooks/{folder}"):
        written = f"{place}/{path.stem.partition('_')[2]}.json"
        command = ["git", "-C", str(ROOT), "check-ignore", "--quiet", "--no-index", written]
        assert subprocess.run(command, check=False).returncode == 0
