"""How far the simulator was from servers that it was calibrated to, ours and those of others.

`benchmarks/calibration.py` measures with `mooncake-lab calibrate`, and writes `data/measured/calibration.json`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final

import pandas as pd

from mooncake_lab.book.experiments import records, tabulated
from mooncake_lab.core import carried_folder

RECORD: Final = carried_folder("measured") / "calibration.json"
MOST_ERROR: Final[Mapping[str, float]] = {"mean": 0.1, "median": 0.1, "P90": 0.2}
"""What a prediction may be off, in addition to what the server's own repetitions differ."""


def record() -> dict[str, Any]:
    """The measurement: where and when, and the reports of `mooncake-lab calibrate`."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


@tabulated
def errors(measured: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each server, trace, share of saturation, quantity and statistic.

    Columns beside these: what was measured (`real`) and predicted (`simulated`), both in seconds or tokens per
    second, `error` (predicted over measured, less one), its interval `low` to `high`, `repetition` (half the range
    of the server's own repetitions over their mean), and `is_near`: whether the error is within `MOST_ERROR` and
    the repetition together.
    """
    for report in measured["calibrations"]:
        trace = report["trace_file"].partition("_trace")[0]
        for rate in report["rates"]:
            for row in rate["errors"]:
                is_near = abs(row["error"]) <= MOST_ERROR[row["statistic"]] + row["repetition"]
                about = {"server": report["server"], "trace": trace, "share": rate["share"]}
                yield about | row | {"is_near": is_near}


@tabulated
def trusted(rows: pd.DataFrame, quantities: Sequence[str] = ("TTFT", "TBT", "E2E")) -> Iterator[dict[str, Any]]:
    """By server and quantity, below saturation: how many statistics of how many are near, and the largest errors.

    Args:
        rows: what `errors` made.
        quantities: which.
    """
    for server in dict.fromkeys(rows["server"]):
        for quantity in quantities:
            each = [row for row in records(rows, server=server, quantity=quantity) if row["share"] < 1]
            yield {
                "server": server,
                "quantity": quantity,
                "near": len([row for row in each if row["is_near"]]),
                "of": len(each),
                "median error (%)": 100 * median(abs(row["error"]) for row in each),
                "largest (%)": 100 * max(abs(row["error"]) for row in each),
                "repetition (%)": 100 * median(row["repetition"] for row in each),
            }


def source_of(measured: Mapping[str, Any]) -> str:
    """Where and when it was measured, for the footer of a figure."""
    reports = measured["calibrations"]
    processors, dates, commits = (
        ", ".join(dict.fromkeys(each))
        for each in zip(*((r["machine"]["processor"], r["date"], r["commit"]) for r in reports), strict=True)
    )
    loads = [report["load_average"][0] for report in reports]
    return (
        f"measured on {processors}, server and clients on a core each, {dates}, commit {commits},"
        f" load average before {min(loads):.1f} to {max(loads):.1f}; predicted: simulated"
    )
