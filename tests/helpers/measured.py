"""Measurements on this machine that several test files look at: each process makes each of them once."""

import copy
import json
import tempfile
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mooncake_lab.engine.bench_gpu import main
from mooncake_lab.engine.machine import measure_peaks
from mooncake_lab.experiments import run
from mooncake_lab.experiments.stages import MeasuredStages

small_peaks = partial(measure_peaks, side=64, copy_bytes=1 << 16)
"""Rates of products and arrays so small that they say nothing of the machine."""

_TINY = MeasuredStages(
    model="lab-tiny", prefill_tokens=(8, 16, 32), batches=(1, 2), context_tokens=(8, 24), rounds=1, budget_s=60.0
)


def stages() -> pd.DataFrame:
    """Prefills of 8 to 32 tokens and decode steps of the smallest model, with small peaks."""
    return _stages().copy()


def dry_run() -> dict[str, Any]:
    """The file that `bench_gpu` writes of a dry run of all sections on a CPU."""
    return copy.deepcopy(_dry_run())


@cache
def _stages() -> pd.DataFrame:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mooncake_lab.engine.measure.measure_peaks", small_peaks)
        return run(_TINY, cache=False)


@cache
def _dry_run() -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        out = Path(folder, "dry.json")
        asked = ["--shape", "lab-tiny", "--device", "cpu", "--out", str(out)]
        patch.setattr("sys.argv", ["bench_gpu", *asked])
        assert main() == 0
        return json.loads(out.read_text())
