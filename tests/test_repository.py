"""The house keeps its own rules."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "mooncake_lab").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "book").glob("*.md"))]
RUNNING = {"README.md", "intro.md", "run.md", "gpu.md", "teach.md", "cluster.md", "serve.md"}
REFERRING = (
    "mooncake_lab/book/figures/static/*.js",
    "benchmarks/**/*.py",
    "benchmarks/*.md",
    "notebooks/**/*.ipynb",
)
HARD_LIMIT_FUNCTION_LINES = 50


def targets() -> set[str]:
    """The targets that the Makefile documents."""
    return set(re.findall(r"^([a-z-]+):.*?## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_prose_exist(page):
    """Every `make x` that a page promises is a target; the pages about running it promise some."""
    text = page.read_text(encoding="utf-8")
    fenced = "\n".join(re.findall(r"^ *```.*?^ *```", text, re.MULTILINE | re.DOTALL))
    promised = set(re.findall(r"^\s*(?:\w*\$ )?make ([a-z][a-z-]+)", fenced, re.MULTILINE))
    promised |= set(re.findall(r"`make ([a-z][a-z-]+)", text))
    assert promised or page.name not in RUNNING
    assert promised <= targets()


def test_help_lists_every_target():
    """`make` alone explains itself, and does nothing else."""
    shown = subprocess.run(["make", "-s", "-C", str(ROOT)], check=True, capture_output=True, text=True).stdout
    for target in targets():
        assert f"make {target}" in shown


def test_every_class_has_its_own_name():
    """No two classes of the package share a name."""
    places: dict[str, list[str]] = {}
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_functions_fit_on_a_screen():
    """No function is longer than 50 lines."""
    long = [
        f"{path.name}::{node.name}"
        for path in PACKAGE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.body[0].lineno >= HARD_LIMIT_FUNCTION_LINES
    ]
    assert long == []


def test_tests_that_are_named_exist():
    """A file of tests that the package, a program or a page refers to is there."""
    named = [
        (path.relative_to(ROOT).as_posix(), test)
        for path in [*PACKAGE, *PAGES, *(path for glob in REFERRING for path in sorted(ROOT.glob(glob)))]
        for test in re.findall(r"\btests/[\w/]+\.py\b", path.read_text(encoding="utf-8"))
    ]
    assert named
    assert [each for each in named if not (ROOT / each[1]).is_file()] == []


def test_every_test_has_its_claim():
    """Each test function states in a docstring what it claims."""
    silent = [
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []
