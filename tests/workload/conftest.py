"""What the tests of the workload share."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mooncake_lab.workload import Trace

REFERENCE = Path(__file__).parents[2] / "data" / "measured" / "reference_trace_statistics.csv"


@pytest.fixture
def make_trace() -> Callable[..., Trace]:
    """A function from block ids of each request (and optionally their arrivals) to a trace of whole blocks."""

    def make(*blocks, arrival_s=None, block_size_tokens=4):
        lengths = [len(ids) for ids in blocks]
        return Trace(
            name="made",
            origin="file",
            block_size_tokens=block_size_tokens,
            arrival_s=np.arange(len(blocks)) * 1.0 if arrival_s is None else np.array(arrival_s),
            input_tokens=np.array(lengths, dtype=np.int64) * block_size_tokens,
            output_tokens=np.ones(len(blocks), dtype=np.int64),
            block_ids=np.array([one for ids in blocks for one in ids], dtype=np.int64),
            block_starts=np.cumsum([0, *lengths]),
            source="made by a test",
        )

    return make


@pytest.fixture(scope="session")
def reference() -> dict[tuple[str, str], float]:
    """Statistics of the released traces recounted apart from the package, by trace and statistic."""
    with REFERENCE.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {
            (row["trace"], row["statistic"]): float(row["value"]) for row in rows if row["source"] == "counted"
        }
