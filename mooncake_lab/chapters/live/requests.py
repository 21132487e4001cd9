"""Two logs of the same requests side by side: what differs, by how much, how surely, and in which stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab.core import Arrived, FirstToken, Prefilled, Record
from mooncake_lab.metrics import check_log, request_table
from mooncake_lab.perf import HybridLatency, LatencyModel
from mooncake_lab.perf.calibration import times_as_long

_Numbers: TypeAlias = npt.NDArray[np.float64]
STATISTICS: Final[Mapping[str, Callable[[_Numbers], _Numbers]]] = MappingProxyType(
    {
        "mean": lambda values: np.mean(values, axis=-2),
        "median": lambda values: np.median(values, axis=-2),
        "P90": lambda values: np.percentile(values, 90, axis=-2),
    }
)
"""What is compared of a distribution: of columns, over the axis before the last."""
QUANTITIES: Final[Mapping[str, str]] = MappingProxyType({"ttft_s": "TTFT", "tbt_s": "TBT"})
"""Columns by what they are called; TBT of a request is the mean gap between its tokens."""
STAGES: Final = ("wait_s", "prefill_s", "handover_s")
"""The parts of TTFT: until prefill starts, until it ends, until the first token is shown."""
_RESAMPLES: Final = 500


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
    start_s, end_s, reused = dict[int, float](), dict[int, float](), dict[int, int]()
    arrived_s = {r.request_id: r.at_s for r in log if isinstance(r, Arrived)}
    first_s = {r.request_id: r.at_s for r in log if isinstance(r, FirstToken)}
    for record in log:
        if isinstance(record, Prefilled):
            key = record.request_id
            start_s[key] = min(record.start_s, start_s.get(key, record.start_s))
            end_s[key] = max(record.at_s, end_s.get(key, record.at_s))
            reused[key] = max(record.reused_tokens, reused.get(key, 0))
    rows = [
        {
            "wait_s": start_s[key] - arrived_s[key],
            "prefill_s": end_s[key] - start_s[key],
            "handover_s": first_s[key] - end_s[key],
            "reused_tokens": reused[key],
        }
        for key in table.index
    ]
    stages = pd.DataFrame(rows, index=table.index)
    tbt_s = table["tbt_arxiv_s"].where(table["output_tokens"] > 1)
    return stages.assign(ttft_s=table["ttft_s"], tbt_s=tbt_s)


def errors(requests: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """How far the prediction is off: rows of run, quantity, statistic, real_s, simulated_s, error, low, high.

    The error is simulated over real, less one. Its 95 % interval is that of a bootstrap over requests, each with
    both of its numbers; it says nothing of how another run on the same machine would have gone.

    Args:
        requests: what `side_by_side` made, of several runs in a column `run`.
        seed: of the resamples.
    """
    rows = list[dict[str, Any]]()
    for run, table in requests.groupby("run", sort=False):
        for quantity, name in QUANTITIES.items():
            pair = table[[f"real_{quantity}", f"simulated_{quantity}"]].dropna().to_numpy(dtype=np.float64)
            if not len(pair):
                continue
            draws = np.random.default_rng(seed).integers(0, len(pair), (_RESAMPLES, len(pair)))
            for statistic, of in STATISTICS.items():
                real_s, simulated_s = of(pair).tolist()
                resampled = of(pair[draws])  # (resamples, 2)
                low, high = np.percentile(resampled[:, 1] / resampled[:, 0] - 1, [2.5, 97.5])
                rows.append(
                    {"run": run, "quantity": name, "statistic": statistic, "real_s": real_s}
                    | {"simulated_s": simulated_s, "error": simulated_s / real_s - 1}
                    | {"low": float(low), "high": float(high), "requests": len(pair)}
                )
    return pd.DataFrame(rows)


def causes(requests: pd.DataFrame) -> pd.DataFrame:
    """Where a prediction of mean TTFT went wrong: rows of run, stage, real_s, simulated_s and missing_s.

    The stages add up to TTFT, so the missing seconds of a run add up to what its prediction is short of.
    """
    rows = list[dict[str, Any]]()
    for run, table in requests.groupby("run", sort=False):
        for stage in STAGES:
            real_s, simulated_s = (
                float(table[f"{side}_{stage}"].to_numpy(dtype=np.float64).mean()) for side in ("real", "simulated")
            )
            rows.append(
                {"run": run, "stage": stage.removesuffix("_s"), "real_s": real_s, "simulated_s": simulated_s}
                | {"missing_s": real_s - simulated_s}
            )
    return pd.DataFrame(rows)


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
