"""LFU: the block with the fewest uses leaves first."""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NOTHING_SPARED, NothingToEvictError


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
