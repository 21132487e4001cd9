"""The interpreters that `make test-pythons` finds, the environments that it makes, and the tests that it runs."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import pythons

ROOT = Path(__file__).parents[1]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def put(path, answer, status=0):
    """An executable that prints something and ends with this status."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{answer}\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """An empty folder on PATH, and neither pyenv's nor uv's interpreters."""
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    monkeypatch.setattr(pythons, "_uv", lambda: "uv")
    return tmp_path


def test_an_interpreter_on_the_path_is_found(places):
    """It is found under its own name, and as python3 where that is the version."""
    plain = put(places / "bin" / "python3", "echo 3.12 cpython")
    assert pythons.find("3.12") == plain
    named = put(places / "bin" / "python3.12", "echo 3.12 cpython")
    assert pythons.find("3.12") == named
    assert pythons.find("3.13") is None


def test_an_interpreter_that_does_not_work_is_passed_over(places, monkeypatch):
    """A shim for a version that is not selected, another version, another Python, and one that lacks modules."""
    second = places / "second"
    monkeypatch.setenv("PATH", f"{places / 'bin'}:{second}")
    for answer, status in (
        ("echo 'pyenv: python3.12: command not found' >&2", 127),
        ("echo 3.10 cpython", 0),
        ("echo 3.12 pypy", 0),
        ("echo No module named _ssl >&2", 1),
    ):
        put(places / "bin" / "python3.12", answer, status)
        assert pythons.find("3.12") is None
    later = put(second / "python3.12", "echo 3.12 cpython")
    assert pythons.find("3.12") == later


@pytest.mark.parametrize("told_by", ["home", "variable", "command"])
def test_the_newest_of_the_versions_of_pyenv_is_found(places, monkeypatch, told_by):
    """They lie in the home folder, PYENV_ROOT or where `pyenv root` says; 3.12.10 is newer than 3.12.9."""
    root = places / (".pyenv" if told_by == "home" else "elsewhere")
    put(places / "bin" / "python3.12", "echo 'version 3.12 is not selected' >&2", 127)
    if told_by == "variable":
        monkeypatch.setenv("PYENV_ROOT", str(root))
    elif told_by == "command":
        put(places / "bin" / "pyenv", f"echo {root}")
    for patch in (9, 10, 2):
        newest = root / "versions" / "3.12.10" / "bin" / "python3.12"
        put(root / "versions" / f"3.12.{patch}" / "bin" / "python3.12", "echo 3.12 cpython")
    assert pythons.find("3.12") == str(newest)


def test_an_interpreter_of_uv_is_found(places):
    """Where neither PATH nor pyenv has one, uv is asked, and must not download one."""
    managed = put(places / "uv" / "python3.13", "echo 3.13 cpython")
    put(places / "bin" / "uv", f'[ "$*" = "python find --no-python-downloads 3.13" ] || exit 2\necho {managed}')
    assert pythons.find("3.13") == managed
    assert pythons.find("3.12") is None


def test_this_interpreter_works():
    """The probe holds for a real interpreter, for its own version only."""
    assert pythons.works(sys.executable, HERE)
    assert not pythons.works(sys.executable, "3.10")
    assert not pythons.works("/nonexistent", HERE)


def test_a_missing_version_is_named(monkeypatch, capsys):
    """It is a line of the summary; the exit status is 1 only if it is required, or if tests of another fail."""
    monkeypatch.setattr(pythons, "find", lambda version: None if version == "3.13" else f"/bin/{version}")
    monkeypatch.setattr(pythons, "environment", lambda _version, path: Path(path))
    monkeypatch.setattr(pythons, "run_tests", lambda python, _: python.name != "3.11")
    assert pythons.main(["3.12", "3.13"], [], required=False) == 0
    shown = capsys.readouterr().out
    assert "Python 3.12: passed\nPython 3.13: not installed" in shown
    assert pythons.main(["3.12", "3.13"], [], required=True) == 1
    assert pythons.main(["3.12", "3.11"], [], required=False) == 1
    assert "Python 3.11: failed" in capsys.readouterr().out


def test_an_environment_is_kept_until_the_lock_changes(tmp_path, monkeypatch):
    """A new one takes two calls of uv, the same again takes none, and a change of the lock takes two."""
    monkeypatch.setattr(pythons, "ROOT", tmp_path)
    monkeypatch.setattr(pythons, "ENVIRONMENTS", tmp_path / "build")
    calls, lock = [], tmp_path / "requirements.lock"

    def run(command, **_):
        calls.append(command[1])
        (tmp_path / "build" / "3.12" / "lib" / "python3.12" / "site-packages").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(pythons.subprocess, "run", run)
    for text, expected in (("a==1", 2), ("a==1", 2), ("a==2", 4)):
        lock.write_text(text)
        python = pythons.environment("3.12", "/usr/bin/python3.12")
        assert (python, len(calls)) == (tmp_path / "build" / "3.12" / "bin" / "python", expected)


def test_the_versions_are_those_that_the_readme_promises():
    """They come from `requires-python`; the README and the classifiers say the same."""
    assert pythons.promised() == ["3.11", "3.12", "3.13"]
    assert "3.11, 3.12 or 3.13" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_libraries_are_locked_and_without_torch():
    """Each library has a version in the lock; torch, transformers and the book are not among them."""
    locked = {line.split("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert set(pythons.LIBRARIES) <= locked
    assert not set(pythons.LIBRARIES) & {"torch", "transformers", "jupyter-book", "safetensors"}


def test_every_package_without_torch_is_covered():
    """A package that must not import torch has its tests in the list, or is named here with a reason."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        each for each in project["tool"]["importlinter"]["contracts"] if each["name"].startswith("torch and")
    )
    packages = {name.removeprefix("mooncake_lab.") for name in contract["source_modules"]}
    asked = {path.removeprefix("tests/").replace("/", ".") for path in pythons.TESTS}
    asked |= {name.partition(".")[0] for name in asked}
    many_libraries = {"book.figures", "course", "book.rendering"}  # what draws, grades and renders needs them
    over_sockets = {"net"}  # tested where it is used, in the store
    assert packages - asked == many_libraries | over_sockets
    assert all((ROOT / path).exists() for path in (*pythons.TESTS, *pythons.LEFT_OUT))


def test_no_test_in_the_list_imports_torch():
    """None of the files imports torch or transformers, but for tests that are skipped without a GPU."""
    found = set()
    for listed in pythons.TESTS:
        path = ROOT / listed
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if any(re.match(r"(torch|transformers)\b", name) for name in names):
                    found.add(file.relative_to(ROOT).as_posix())
    assert found == set()
