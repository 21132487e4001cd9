"""Policies that rank blocks: `Ranked`, and LFU and LengthAware, whose ranks begin with the number of uses."""

import heapq

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NOTHING_SPARED, NothingToEvictError

_SLACK_ENTRIES = 64


class Ranked:
    """Evicts the key of the lowest rank. A subclass gives a key a new rank with each access; none are equal."""

    def __init__(self) -> None:
        self._entry: dict[BlockKey, tuple[tuple[int, ...], BlockKey]] = {}  # rank and key
        self._heap: list[tuple[tuple[int, ...], BlockKey]] = []  # the entries, and some that are outdated

    def victim(
        self, _incoming: BlockKey | None = None, spared: frozenset[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Forget and return the key of the lowest rank that is not spared."""
        passed: list[tuple[tuple[int, ...], BlockKey]] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                key = entry[1]
                if self._entry.get(key) is not entry:
                    continue  # outdated
                if key not in spared:
                    del self._entry[key]
                    return key
                passed.append(entry)
        finally:
            for entry in passed:
                heapq.heappush(self._heap, entry)
        raise NothingToEvictError(len(self))

    def remove(self, key: BlockKey, /) -> None:
        """Forget the key and its rank."""
        del self._entry[key]

    def __contains__(self, key: object, /) -> bool:
        return key in self._entry

    def __len__(self) -> int:
        return len(self._entry)

    def _push(self, key: BlockKey, rank: tuple[int, ...]) -> None:
        entry = self._entry[key] = (rank, key)
        if len(self._heap) > 2 * len(self._entry) + _SLACK_ENTRIES:
            # mostly outdated entries by now: an hour of trace must not grow without bound
            self._heap = list(self._entry.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)


class LengthAware(Ranked):
    """Evicts the key with the fewest uses; among equals the latest in its request, then the least recently used.

    arXiv Table 1 names it in one clause ("similar to LFU", but preferring blocks that occur later in a
    request). We read it as: the later block goes first, which keeps prefixes whole. Read the other way round it
    evicts first blocks and nothing matches any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0

    def touch(self, key: BlockKey, /) -> None:
        """Count one more use."""
        (uses, minus_position, _), _ = self._entry[key]
        self._use(key, uses + 1, minus_position)

    def insert(self, key: BlockKey, position: int = 0, /) -> None:
        """Hold the key with one use, and its place in the request."""
        self._use(key, 1, -position)

    def _use(self, key: BlockKey, uses: int, minus_position: int) -> None:
        self._clock += 1
        self._push(key, (uses, minus_position, self._clock))


class LFU(LengthAware):
    """Evicts the key with the fewest uses since it was inserted, the least recently used among equals.

    arXiv Table 1 does not say whether a count outlives its block. Here it does not (*in-cache* counts):
    a block that comes back starts again at one.
    """

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key with one use, wherever it is in its request."""
        super().insert(key)
