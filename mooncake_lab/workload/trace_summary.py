"""A trace in numbers, those that the papers print and others, without numpy.

Counts of shared blocks assume a cache that never evicts, so they bound what any eviction policy can reach.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from mooncake_lab.core import BlockKey, TracedRequest
from mooncake_lab.core.averages import mean, percentile
from mooncake_lab.workload.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a quantity is spread over requests; percentiles interpolate between neighbours."""

    min: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """A trace in numbers (arXiv §4, FAST'25 Table 2)."""

    requests: int
    mean_input_tokens: float
    mean_output_tokens: float
    total_input_tokens: int
    total_output_tokens: int
    input_tokens: Spread
    output_tokens: Spread
    mean_input_output_ratio: float
    """Mean over the requests of input length / output length; not a ratio of means."""
    duration_s: float
    """From the first arrival to the last."""
    requests_per_s: float | None
    """Requests over the duration; None when all arrive at once."""
    distinct_timestamps: int
    interarrival_cv: float | None
    """Standard deviation over mean of the gaps between arrivals: 1 for Poisson arrivals; None without gaps."""
    block_size_tokens: int
    blocks: int
    unique_blocks: int
    ideal_block_hit_rate: float
    """Share of block uses that an earlier one had already filled in: the most any cache of blocks can hit."""
    ideal_token_hit_rate: float
    """The same weighted by prompt tokens: reusable front blocks in tokens over all prompt tokens."""
    mean_uses_per_block: float
    single_use_share: float
    """Share of the unique blocks that exactly one request used."""
    max_uses: int
    mean_reuse_gap_s: float | None
    """Time from a use of a block to its next; None when nothing is used twice."""
    p50_reuse_gap_s: float | None
    p90_reuse_gap_s: float | None


OF_IDS: Final = (
    "unique_blocks", "ideal_block_hit_rate", "ideal_token_hit_rate", "mean_uses_per_block", "single_use_share",
    "max_uses", "mean_reuse_gap_s", "p50_reuse_gap_s", "p90_reuse_gap_s",
)  # fmt: skip
"""What follows from block ids, and from nothing where a trace has none (`Trace.ids`)."""


def statistics(trace: Trace) -> TraceStatistics:
    """Compute the statistics of a trace.

    Raises:
        ValueError: when the trace has no requests.
    """
    if len(trace) == 0:
        raise ValueError(f"trace {trace.name!r} has no requests, so it has no statistics; at least 1 is needed")
    requests = list(trace.requests())
    arrivals_s = [each.request.arrival_s for each in requests]
    input_tokens = [each.request.input_tokens for each in requests]
    output_tokens = [each.output_tokens for each in requests]
    shared = _count_shared(requests)
    uses, reuse_gaps_s = list(shared.uses.values()), sorted(shared.reuse_gaps_s)
    blocks = sum(uses)
    duration_s = arrivals_s[-1] - arrivals_s[0]
    return TraceStatistics(
        requests=len(requests),
        mean_input_tokens=mean(input_tokens),
        mean_output_tokens=mean(output_tokens),
        total_input_tokens=sum(input_tokens),
        total_output_tokens=sum(output_tokens),
        input_tokens=_spread(input_tokens),
        output_tokens=_spread(output_tokens),
        mean_input_output_ratio=mean(
            [tokens / answer for tokens, answer in zip(input_tokens, output_tokens, strict=True)]
        ),
        duration_s=duration_s,
        requests_per_s=len(requests) / duration_s if duration_s > 0 else None,
        distinct_timestamps=len(set(arrivals_s)),
        interarrival_cv=_variation([later - earlier for earlier, later in pairwise(arrivals_s)]),
        block_size_tokens=trace.block_size_tokens,
        blocks=blocks,
        unique_blocks=len(uses),
        ideal_block_hit_rate=1 - len(uses) / blocks,
        ideal_token_hit_rate=shared.reused_tokens / sum(input_tokens),
        mean_uses_per_block=blocks / len(uses),
        single_use_share=uses.count(1) / len(uses),
        max_uses=max(uses),
        mean_reuse_gap_s=mean(reuse_gaps_s) if reuse_gaps_s else None,
        p50_reuse_gap_s=percentile(reuse_gaps_s, 50) if reuse_gaps_s else None,
        p90_reuse_gap_s=percentile(reuse_gaps_s, 90) if reuse_gaps_s else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What the requests of a trace have in common."""

    uses: dict[BlockKey, int]
    """How often each block is used."""
    reuse_gaps_s: list[float]
    """From each use of a block to its next."""
    reused_tokens: int
    """Tokens in blocks at the front of requests that earlier requests left behind."""


def _count_shared(requests: Sequence[TracedRequest]) -> _Shared:
    uses: dict[BlockKey, int] = {}
    last_s: dict[BlockKey, float] = {}
    gaps_s: list[float] = []
    reused_tokens = 0
    for request in (traced.request for traced in requests):
        reusable, is_front = 0, True
        for key in request.block_keys:
            uses[key] = uses.get(key, 0) + 1
            if key in last_s:
                gaps_s.append(request.arrival_s - last_s[key])
                reusable += is_front
            else:
                is_front = False
            last_s[key] = request.arrival_s
        reused_tokens += min(reusable * request.block_size_tokens, request.input_tokens)
    return _Shared(uses=uses, reuse_gaps_s=gaps_s, reused_tokens=reused_tokens)


def _variation(gaps_s: Sequence[float]) -> float | None:
    """Standard deviation over mean; None where the mean is 0 or there is no gap."""
    if not any(gaps_s):
        return None
    average_s = mean(gaps_s)
    return math.sqrt(mean([(gap_s - average_s) ** 2 for gap_s in gaps_s])) / average_s


def _spread(values: Sequence[int]) -> Spread:
    ordered = sorted(values)
    p50, p90, p99 = (float(percentile(ordered, percent)) for percent in (50, 90, 99))
    return Spread(min=float(ordered[0]), p50=p50, p90=p90, p99=p99, max=float(ordered[-1]))
