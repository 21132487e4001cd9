"""How far the simulator was from servers that it was calibrated to, ours and those of others.

`benchmarks/calibration.py` measures with `mooncake-lab calibrate`, and writes `data/measured/calibration.json`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd

from mooncake_lab.core import carried_folder

RECORD: Final = carried_folder("measured") / "calibration.json"
MOST_ERROR: Final[Mapping[str, float]] = {"mean": 0.1, "median": 0.1, "P90": 0.2}
"""What a prediction may be off, in addition to what the server's own repetitions differ."""


def record() -> dict[str, Any]:
    """The measurement: where and when, and the reports of `mooncake-lab calibrate`."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def errors(measured: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each server, trace, share of saturation, quantity and statistic.

    Columns beside these: what was measured (`real`) and predicted (`simulated`), both in seconds or tokens per
    second, `error` (predicted over measured, less one), its interval `low` to `high`, `repetition` (half the range
    of the server's own repetitions over their mean), and `is_near`: whether the error is within `MOST_ERROR` and
    the repetition together.
    """
    rows = pd.DataFrame(
        {"server": report["server"], "trace": report["trace_file"].partition("_trace")[0], "share": rate["share"]}
        | row
        for report in measured["calibrations"]
        for rate in report["rates"]
        for row in rate["errors"]
    )
    allowed = rows["statistic"].map(dict(MOST_ERROR)) + rows["repetition"]
    return rows.assign(is_near=rows["error"].abs() <= allowed)


def trusted(rows: pd.DataFrame, quantities: Sequence[str] = ("TTFT", "TBT", "E2E")) -> pd.DataFrame:
    """By server and quantity, below saturation: how many statistics of how many are near, and the largest errors.

    Args:
        rows: what `errors` made.
        quantities: which.
    """
    below = rows[(rows["share"] < 1) & rows["quantity"].isin(quantities)]
    groups = below.groupby(["server", "quantity"], sort=False)
    return groups.apply(
        lambda each: pd.Series(
            {
                "near": int(each["is_near"].sum()),
                "of": len(each),
                "median error (%)": 100 * each["error"].abs().median(),
                "largest (%)": 100 * each["error"].abs().max(),
                "repetition (%)": 100 * each["repetition"].median(),
            }
        ),
        include_groups=False,
    )


def source_of(measured: Mapping[str, Any]) -> str:
    """Where and when it was measured, for the footer of a figure."""
    machine = measured["machine"]
    loads = [report["load_average"] for report in measured["calibrations"]]
    return (
        f"measured on {machine['processor']}, server and clients on a core each, {measured['date']}, commit"
        f" {measured['commit']}, load average {min(loads):.1f} to {max(loads):.1f}; predicted: simulated"
    )
