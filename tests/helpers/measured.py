"""Measurements on this machine that several test files look at, made once per process or once per test run."""

import fcntl
import json
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from gpu import main

from mooncake_lab.bench.machine import measure_peaks
from mooncake_lab.book.chapters.stages.experiment import MeasuredStages
from mooncake_lab.book.experiments import run

small_peaks = partial(measure_peaks, side=64, copy_bytes=1 << 16)
"""Rates of products and arrays so small that they say nothing of the machine."""

_TINY = MeasuredStages(
    model="lab-tiny", prefill_tokens=(8, 16, 32), batches=(1, 2), context_tokens=(8, 24), rounds=1, budget_s=60.0
)


def stages() -> pd.DataFrame:
    """Prefills of 8 to 32 tokens and decode steps of the smallest model, with small peaks."""
    return _stages().copy()


def dry_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file that `benchmarks/gpu.py` writes of a dry run of all sections on a CPU; one per run of the tests."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    out = folder / "bench_gpu.json"
    with (folder / "bench_gpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.is_file():
            _run_dry(out)
    return json.loads(out.read_text())


@cache
def _stages() -> pd.DataFrame:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mooncake_lab.bench.stages.measure_peaks", small_peaks)
        return run(_TINY, cache=False)


def _run_dry(out: Path) -> None:
    unfinished = out.with_suffix(".part")
    with pytest.MonkeyPatch.context() as patch:
        asked = ["--shape", "lab-tiny", "--device", "cpu", "--out", str(unfinished)]
        patch.setattr("sys.argv", ["gpu.py", *asked])
        assert main() == 0
    unfinished.rename(out)
