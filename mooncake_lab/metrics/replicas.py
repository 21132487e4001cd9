"""The number of nodes that hold a block over time (FAST'25 Fig. 11), counted from the cache changes of a log."""

from collections import Counter
from collections.abc import Iterable, Iterator

from mooncake_lab.core import BlockKey, CacheChanged, Record


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
