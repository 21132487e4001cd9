"""What the requests of a trace share, as arrays over its requests or blocks.

Counts of shared blocks assume a cache that never evicts, so they bound what any eviction policy can reach.
"""

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
