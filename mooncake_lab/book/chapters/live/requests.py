"""Two logs of the same requests side by side: what differs, by how much, how surely, and in which stage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.book.experiments import tabulated, where
from mooncake_lab.core import Arrived, FirstToken, Prefilled, Record
from mooncake_lab.metrics import check_log, request_table
from mooncake_lab.metrics.prediction import STATISTICS, prediction_errors
from mooncake_lab.perf import HybridLatency, LatencyModel
from mooncake_lab.perf.calibration import times_as_long

QUANTITIES: Final = {"ttft_s": "TTFT", "tbt_s": "TBT"}
"""Columns by what they are called; TBT of a request is the mean gap between its tokens."""
REPETITION: Final = "by a repetition"
"""In the name of the row that compares two measured runs."""
TARGET: Final = 0.1
"""The error that a prediction should not exceed."""
STAGES: Final = ("wait_s", "prefill_s", "handover_s")
"""The parts of TTFT: until prefill starts, until it ends, until the first token is shown."""


def side_by_side(real: Sequence[Record], simulated: Sequence[Record]) -> pd.DataFrame:
    """Rows by request: each quantity and stage as it was (`real_...`) and as predicted (`simulated_...`).

    Raises:
        ValueError: when the two logs are not of the same requests.
    """
    left, right = per_request(real), per_request(simulated)
    if set(left.index) != set(right.index):
        raise ValueError(f"{len(left)} requests live and {len(right)} simulated; both logs need the same ones")
    joined = left.add_prefix("real_").join(right.add_prefix("simulated_"))
    return joined.rename_axis("request").reset_index()


def per_request(log: Sequence[Record]) -> pd.DataFrame:
    """Rows by request: ttft_s, tbt_s (NaN for answers of one token), the stages, and reused_tokens."""
    table = request_table(log)
    prefilled: dict[int, list[Prefilled]] = {}
    for record in log:
        if isinstance(record, Prefilled):
            prefilled.setdefault(record.request_id, []).append(record)
    arrived_s = pd.Series({r.request_id: r.at_s for r in log if isinstance(r, Arrived)})[table.index]
    first_s = pd.Series({r.request_id: r.at_s for r in log if isinstance(r, FirstToken)})[table.index]
    start_s = pd.Series({key: min(r.start_s for r in found) for key, found in prefilled.items()})[table.index]
    end_s = pd.Series({key: max(r.at_s for r in found) for key, found in prefilled.items()})[table.index]
    stages = {"wait_s": start_s - arrived_s, "prefill_s": end_s - start_s, "handover_s": first_s - end_s}
    reused = [max(r.reused_tokens for r in prefilled[key]) for key in table.index]
    return pd.DataFrame(
        {**stages, "reused_tokens": reused, "ttft_s": table["ttft_s"], "tbt_s": table["tbt_arxiv_s"]}
    )


@tabulated
def errors(requests: pd.DataFrame, *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """How far the prediction is off: rows of run, quantity, statistic, real_s, simulated_s, error, low, high.

    The error is simulated over real, less one. Its 95 % interval is that of a bootstrap over requests, each with
    both of its numbers; it says nothing of how another run on the same machine would have gone.
    """
    for run, table in requests.groupby("run", sort=False):
        for quantity, name in QUANTITIES.items():
            pair = table[[f"real_{quantity}", f"simulated_{quantity}"]].dropna().to_numpy(dtype=np.float64)
            if not len(pair):
                continue
            for found in prediction_errors(pair[:, None, :], seed=seed):
                yield (
                    {"run": run, "quantity": name, "statistic": found.statistic, "real_s": found.real}
                    | {"simulated_s": found.simulated, "error": found.error}
                    | {"low": found.low, "high": found.high, "requests": len(pair)}
                )


@tabulated
def by_statistic(paces: Mapping[str, pd.DataFrame]) -> Iterator[dict[str, Any]]:
    """How far predictions are off, over all predicted runs: one row a pace, quantity and statistic.

    Columns: pace, quantity, statistic, runs, within (of the runs, within 10 %), typical_percent (median of the
    absolute errors) and largest_percent. The repetition, which nobody predicted, is left out.

    Args:
        paces: rows of `errors`, by the pace of the workers.
    """
    for pace, rows in paces.items():
        predicted = rows.loc[~rows["run"].astype(str).str.contains(REPETITION)]
        for quantity in QUANTITIES.values():
            for statistic in STATISTICS:
                chosen = where(predicted, quantity=quantity, statistic=statistic)
                off = np.abs(chosen["error"].to_numpy(dtype=np.float64))
                if not len(off):
                    continue
                row = {"pace": pace, "quantity": quantity, "statistic": statistic, "runs": len(off)}
                row |= {"within": int((off <= TARGET).sum()), "typical_percent": 100 * float(np.median(off))}
                yield row | {"largest_percent": 100 * float(off.max())}


@tabulated
def causes(requests: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Where a prediction of mean TTFT went wrong: rows of run, stage, real_s, simulated_s and missing_s.

    The stages add up to TTFT, so the missing seconds of a run add up to what its prediction is short of.
    """
    for run, table in requests.groupby("run", sort=False):
        for stage in STAGES:
            real_s, simulated_s = (float(np.mean(table[f"{side}_{stage}"])) for side in ("real", "simulated"))
            row = {"run": run, "stage": stage.removesuffix("_s"), "real_s": real_s, "simulated_s": simulated_s}
            yield row | {"missing_s": real_s - simulated_s}


def checked(log: list[Record]) -> list[Record]:
    """The log itself.

    Raises:
        ValueError: when it breaks an invariant.
    """
    violations = check_log(log)
    if violations:
        raise ValueError(f"the run log breaks {violations[0].invariant}: {violations[0].sentence}")
    return log


def slowed(model: LatencyModel, factor: float, *, decode: bool = False) -> LatencyModel:
    """The model with every prefill `factor` times as long; with `decode`, every decode step as well."""
    prefill = times_as_long(model.prefill, factor)
    second = times_as_long(model.decode, factor) if decode else model.decode
    return replace(model, prefill=prefill, decode=second, hybrid=HybridLatency.of(prefill, second))
