"""The tests that need no torch, under each Python that the package promises to run on.

    python tests/helpers/pythons.py [3.12 ...] [--require] [-- PYTEST ARGUMENTS]    (make test-pythons)

An interpreter of each version is looked for on PATH, among pyenv's and among uv's. One counts if it starts, has
the modules that the tests need, and is of that version: a shim of pyenv exists for versions that are not selected.
A version without an interpreter is named; with `--require` that is a failure.

Each version gets an environment in `build/pythons`, of the releases in requirements.lock and without torch. It is
made again when the lock, the interpreter or the list of libraries changes.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "pythons"

LIBRARIES = (
    "hypothesis", "libcachesim", "matplotlib", "msgspec", "numba", "numpy", "pandas", "platformdirs",
    "pytest", "pytest-xdist", "pyyaml", "rich", "seaborn", "simpy", "typer", "xxhash",
)  # fmt: skip
"""What the tests import; what these need in turn has the lock's version too."""

TESTS = (
    "tests/core", "tests/perf", "tests/workload", "tests/store", "tests/batching", "tests/conductor",
    "tests/cluster", "tests/simulation", "tests/metrics", "tests/book/paper", "tests/book/testbeds",
    "tests/contract", "tests/properties", "tests/book/playground", "tests/calibrate", "tests/cli/test_simulate.py",
    "tests/cli/test_trace.py", "tests/cli/test_cache.py",
)  # fmt: skip
"""The tests of packages that compute results without torch."""
LEFT_OUT = {
    "tests/book/testbeds/test_sarathi_serve.py": "compares with tables of chapter 6, which imports the engine",
    "tests/contract/test_executors.py": "compares runtimes, one of which is the live cluster",
    "tests/book/paper/test_pages.py": "asks `mooncake-lab doctor` for the device of torch",
}
"""Files below those that need torch, and why."""

PROBE = "import ctypes, lzma, ssl, sys, zlib; print('%d.%d' % sys.version_info[:2], sys.implementation.name)"


def promised(project: Path = ROOT / "pyproject.toml") -> list[str]:
    """The versions that `requires-python` allows, such as 3.11."""
    allowed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["requires-python"]
    least, below = map(int, re.fullmatch(r">=3\.(\d+),<3\.(\d+)", allowed).groups())
    return [f"3.{minor}" for minor in range(least, below)]


def find(version: str) -> str | None:
    """The first interpreter of this version that works."""
    return next((path for path in candidates(version) if works(path, version)), None)


def candidates(version: str) -> Iterator[str]:
    """Every place where an interpreter of this version may be, the most likely first."""
    for name in (f"python{version}", "python3", "python"):
        for folder in os.get_exec_path():
            if path := shutil.which(name, path=folder):
                yield path
    root = Path(os.environ.get("PYENV_ROOT") or _printed("pyenv", "root") or Path.home() / ".pyenv")
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/python{version}"), key=_newest))
    if found := _printed(_uv(), "python", "find", "--no-python-downloads", version):
        yield found


def works(path: str, version: str) -> bool:
    """Whether an interpreter starts, is of this version, and has the modules that the tests need."""
    return _printed(path, "-I", "-c", PROBE) == f"{version} cpython"


def _newest(path: Path) -> list[int]:
    return [-int(number) for number in re.findall(r"\d+", path.parents[1].name)]


def _printed(*command: str) -> str | None:
    """What a command prints; None where there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else "uv"


def key(interpreter: str, lock: str) -> str:
    """What an environment is made of, as a digest."""
    return hashlib.sha256("\n".join([interpreter, *LIBRARIES, lock]).encode()).hexdigest()


def environment(version: str, interpreter: str) -> Path:
    """The interpreter of an environment with the libraries, which is made where there is none like it.

    Raises:
        subprocess.CalledProcessError: when uv cannot make it.
    """
    lock, folder = ROOT / "requirements.lock", ENVIRONMENTS / version
    ready, python, made_of = folder / "ready", folder / "bin" / "python", key(interpreter, lock.read_text())
    if ready.is_file() and ready.read_text() == made_of:
        return python
    links = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if os.environ.get("PIP_FIND_LINKS") else {}
    for step in (
        ["venv", "--quiet", "--clear", "--python", interpreter, str(folder)],
        ["pip", "install", "--quiet", "--python", str(python), "--constraint", str(lock), *LIBRARIES],
    ):
        subprocess.run([_uv(), *step], check=True, env=links | os.environ)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "mooncake_lab.pth").write_text(f"{ROOT}\n")
    ready.write_text(made_of)
    return python


def run_tests(python: Path, arguments: Iterable[str]) -> bool:
    """Run the tests under an interpreter; whether all passed."""
    ignored = [f"--ignore={path}" for path in LEFT_OUT]
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow and not gpu and not site", *ignored, *arguments]
    return subprocess.run([*command, *TESTS], cwd=ROOT, check=False).returncode == 0


def main(versions: list[str], arguments: list[str], *, required: bool) -> int:
    """Run the tests under each version; the exit status."""
    results = {}
    for version in versions:
        interpreter = find(version)
        if interpreter is None:
            results[version] = "not installed: neither on PATH nor among the versions of pyenv and uv"
            continue
        print(f"\n== Python {version} ({interpreter})", flush=True)  # noqa: T201
        try:
            passed = run_tests(environment(version, interpreter), arguments)
        except (OSError, subprocess.CalledProcessError) as error:
            results[version] = f"failed: no environment could be made ({error})"
        else:
            results[version] = "passed" if passed else "failed"
    print()  # noqa: T201
    for version, result in results.items():
        print(f"Python {version}: {result}")  # noqa: T201
    bad = ("failed", "not installed") if required else ("failed",)
    return int(any(result.startswith(bad) for result in results.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="such as 3.12; by default each that pyproject.toml promises")
    parser.add_argument("--require", action="store_true", help="fail where a version is not installed")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    said = parser.parse_args(sys.argv[1:split])
    sys.exit(main(said.versions or promised(), sys.argv[split + 1 :], required=said.require))
