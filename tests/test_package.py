"""`pip install .` gives a package that works with no checkout around it."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from bare_site import link_distributions
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
NEEDED = ("LICENSE", "README.md", "data", "mooncake_lab", "pyproject.toml")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder where a wheel of the project lies unpacked, built from a copy of what a checkout holds."""
    source = tmp_path_factory.mktemp("source")
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, cwd=source, capture_output=True)
    return target


def run(installed, tmp_path, code):
    """What Python prints for this code when the package is only where it was installed."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    return ran.stdout.strip()


def test_the_installed_package_is_the_one_that_runs(installed, tmp_path):
    """The tests below look at the installed copy, not at this checkout."""
    assert run(installed, tmp_path, "import mooncake_lab; print(mooncake_lab.__file__)").startswith(str(installed))


def test_it_carries_the_papers_numbers(installed, tmp_path):
    """Every claim and every curve can be read."""
    code = "from mooncake_lab.book.paper import claims, data_dir, curve; print(len(claims()), data_dir())"
    count, folder = run(installed, tmp_path, code).split(" ", 1)
    assert int(count) > 90
    assert folder.startswith(str(installed))


def test_it_is_typed(installed):
    """Type checkers of its users see its annotations."""
    assert (installed / "mooncake_lab" / "py.typed").is_file()


def test_its_data_is_the_checkouts(installed):
    """No file of the carried folders is left behind."""
    for folder in ("paper", "measured", "models"):
        kept = sorted(path.relative_to(ROOT / "data") for path in (ROOT / "data" / folder).rglob("*.*"))
        assert all((installed / "mooncake_lab" / "data" / path).is_file() for path in kept)


def test_it_simulates_beside_its_plain_requirements(installed, tmp_path):
    """With these alone, in an empty environment of less than 60 MB, a trace is replayed."""
    site = tmp_path / "site"
    site.mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    link_distributions(site, [Requirement(line).name for line in project["dependencies"]])
    line = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(line) + "\n")
    command = [
        sys.executable,
        "-S",
        "-m",
        "mooncake_lab",
        "simulate",
        "trace.jsonl",
        "--prefill-nodes=1",
        "--decode-nodes=1",
        "--json",
    ]
    environment = {"PYTHONPATH": f"{installed}{os.pathsep}{site}", "PATH": os.environ["PATH"]}
    ran = subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert json.loads(ran.stdout)["finished"] == 1
    places = [installed, *(link.resolve() for link in site.iterdir())]
    files = {file for place in places for file in (place.rglob("*") if place.is_dir() else [place])}
    assert sum(file.stat().st_size for file in files if file.is_file()) < 60e6
