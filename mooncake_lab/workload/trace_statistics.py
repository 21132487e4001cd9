"""A trace in numbers, those that the papers print and others, and what its requests share.

Counts of shared blocks assume a cache that never evicts, so they bound what any eviction policy can reach.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_lab.workload.trace import Trace

_COMMON_SHARE = 0.01


def request_of_block(trace: Trace) -> npt.NDArray[np.int64]:
    """Shape (total blocks,): the request each entry of `block_ids` belongs to."""
    return np.repeat(np.arange(len(trace)), np.diff(trace.block_starts))


def use_counts(trace: Trace) -> npt.NDArray[np.int64]:
    """Shape (unique blocks,): how many requests used each block, in order of block id (arXiv Fig. 6)."""
    return np.unique(trace.block_ids, return_counts=True)[1]


def seen_before(trace: Trace) -> npt.NDArray[np.bool_]:
    """Shape (total blocks,): whether an earlier entry of `block_ids` names the same block."""
    seen = np.ones(len(trace.block_ids), dtype=np.bool_)
    seen[np.unique(trace.block_ids, return_index=True)[1]] = False
    return seen


def reusable_blocks(trace: Trace) -> npt.NDArray[np.int64]:
    """Shape (n,): blocks at the front of each request that an earlier request left behind.

    Counting stops at the first block not seen before: KVCache behind a gap is of no use.
    """
    seen = seen_before(trace)
    position = np.arange(len(seen)) - np.repeat(trace.block_starts[:-1], np.diff(trace.block_starts))
    first_new = np.where(seen, np.iinfo(np.int64).max, position)
    found = np.minimum.reduceat(first_new, trace.block_starts[:-1]) if len(seen) else np.zeros(0, np.int64)
    return np.minimum(found, np.diff(trace.block_starts))


def reuse_gaps_s(trace: Trace) -> npt.NDArray[np.float64]:
    """Shape (reuses,): seconds between each use of a block and the next use of the same block."""
    order = np.argsort(trace.block_ids, kind="stable")
    ids = trace.block_ids[order]
    at_s = trace.arrival_s[request_of_block(trace)[order]]
    return np.diff(at_s)[np.diff(ids) == 0]


def conversation_sizes(trace: Trace, *, common_share: float = _COMMON_SHARE) -> npt.NDArray[np.int64]:
    """Shape (conversations,): requests of each inferred conversation, largest first.

    Requests belong together when they share the first block that is not part of a prompt used by more
    than `common_share` of all requests. A request that holds nothing else stands alone. Turns that
    diverged within their first own block are counted apart, so the sizes are a lower bound.

    Raises:
        ValueError: when `common_share` is not between 0 and 1.
    """
    if not 0 < common_share <= 1:
        raise ValueError(f"common_share is {common_share!r}; allowed are shares above 0 up to 1")
    _, inverse, counts = np.unique(trace.block_ids, return_inverse=True, return_counts=True)
    own = counts[inverse] <= max(1.0, common_share * len(trace))
    owner = request_of_block(trace)[own]
    first = np.unique(owner, return_index=True)[1]
    sizes = np.unique(trace.block_ids[own][first], return_counts=True)[1]
    alone = np.ones(len(trace) - len(first), dtype=np.int64)
    return np.sort(np.concatenate([sizes, alone]))[::-1]


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
    gaps_s = np.diff(trace.arrival_s)
    duration_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    uses = use_counts(trace)
    reuse_s = reuse_gaps_s(trace)
    reused_tokens = np.minimum(reusable_blocks(trace) * trace.block_size_tokens, trace.input_tokens)
    return TraceStatistics(
        requests=len(trace),
        mean_input_tokens=float(trace.input_tokens.mean()),
        mean_output_tokens=float(trace.output_tokens.mean()),
        total_input_tokens=int(trace.input_tokens.sum()),
        total_output_tokens=int(trace.output_tokens.sum()),
        input_tokens=_spread(trace.input_tokens),
        output_tokens=_spread(trace.output_tokens),
        mean_input_output_ratio=float((trace.input_tokens / trace.output_tokens).mean()),
        duration_s=duration_s,
        requests_per_s=len(trace) / duration_s if duration_s > 0 else None,
        distinct_timestamps=len(np.unique(trace.arrival_s)),
        interarrival_cv=float(gaps_s.std() / gaps_s.mean()) if duration_s > 0 else None,
        block_size_tokens=trace.block_size_tokens,
        blocks=len(trace.block_ids),
        unique_blocks=len(uses),
        ideal_block_hit_rate=1 - len(uses) / len(trace.block_ids),
        ideal_token_hit_rate=float(reused_tokens.sum() / trace.input_tokens.sum()),
        mean_uses_per_block=float(uses.mean()),
        single_use_share=float((uses == 1).mean()),
        max_uses=int(uses.max()),
        mean_reuse_gap_s=float(reuse_s.mean()) if len(reuse_s) else None,
        p50_reuse_gap_s=_percentile(reuse_s, 50),
        p90_reuse_gap_s=_percentile(reuse_s, 90),
    )


def _spread(values: npt.NDArray[np.int64]) -> Spread:
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Spread(min=float(values.min()), p50=p50, p90=p90, p99=p99, max=float(values.max()))


def _percentile(values: npt.NDArray[np.float64], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None
