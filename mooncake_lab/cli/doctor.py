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
from mooncake_lab.workload import RELEASES, find_trace

Standing = Literal["ready", "missing", "optional"]

EXTRAS: Final = {
    "book": ("jupyter-book", "papermill"),
    "serve": ("starlette", "uvicorn", "prometheus-client"),
    "cluster": ("dask", "distributed"),
    "classroom": ("nbgrader",),
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
    standing: Standing
    found: str
    remedy: str = ""
    """How to install it; empty when it is ready."""


def _needed(what: str, found: str, *, ready: bool, remedy: str) -> Finding:
    return Finding(
        what=what, standing="ready" if ready else "missing", found=found, remedy="" if ready else remedy
    )


def _useful(what: str, found: str, *, ready: bool, remedy: str) -> Finding:
    return Finding(
        what=what, standing="ready" if ready else "optional", found=found, remedy="" if ready else remedy
    )


def _python() -> Iterator[Finding]:
    allowed = (3, 11) <= sys.version_info < (3, 14)
    yield _needed("Python", platform.python_version(), ready=allowed, remedy="use Python 3.11, 3.12 or 3.13")


def _machine() -> Iterator[Finding]:
    cores = os.cpu_count() or 1
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    yield _useful(
        "CPU cores", str(cores), ready=cores >= 2, remedy="the stated run times of the chapters are for two cores"
    )
    found = f"{memory_gib:.1f} GiB"
    remedy = "below 8 GiB run `mooncake-lab batch --jobs 1`, one chapter at a time, before `make book`"
    yield _useful("memory", found, ready=memory_gib >= 8, remedy=remedy)
    compiler = shutil.which("cc")
    remedy = "apt-get install gcc; only Triton on a GPU and benchmarks/engine.py need a compiler"
    yield _useful("C compiler", compiler or "none", ready=bool(compiler), remedy=remedy)


def _torch() -> Iterator[Finding]:
    import torch

    build = "the CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
    yield _needed("PyTorch", f"{torch.__version__}, {build}", ready=True, remedy="")
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    remedy = "every chapter runs without a GPU; after installing an NVIDIA driver, remove .venv and run `make env`"
    yield _useful("GPU", found or "none", ready=found is not None, remedy=remedy)


def _data() -> Iterator[Finding]:
    for name in ("paper", "measured"):
        folder = carried_folder(name)
        yield _needed(f"data: {name}", str(folder), ready=True, remedy="")


def _traces() -> Iterator[Finding]:
    for name in RELEASES:
        path = find_trace(name)
        remedy = (
            f"mooncake-lab trace fetch {name} (or name a folder in MOONCAKE_LAB_DATA);"
            " until then a twin replaces the trace"
        )
        yield _useful(f"trace: {name}", str(path or "none"), ready=path is not None, remedy=remedy)


def _extras() -> Iterator[Finding]:
    for extra, distributions in EXTRAS.items():
        versions = {name: _version(name) for name in distributions}
        ready = all(versions.values())
        found = ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "none"
        yield _useful(f"extra: {extra}", found, ready=ready, remedy=f"in the repository: pip install '.[{extra}]'")


def _system_libraries() -> Iterator[Finding]:
    found = ctypes.util.find_library("ibverbs")
    remedy = (
        "apt-get install libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4;"
        " Mooncake's store needs these libraries even over TCP"
    )
    yield _useful("libibverbs", found or "none", ready=found is not None, remedy=remedy)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _confinement() -> Iterator[Finding]:
    from mooncake_lab.course.grading.confine import UnconfinableError, check_confinable, why_no_folder

    try:
        check_confinable()
    except UnconfinableError as error:
        remedy = "grade on Linux 6.2 or later with Landlock; everything else works here"
        yield _useful("grading", str(error), ready=False, remedy=remedy)
        return
    yield _useful("grading", "submissions can be confined", ready=True, remedy="")
    why = why_no_folder()
    found = (
        f"submissions cannot write files: {why}" if why else "a private file system of fixed size per submission"
    )
    remedy = "allow unprivileged user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu)"
    yield _useful("grading: files", found, ready=not why, remedy=remedy)


def find_browser() -> str | None:
    """The path of a browser on this machine, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _browser() -> Iterator[Finding]:
    path = find_browser()
    remedy = "apt-get install chromium; without it the tests of the rendered book are skipped"
    yield _useful("browser", path or "none", ready=path is not None, remedy=remedy)


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    _python, _machine, _torch, _data, _traces, _extras, _system_libraries, _confinement,
    _browser,
)  # fmt: skip


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
