"""A rented GPU machine has PyTorch, Triton and transformers, and no network: the GPU tests are collected there."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bare_site import link_distributions

ROOT = Path(__file__).parents[1]
THERE = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "numba",
    "scipy",
    "xxhash",
    "safetensors",
    "hypothesis",
    "pytest",
)
"""Distributions of such a machine; theirs are there, too."""
BROUGHT = ("msgspec",)
"""A small wheel that has to be brought there."""
STUB = '''
"""As much of Triton as importing the kernels takes."""
from . import language

def jit(function=None, **options):
    return function or (lambda function: function)
'''
COLLECT = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True  # else files for devices are left out before they import anything
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def bare_site(tmp_path_factory):
    """A folder of what such a machine has, as links, and a stub of Triton."""
    site = tmp_path_factory.mktemp("site")
    link_distributions(site, THERE + BROUGHT)
    if not (site / "triton").exists():
        (site / "triton").mkdir()
        (site / "triton" / "__init__.py").write_text(STUB)
        (site / "triton" / "language.py").write_text("constexpr = int\n")
    return site


@pytest.fixture(scope="module")
def collect(bare_site):
    """Runs pytest's collection with nothing but these modules; what it printed, and its exit code."""

    def run(*arguments):
        path = [ROOT, bare_site]
        done = subprocess.run(
            [sys.executable, "-S", "-c", COLLECT, "--collect-only", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_gpu_tests_are_collected_on_a_bare_machine(collect):
    """Every test function of `tests/gpu` is found there, and nothing that it imports is missing."""
    code, printed = collect("tests/gpu")
    assert code == 0, printed[-3000:]
    written = {
        node.name
        for path in (ROOT / "tests" / "gpu").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert set(re.findall(r"::(test_\w+)", printed)) == written


def test_a_missing_module_is_noticed(collect):
    """The check finds what it is for: tests of the simulator, which import simpy, cannot be collected there."""
    code, printed = collect("tests/simulation/test_pipeline.py")
    assert code != 0
    assert "No module named 'simpy'" in printed


def test_tests_that_need_a_device_lie_in_one_folder():
    """The mark `gpu` stands in `tests/gpu` only, and the page about GPUs names that folder."""
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"pytest\.mark\.gpu\b", path.read_text(encoding="utf-8")) and path != Path(__file__)
    ]
    assert marked
    assert all(path.startswith("tests/gpu/") for path in marked), marked
    commands = re.findall(r"^.*-m pytest.*$", (ROOT / "book" / "gpu.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 1
    assert "tests/gpu" in commands[0]
    assert all(name in (ROOT / "book" / "gpu.md").read_text(encoding="utf-8") for name in BROUGHT)


def test_what_python_deprecates_in_triton_fails_no_test():
    """Triton's compiler may use what a newer Python deprecates; where this project does, its test fails."""

    def warn(module):
        exec("import warnings; warnings.warn('old', DeprecationWarning)", {"__name__": module})  # noqa: S102

    warn("triton.compiler.code_generator")
    with pytest.raises(DeprecationWarning):
        warn("mooncake_lab.engine.backends.triton_kernels")
