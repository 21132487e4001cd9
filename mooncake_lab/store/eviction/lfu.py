"""LFU: the block with the fewest uses leaves first; and LengthAware, in which ties go by position."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NOTHING_SPARED, NothingToEvictError

_SLACK_ENTRIES = 64
_Entry: TypeAlias = tuple[int, int, int, BlockKey]
"""Uses, minus the position, the time of the last use (unique, so keys are never compared), key."""


class LFU:
    """Evicts the key with the fewest uses since it was inserted, the least recently used among equals.

    arXiv Table 1 does not say whether a count outlives its block. Here it does not (*in-cache* counts):
    a block that comes back starts again at one.
    """

    __slots__ = ("_by_count", "_count")

    def __init__(self) -> None:
        self._count: dict[BlockKey, int] = {}
        self._by_count: dict[int, OrderedDict[BlockKey, None]] = {}  # no empty ones; least recently used first

    def touch(self, key: BlockKey, /) -> None:
        """Count one more use."""
        count = self._count[key]
        self._leave(key, count)
        self._join(key, count + 1)

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key with one use."""
        self._join(key, 1)

    def victim(
        self, _incoming: BlockKey | None = None, spared: AbstractSet[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Forget and return the key with the fewest uses that is not spared."""
        for count in self._counts():
            for key in self._by_count[count]:
                if key not in spared:
                    self.remove(key)
                    return key
        raise NothingToEvictError(len(self))

    def remove(self, key: BlockKey, /) -> None:
        """Forget the key and its count."""
        self._leave(key, self._count.pop(key))

    def __contains__(self, key: object, /) -> bool:
        return key in self._count

    def __len__(self) -> int:
        return len(self._count)

    def _counts(self) -> Iterator[int]:
        """The counts that occur, upwards; most victims have a count of one, so that one comes without sorting."""
        if 1 in self._by_count:
            yield 1
        yield from sorted(count for count in self._by_count if count > 1)

    def _join(self, key: BlockKey, count: int) -> None:
        self._count[key] = count
        bucket = self._by_count.get(count)
        if bucket is None:
            bucket = self._by_count[count] = OrderedDict()
        bucket[key] = None

    def _leave(self, key: BlockKey, count: int) -> None:
        bucket = self._by_count[count]
        del bucket[key]
        if not bucket:
            del self._by_count[count]


class LengthAware:
    """Evicts the key with the fewest uses; among equals the latest in its request, then the least recently used.

    arXiv Table 1 names it in one clause ("similar to LFU", but preferring blocks that occur later in a
    request). We read it as: the later block goes first, which keeps prefixes whole. Read the other way round it
    evicts first blocks and nothing matches any more.
    """

    __slots__ = ("_clock", "_entry", "_heap")

    def __init__(self) -> None:
        self._clock = 0
        self._entry: dict[BlockKey, _Entry] = {}
        self._heap: list[_Entry] = []  # the entries, and some that are outdated

    def touch(self, key: BlockKey, /) -> None:
        """Count one more use."""
        uses, minus_position, _, _ = self._entry[key]
        self._push(key, uses + 1, minus_position)

    def insert(self, key: BlockKey, position: int = 0, /) -> None:
        """Hold the key with one use, and its place in the request."""
        self._push(key, 1, -position)

    def victim(
        self, _incoming: BlockKey | None = None, spared: AbstractSet[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Forget and return the first key of the order above that is not spared."""
        passed: list[_Entry] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                key = entry[3]
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
        """Forget the key and its count."""
        del self._entry[key]

    def __contains__(self, key: object, /) -> bool:
        return key in self._entry

    def __len__(self) -> int:
        return len(self._entry)

    def _push(self, key: BlockKey, uses: int, minus_position: int) -> None:
        self._clock += 1
        entry = self._entry[key] = (uses, minus_position, self._clock, key)
        if len(self._heap) > 2 * len(self._entry) + _SLACK_ENTRIES:
            # mostly outdated entries by now: an hour of trace must not grow without bound
            self._heap = list(self._entry.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)
