"""`mooncake-lab doctor`: what this machine can run, and how to install the rest."""

import ctypes.util
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final, Literal

import msgspec
import typer

from mooncake_lab.cli.options import Json
from mooncake_lab.core import GIB, carried_folder
from mooncake_lab.workload import RELEASES, find_trace, search_folders

EXTRAS: Final = {
    "stats": ("numpy", "pandas"),
    "figures": ("matplotlib", "seaborn"),
    "engine": ("torch", "transformers", "numba", "safetensors"),
    "book": ("jupyter-book", "papermill"),
    "serve": ("starlette", "uvicorn", "prometheus-client"),
    "cluster": ("dask", "distributed"),
    "classroom": ("ipython", "nbgrader"),
    "mooncake": ("mooncake-transfer-engine-non-cuda",),
}
"""The extras of the package, and the distributions that tell whether one is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    `standing` is `ready`, `missing` (it is needed by every user and not installed) or `optional` (it is not
    installed, and only a part of the book or of the package needs it).
    """

    what: str
    standing: Literal["ready", "missing", "optional"]
    found: str
    remedy: str = ""
    """How to install it; empty when it is ready."""


def _finding(what: str, found: object, remedy: str, *, ready: bool | None = None, needed: bool = False) -> Finding:
    """A finding; unless said otherwise it is ready if something was found."""
    if found if ready is None else ready:
        return Finding(what=what, standing="ready", found=str(found))
    return Finding(
        what=what, standing="missing" if needed else "optional", found=str(found or "none"), remedy=remedy
    )


def find_browser() -> str | None:
    """The path of a browser on this machine, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _machine() -> Iterator[Finding]:
    yield _finding(
        "Python",
        platform.python_version(),
        "use Python 3.11, 3.12 or 3.13",
        ready=(3, 11) <= sys.version_info < (3, 14),
        needed=True,
    )
    cores = os.cpu_count() or 1
    yield _finding("CPU cores", cores, "the stated run times of the chapters are for two cores", ready=cores >= 2)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    yield _finding(
        "memory",
        f"{memory_gib:.1f} GiB",
        "below 8 GiB run `mooncake-lab batch --jobs 1`, one chapter at a time, before `make book`",
        ready=memory_gib >= 8,
    )
    yield _finding(
        "C compiler",
        shutil.which("cc"),
        "apt-get install gcc; only Triton on a GPU and benchmarks/engine.py need a compiler",
    )


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ModuleNotFoundError:
        yield _finding(
            "PyTorch", None, "pip install 'mooncake-lab[engine]'; only models and their servers need it"
        )
        return
    build = "the CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
    yield _finding("PyTorch", f"{torch.__version__}, {build}", "")
    yield _finding(
        "GPU",
        torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "every chapter runs without a GPU; after installing an NVIDIA driver, remove .venv and run `make env`",
    )


def _data() -> Iterator[Finding]:
    for name in ("paper", "measured"):
        yield _finding(f"data: {name}", carried_folder(name), "")
    try:
        search_folders()
    except ValueError as error:
        yield _finding("released traces", None, str(error), needed=True)
        return
    for name in RELEASES:
        yield _finding(
            f"trace: {name}",
            find_trace(name),
            f"mooncake-lab trace fetch {name} (or name a folder in MOONCAKE_LAB_DATA);"
            " until then a twin replaces the trace",
        )


def _software() -> Iterator[Finding]:
    for extra, distributions in EXTRAS.items():
        versions = {name: _version(name) for name in distributions}
        found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        remedy = f"pip install 'mooncake-lab[{extra}]'"
        yield _finding(f"extra: {extra}", found, remedy, ready=all(versions.values()))
    yield _finding(
        "libibverbs",
        ctypes.util.find_library("ibverbs"),
        "apt-get install libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4;"
        " Mooncake's store needs these libraries even over TCP",
    )
    yield _finding(
        "browser",
        find_browser(),
        "apt-get install chromium; without it the tests of the rendered book are skipped",
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _grading() -> Iterator[Finding]:
    from mooncake_lab.course.grading.confine import UnconfinableError, check_confinable, why_no_folder

    try:
        check_confinable()
    except UnconfinableError as error:
        remedy = "grade on Linux 6.2 or later with Landlock; everything else works here"
        yield _finding("grading", error, remedy, ready=False)
        return
    yield _finding("grading", "submissions can be confined", "")
    why = why_no_folder()
    yield _finding(
        "grading: files",
        f"submissions cannot write files: {why}" if why else "a private file system of fixed size per submission",
        "allow unprivileged user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu)",
        ready=not why,
    )


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (_machine, _torch, _data, _software, _grading)


def examine() -> list[Finding]:
    """Run all checks, in the order in which a new user needs the results."""
    return [finding for check in CHECKS for finding in check()]


def doctor(json_: Json = False) -> None:
    """Report what this machine can run, and how to install the rest.

    The exit code is 1 if something is missing that every user needs. Missing optional parts do not change it.

    Example: mooncake-lab doctor
    """
    findings = examine()
    ready = all(finding.standing != "missing" for finding in findings)
    if json_:
        typer.echo(msgspec.json.encode({"ready": ready, "findings": [asdict(finding) for finding in findings]}))
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            typer.echo(f"{finding.standing:8}  {finding.what:{width}}  {finding.found}")
            if finding.remedy:
                typer.echo(f"{'':8}  {'':{width}}  -> {finding.remedy}")
    if not ready:
        raise typer.Exit(1)
