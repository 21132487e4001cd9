"""What a contributor reads first: commands that run, files that exist, and the order in which they are read."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
GUIDE = re.sub(
    r"^```.*?^```$", "", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
)
"""Without its block of commands, whose targets `test_repository` looks for."""
READ = re.findall(r"^\d+\. `(mooncake_lab/[\w/]+\.py)`", GUIDE, re.MULTILINE)
COMMANDS = re.findall(r"`(?:PYTHONPATH=(\S+) )?\.venv/bin/python (?:(-m) )?([^\s`]+)[^`]*`", GUIDE)
PACKAGES = sorted(path.parent.name for path in ROOT.glob("mooncake_lab/*/__init__.py"))
OF_THE_ROOT = {path.name for path in ROOT.iterdir()}


def test_paths_in_the_guide_exist():
    """Each path between backticks, and each file that a link leads to, is in the repository."""
    words = {word for code in re.findall(r"`([^`]+)`", GUIDE) for word in code.split()}
    paths = {word for word in words if "/" in word and word.partition("/")[0] in OF_THE_ROOT - {".venv"}}
    paths |= {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", GUIDE)}
    assert len(paths) > 30
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_ten_files_are_read_each_before_those_that_import_it():
    """There are ten, and none imports one that comes later."""
    assert len(READ) == 10
    modules = [path.removesuffix(".py").replace("/", ".") for path in READ]
    for place, path in enumerate(READ):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported & set(modules[place:]) == set(), path


@pytest.mark.parametrize(("where", "is_module", "program"), COMMANDS, ids=[program for *_, program in COMMANDS])
def test_programs_of_the_guide_start_as_they_stand(where, is_module, program):
    """Each program that the guide calls is found, and finds what it imports, from the root of the repository."""
    name = f"{program}.__main__" if is_module and (ROOT / program.replace(".", "/")).is_dir() else program
    run = f"import runpy; runpy.run_{'module' if is_module else 'path'}({name!r}, run_name='read')"
    if not is_module:
        run = f"import sys; sys.path[0] = {str((ROOT / program).parent)!r}; {run}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / where)] if where else [])}
    command = [sys.executable, "-c", run]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_quick_knows_every_package(package):
    """`make quick PKG=...` has tests to run for each package."""
    assert list((ROOT / "tests" / package).rglob("test_*.py"))


def test_quick_refuses_what_is_no_package():
    """A mistyped package costs one sentence that says what to type."""
    command = ["make", "-s", "quick", "PKG=conductr", f"BIN={Path(sys.executable).parent}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "PKG=conductr is no package with tests; say for example: make quick PKG=conductor" in ended.stderr


def test_the_public_workflow_calls_the_script_of_ci_on_every_supported_python():
    """It runs on pushes and pull requests, with the Pythons that pyproject.toml promises, and calls `.ci/run`."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads the key `on` as a truth
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    (pythons,) = (
        step["with"]["python-version"].split() for step in job["steps"] if "setup-python" in step.get("uses", "")
    )
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    least, below = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", promised).groups())
    assert sorted(pythons) == [f"3.{minor}" for minor in range(least, below)]


def test_the_changelog_begins_with_the_version_of_the_package():
    """Its newest entry is the version in pyproject.toml, and each entry says what changed."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    entries = re.findall(r"^## (\d+\.\d+\.\d+)\b.*\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    assert entries[0][0] == version
    for _, body in entries:
        assert re.findall(r"^### (\w+)$", body, re.MULTILINE)
        assert re.findall(r"^\* \S.+$", body, re.MULTILINE)
