"""Latencies of requests from the times of their tokens, and which requests were served well.

The time between tokens is here by both papers' definitions. A run log keeps stretches of decode steps, which
`token_times_s` expands.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import sub
from typing import TYPE_CHECKING, Final, Literal

from mooncake_lab.core import SLO, Arrived, DecodeStretch, Finished, FirstToken, Record, Rejected
from mooncake_lab.core.averages import mean
from mooncake_lab.core.extras import naming_extra

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd


def step_ends_s(stretch: DecodeStretch) -> list[float]:
    """The times at which the steps of a stretch ended, in seconds since the run began.

    Step k from 0 lasts `first_step_s + k * step_growth_s`, so step k ends at
    `start_s + (k + 1) * first_step_s + k * (k + 1) / 2 * step_growth_s`.
    """
    start_s, first_s, growth_s, steps = stretch.start_s, stretch.first_step_s, stretch.step_growth_s, stretch.steps
    counts = _PREPARED[:steps] if steps <= len(_PREPARED) else _counts(steps)
    return [start_s + done * first_s + grown * growth_s for done, grown in counts]


def _counts(steps: int) -> list[tuple[float, float]]:
    """`k + 1` and `k * (k + 1) / 2` for each step."""
    return [(float(k + 1), k * (k + 1) / 2) for k in range(steps)]


_PREPARED: Final = _counts(4096)  # a log has many stretches, most of them short


def token_times_s(records: Iterable[Record]) -> Iterator[tuple[int, list[float]]]:
    """Every request that received a token, with the times of all its tokens in seconds.

    The first is the time of its `FirstToken` record; each decode step of the request gives one more. A request is
    returned when it finishes, so that the token times of a long log are never all in memory at once. Requests that
    still run at the end of the log come last, in order of their ids.
    """
    pending: defaultdict[int, list[list[float]]] = defaultdict(list)
    for record in records:
        match record:
            case FirstToken():
                pending[record.request_id].append([record.at_s])
            case DecodeStretch():
                ends = step_ends_s(record)
                for request_id in record.request_ids:
                    pending[request_id].append(ends)
            case Finished() if record.request_id in pending:
                yield record.request_id, list(chain.from_iterable(pending.pop(record.request_id)))
            case _:
                pass
    for request_id in sorted(pending):
        yield request_id, list(chain.from_iterable(pending[request_id]))


def ttft_s(records: Iterable[Record]) -> dict[int, float]:
    """Seconds from arrival to first token, by request id, for the requests that received one.

    Raises:
        ValueError: when a request received a first token without having arrived.
    """
    arrivals: dict[int, float] = {}
    latencies: dict[int, float] = {}
    for record in records:
        if isinstance(record, Arrived):
            arrivals[record.request_id] = record.at_s
        elif isinstance(record, FirstToken):
            if record.request_id not in arrivals:
                raise ValueError(
                    f"request {record.request_id} receives its first token at {record.at_s} s but never arrives;"
                    " every request needs an arrived record before its first token"
                )
            latencies[record.request_id] = record.at_s - arrivals[record.request_id]
    return latencies


def tbt_longest_gaps_s(times_s: Sequence[float], *, share: float = 0.1) -> float | None:
    """TBT of one request as FAST'25 §5.1 defines it: the mean of its longest 10 % of token gaps.

    The paper leaves two cases open. We take `ceil(share * gaps)` gaps, so at least one. A request with a single
    token has no gap and no TBT (None): it has no part in means and percentiles of TBT, and only its TTFT decides
    whether it is effective.

    Args:
        times_s: when each token came, in order.
        share: the share of gaps that counts, above 0 and up to 1.

    Raises:
        ValueError: when the share is out of range.
    """
    return tbt_of_gaps_s(list(map(sub, times_s[1:], times_s)), share=share)


def tbt_of_gaps_s(gaps_s: Collection[float], *, share: float = 0.1) -> float | None:
    """`tbt_longest_gaps_s` of a request whose tokens came with these gaps, in any order.

    Raises:
        ValueError: when the share is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of longest gaps is {share!r}; allowed are numbers above 0 and up to 1")
    if not gaps_s:
        return None
    # 0.1 * 70 is a little more than 7 in binary: take the rounding error off before rounding up
    return mean(sorted(gaps_s)[-max(1, math.ceil(share * len(gaps_s) - 1e-9)) :])


def tbt_mean_gap_s(times_s: Sequence[float]) -> float | None:
    """TBT of one request as we read arXiv v3 §8.1: the mean of all its token gaps (time per output token).

    The edition takes percentiles of TBT over requests without saying what the TBT of a request is; this
    is our assumption. A request with a single token has no TBT (None).
    """
    if len(times_s) < 2:
        return None
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def request_table(records: Iterable[Record]) -> "pd.DataFrame":
    """One row per request, in order of arrival.

    Columns: `arrival_s`, `input_tokens`, `ttft_s`, `tbt_fast_s`, `tbt_arxiv_s`, `output_tokens` (received so
    far), `end` (finished, rejected or running) and `finish_s`. Latencies are NaN for a request that received no
    token, TBT also for one that received a single token, and `finish_s` for one that did not finish.
    """
    with naming_extra("stats"):
        import pandas as pd  # here, because the summary of a run must work without it

    log = list(records)
    table = pd.DataFrame(
        [(r.request_id, r.at_s, r.input_tokens) for r in log if isinstance(r, Arrived)],
        columns=["request_id", "arrival_s", "input_tokens"],
    ).set_index("request_id")
    first = ttft_s(log)
    measured = {
        request_id: (first.get(request_id, math.nan), tbt_longest_gaps_s(times), tbt_mean_gap_s(times), len(times))
        for request_id, times in token_times_s(log)
    }
    columns = ["ttft_s", "tbt_fast_s", "tbt_arxiv_s", "output_tokens"]
    table = table.join(pd.DataFrame.from_dict(measured, orient="index", columns=columns, dtype=float))
    table["output_tokens"] = table["output_tokens"].fillna(0).astype("int64")
    ends = {r.request_id: "rejected" for r in log if isinstance(r, Rejected)}
    finishes = {r.request_id: r.at_s for r in log if isinstance(r, Finished)}
    table["end"] = [
        "finished" if request_id in finishes else ends.get(request_id, "running") for request_id in table.index
    ]
    table["finish_s"] = [finishes.get(request_id, math.nan) for request_id in table.index]
    return table


def effective(
    requests: "pd.DataFrame", slo: SLO, *, tbt: Literal["fast", "arxiv"] = "fast"
) -> "npt.NDArray[np.bool_]":
    """Which requests of a `request_table` finished within both limits, shape (requests,).

    A request that was rejected or still runs at the horizon is not effective, whatever it received.
    A latency equal to its limit meets it, and an answer of one token, which has no gap, meets the limit of TBT.
    """
    ttft = requests["ttft_s"].to_numpy(dtype="float64")
    gap = requests[f"tbt_{tbt}_s"].to_numpy(dtype="float64")
    finished = requests["end"].to_numpy() == "finished"
    return finished & (ttft <= slo.ttft_s) & ~(gap > slo.tbt_s)


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


def highest_passing(
    passes: Callable[[float], bool], low: float, high: float, *, relative_tolerance: float = 0.05
) -> float | None:
    """The highest load between `low` and `high` that passes, down to a relative tolerance; None where none does.

    Loads are halved on a logarithmic scale, since a rate of 0.2 against 0.4 matters as much as 2 against 4. It
    presumes that what passes at some load passes at every lower one. A simulation may break this near the limit;
    the answer is then a load that passed, and a load that failed lies no farther above it than the tolerance.

    Args:
        passes: whether a load, such as requests a second or a replay speed, meets the objectives.
        low: tried first; lower loads are not tried.
        high: tried second; higher loads are not tried, and it is the answer if it passes.
        relative_tolerance: how far above the answer the lowest failing load may be, as a share of the answer.

    Raises:
        ValueError: when the bounds are not positive and rising, or the tolerance is not positive.
    """
    if not (0 < low < high < math.inf):
        raise ValueError(f"the loads to search run from {low!r} to {high!r}; both must be positive and rising")
    if not relative_tolerance > 0:
        raise ValueError(f"the relative tolerance is {relative_tolerance!r}; it must be positive")
    if not passes(low):
        return None
    if passes(high):
        return high
    while high > low * (1 + relative_tolerance):
        middle = math.sqrt(low * high)
        if not low < middle < high:  # as close as floating point allows
            break
        if passes(middle):
            low = middle
        else:
            high = middle
    return low
