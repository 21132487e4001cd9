"""Hit rates, and how many nodes hold a block."""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import BlockKey, CacheChanged, Moved, Prefilled, Record, sum_in_order


def token_hit_rate(reused_tokens: npt.ArrayLike, input_tokens: npt.ArrayLike) -> float:
    """Reused over all input tokens, so that a long prompt weighs more (FAST'25 Fig. 9, as we read it).

    Both have shape (requests,).

    Raises:
        ValueError: when shapes differ, there is no token, or a request reused more than it has.
    """
    reused, tokens = _pair(reused_tokens, input_tokens)
    return float(reused.sum() / tokens.sum())


def tier_hit_rates(records: Iterable[Record], kv_bytes_per_token: int) -> dict[str, float]:
    """Shares of all prompt tokens that are reused from DRAM and from SSD; together they are the token hit rate.

    A request has no more hits from SSD than it reused: a block that was read from SSD, and then evicted before the
    prefill began, is no hit, and one that was read again counts once.

    Args:
        records: a run's log; blocks that rise from SSD are its moves from `<instance>/ssd`.
        kv_bytes_per_token: KVCache bytes of a token.

    Raises:
        ValueError: when nothing was prefilled.
    """
    reused, ssd_bytes, computed = Counter[int](), Counter[int](), 0
    for record in records:
        if isinstance(record, Prefilled):
            reused[record.request_id] += record.reused_tokens
            computed += record.computed_tokens
        elif isinstance(record, Moved) and record.source.endswith("/ssd"):
            ssd_bytes[record.request_id] += record.bytes
    tokens = reused.total() + computed
    if not tokens:
        raise ValueError("a log without any prefill has no hit rate; at least 1 is needed")
    ssd_tokens = sum_in_order(
        min(ssd_bytes[request_id] / kv_bytes_per_token, count) for request_id, count in reused.items()
    )
    return {"dram": (reused.total() - ssd_tokens) / tokens, "ssd": ssd_tokens / tokens}


def covered_tokens(
    hit_blocks: npt.ArrayLike, input_tokens: npt.ArrayLike, block_size_tokens: int
) -> npt.NDArray[np.float64]:
    """Prompt tokens that hit prefix blocks cover, shape (requests,); the last block may be partial.

    Raises:
        ValueError: when shapes differ, or hits reach beyond the last block of a request.
    """
    tokens = np.asarray(input_tokens, dtype=np.float64)
    hits, _ = _pair(hit_blocks, np.ceil(tokens / block_size_tokens))
    return np.minimum(hits * block_size_tokens, tokens)


def _pair(part: npt.ArrayLike, whole: npt.ArrayLike) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    found, total = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    if found.shape != total.shape or not total.sum() > 0:
        raise ValueError(
            f"hits of shape {found.shape} and requests of shape {total.shape} asking for {total.sum()} in all;"
            " the shapes must agree and something must be asked for"
        )
    wrong = (found < 0) | (found > total)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(f"request {at} hit {found[at]:g} of {total[at]:g}; allowed are 0 to what it asked for")
    return found, total


def replicas_at(
    records: Iterable[Record], moments_s: Iterable[float]
) -> Iterator[tuple[float, Counter[BlockKey]]]:
    """Each moment with the number of caches that hold each block then; zero for a block that no cache holds.

    The iterator changes and yields the same counter each time: read it before the next moment.

    Args:
        records: a run's log.
        moments_s: in ascending order (s); what happens at a moment counts.
    """
    held, log = Counter[BlockKey](), iter(records)
    ahead = next(log, None)
    for at_s in moments_s:
        while ahead is not None and ahead.at_s <= at_s:
            if isinstance(ahead, CacheChanged):
                held.update(ahead.added)
                held.subtract(ahead.removed)
            ahead = next(log, None)
        yield at_s, held
