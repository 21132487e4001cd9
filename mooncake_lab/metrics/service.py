"""Which requests were served well: effective request capacity and goodput."""

import math
from typing import TYPE_CHECKING, Literal

from mooncake_lab.core import SLO

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd


def effective(
    requests: "pd.DataFrame", slo: SLO, *, tbt: Literal["fast", "arxiv"] = "fast"
) -> "npt.NDArray[np.bool_]":
    """Which requests of a `request_table` finished within both limits, shape (requests,).

    A request that was rejected or still runs at the horizon is not effective, whatever it received.

    Args:
        requests: the table, one row a request.
        slo: the limits; a latency equal to its limit meets it.
        tbt: which edition's time between tokens is held against the limit.
    """
    ttft = requests["ttft_s"].to_numpy(dtype="float64")
    gap = requests[f"tbt_{tbt}_s"].to_numpy(dtype="float64")
    finished = requests["end"].to_numpy() == "finished"
    return finished & (ttft <= slo.ttft_s) & (gap <= slo.tbt_s)


def effective_request_capacity(
    requests: "pd.DataFrame", slo: SLO, *, tbt: Literal["fast", "arxiv"] = "fast"
) -> float:
    """The share of all requests that finished within both limits (FAST'25 §5.1).

    Raises:
        ValueError: when there is no request.
    """
    if len(requests) == 0:
        raise ValueError("the effective request capacity of 0 requests is undefined; at least 1 is needed")
    return float(effective(requests, slo, tbt=tbt).mean())


def goodput_per_s(
    requests: "pd.DataFrame", slo: SLO, duration_s: float, *, tbt: Literal["fast", "arxiv"] = "fast"
) -> float:
    """Requests finished within both limits, a second of the run (arXiv v3 §7: only completed requests count).

    Raises:
        ValueError: when the duration is not a positive number of seconds.
    """
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise ValueError(f"the run lasts {duration_s!r} s; a positive number of seconds is needed")
    return float(effective(requests, slo, tbt=tbt).sum()) / duration_s
