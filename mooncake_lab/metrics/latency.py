"""Latencies of requests, with the time between tokens by both papers' definitions."""

import math
from collections.abc import Collection, Iterable, Sequence
from operator import sub
from typing import TYPE_CHECKING

from mooncake_lab.core import Arrived, Finished, FirstToken, Record, Rejected
from mooncake_lab.metrics.averages import mean
from mooncake_lab.metrics.tokens import token_times_s

if TYPE_CHECKING:
    import pandas as pd


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


def tbt_longest_gaps_s(times_s: Sequence[float], *, share: float = 0.1) -> float:
    """TBT of one request as FAST'25 §5.1 defines it: the mean of its longest 10 % of token gaps.

    The paper leaves two cases open. We take `ceil(share * gaps)` gaps, so at least one; and a request
    with a single token has no gap and a TBT of 0, so that only its TTFT decides whether it is effective.

    Args:
        times_s: when each token came, in order.
        share: the share of gaps that counts, above 0 and up to 1.

    Raises:
        ValueError: when the share is out of range.
    """
    return tbt_of_gaps_s(list(map(sub, times_s[1:], times_s)), share=share)


def tbt_of_gaps_s(gaps_s: Collection[float], *, share: float = 0.1) -> float:
    """`tbt_longest_gaps_s` of a request whose tokens came with these gaps, in any order.

    Raises:
        ValueError: when the share is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of longest gaps is {share!r}; allowed are numbers above 0 and up to 1")
    if not gaps_s:
        return 0.0
    # 0.1 * 70 is a little more than 7 in binary: take the rounding error off before rounding up
    return mean(sorted(gaps_s)[-max(1, math.ceil(share * len(gaps_s) - 1e-9)) :])


def tbt_mean_gap_s(times_s: Sequence[float]) -> float:
    """TBT of one request as we read arXiv v3 §8.1: the mean of all its token gaps (time per output token).

    The edition takes percentiles of TBT over requests without saying what the TBT of a request is; this
    is our assumption. A request with a single token has a TBT of 0.

    Args:
        times_s: when each token came, in order.
    """
    if len(times_s) < 2:
        return 0.0
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def request_table(records: Iterable[Record]) -> "pd.DataFrame":
    """One row per request, in order of arrival.

    Columns: `arrival_s`, `input_tokens`, `ttft_s`, `tbt_fast_s`, `tbt_arxiv_s`, `output_tokens` (received so
    far), `end` (finished, rejected or running) and `finish_s`. Latencies are NaN for a request
    that received no token, `finish_s` for one that did not finish.
    """
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
