"""The ways in agree: pyproject.toml, requirements.lock, environment.yml, and what is installed here."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement

from mooncake_lab.core.extras import CONTAINED
from mooncake_lab.core.extras import EXTRAS as MODULES

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, BUILD = PYPROJECT["project"], PYPROJECT["build-system"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [
    Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS.values(), BUILD["requires"]) for line in lines
]
LOCKED = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
LOCK = [line.split(" ; ")[0] for line in LOCKED]
CONDITIONAL = {line.split(" ; ")[0]: Marker(line.split(" ; ")[1]).evaluate() for line in LOCKED if " ; " in line}
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def python_of_conda() -> str:
    """The interpreter that environment.yml asks for."""
    (pin,) = (entry for entry in CONDA["dependencies"] if isinstance(entry, str) and entry.startswith("python="))
    return pin.removeprefix("python=")


def test_the_lock_is_within_the_ranges():
    """Every requirement in pyproject.toml has a lower bound and no pin, and its locked version satisfies it."""
    locked = dict(line.split("==") for line in LOCK)
    markers = {line.split("==")[0]: line.partition(" ; ")[2] for line in LOCKED}
    for requirement in DIRECT:
        if requirement.name == PROJECT["name"]:
            assert requirement.extras <= set(EXTRAS)
            continue
        operators = [each.operator for each in requirement.specifier]
        assert operators in ([">="], [">=", "<"], ["<", ">="]), requirement
        assert requirement.specifier.contains(locked[requirement.name]), requirement
        assert str(requirement.marker or "") == markers[requirement.name]


def test_the_extras_bring_the_modules_they_say():
    """What `mooncake_lab.core.extras` says of each extra is what pyproject.toml asks for in it."""
    of_module = importlib.metadata.packages_distributions()
    for extra, modules in MODULES.items():
        asked = {requirement.name for requirement in map(Requirement, EXTRAS[extra])}
        distributions = {of_module[module][0].lower().replace("_", "-") for module in modules}
        assert distributions <= asked, extra
        (contained,) = [
            each.extras for each in map(Requirement, EXTRAS[extra]) if each.name == PROJECT["name"]
        ] or [set()]
        assert contained == set(CONTAINED.get(extra, ())), extra


def test_every_import_is_asked_for():
    """The package imports the standard library, its requirements, and modules that come with one of these."""
    core = {"msgspec", "platformdirs", "rich", "simpy", "typer", "xxhash"}
    come_along = {
        "h11": "uvicorn",
        "llvmlite": "numba",
        "mooncake": "",
        "traitlets": "nbconvert",
        "triton": "torch",
    }
    allowed = core.union(*MODULES.values(), come_along, sys.stdlib_module_names, {"mooncake_lab"})
    assert core == {Requirement(line).name for line in PROJECT["dependencies"]}
    for path in (ROOT / "mooncake_lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            assert {name.partition(".")[0] for name in names} <= allowed, path


def test_lock_is_sorted_exact_and_for_every_platform():
    """The lock holds one version a line, without build labels such as +cpu."""
    assert sorted(LOCK, key=lambda line: line.split("==")[0]) == LOCK
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][^+\s;]*", line) for line in LOCK)
    assert len({line.split("==")[0] for line in LOCK}) == len(LOCK)


def test_conda_takes_its_pins_from_the_lock():
    """environment.yml names no version but Python's; pip installs the lock and then the package."""
    (pip,) = (entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict))
    assert pip == ["-r requirements.lock", "-e ."]
    assert [entry for entry in CONDA["dependencies"] if isinstance(entry, str)] == [
        f"python={python_of_conda()}",
        "pip",
    ]


def test_conda_python_is_allowed():
    """Conda's interpreter lies within requires-python and is the one that the tools check for."""
    least, below = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    assert int(least) <= int(python_of_conda().split(".")[1]) < int(below)
    assert python_of_conda() == f"3.{least}"


def test_installed_is_what_is_locked():
    """This environment holds the locked version (of whatever build) of all that has one for this platform."""
    wanted = dict(line.split("==") for line in LOCK if CONDITIONAL.get(line, True))
    assert {name: importlib.metadata.version(name).split("+")[0] for name in wanted} == wanted


def test_conda_can_solve_it():
    """Where conda is at hand, it accepts environment.yml."""
    conda = next((found for name in ("micromamba", "mamba", "conda") if (found := shutil.which(name))), None)
    if conda is None:
        pytest.skip("no conda, mamba or micromamba on PATH")
    command = [conda, "env", "create", "--dry-run", "--file", str(ROOT / "environment.yml")]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)


def test_a_changed_lock_fills_the_environment_again(tmp_path):
    """Its content decides and not its time: a pulled or copied lock may be older than the environment."""
    (tmp_path / ".ci").mkdir()
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".ci" / "environment").write_text('mkdir -p "$2" && echo filled >> filled\n')

    def filled():
        subprocess.run(["make", "env"], check=True, capture_output=True, cwd=tmp_path)
        return (tmp_path / "filled").read_text().count("filled")

    assert [filled(), filled()] == [1, 1]
    lock = tmp_path / "requirements.lock"
    lock.write_text("six==1.17.0\n")
    os.utime(lock, (0, 0))
    assert [filled(), filled()] == [2, 2]
