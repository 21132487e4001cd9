"""What a test may need and this machine may lack; each function returns the reason, or an empty string."""

import functools
import importlib.util
import os
from typing import Final

import pytest

from mooncake_lab.net.mooncake_wheel import MooncakeError, load_wheel
from mooncake_lab.workload import RELEASES, find_trace

RELEASED: Final = [pytest.param(name, marks=pytest.mark.traces(name)) for name in ("conversation", "synthetic")]
"""For `parametrize`: the released traces that the pages are written for."""


@functools.cache
def traces(*names: str) -> str:
    """Why tests of these released traces are skipped."""
    lacking = [RELEASES[name].label for name in names if find_trace(name) is None]
    return f"the released {' and '.join(lacking)} trace is not here; `make traces` fetches it" if lacking else ""


@functools.cache
def wheel() -> str:
    """Why tests of Mooncake's own wheel are skipped."""
    try:
        load_wheel()
    except MooncakeError as error:
        return str(error)
    return ""


def kernels() -> str:
    """Why tests of the GPU's kernels are skipped."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return "they need Triton and its interpreter; `make test-kernels` has both"
    return ""


@functools.cache
def confinement() -> str:
    """Why tests that grade submissions are skipped."""
    from mooncake_lab.course.grading.confine import UnconfinableError, check_confinable

    try:
        check_confinable()
    except UnconfinableError as error:
        return str(error)
    return ""


def summary() -> list[str]:
    """One line for each kind of test that is skipped here."""
    kinds = {
        "released traces": traces("conversation", "synthetic"),
        "Mooncake's wheel": wheel(),
        "GPU kernels": kernels(),
        "grading": confinement(),
    }
    return [f"skipped here, tests of {kind}: {why}" for kind, why in kinds.items() if why]
