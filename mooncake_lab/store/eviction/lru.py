"""FIFO and LRU: the block that came first leaves first, or the one that was used least recently."""

from collections import OrderedDict

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NOTHING_SPARED, NothingToEvictError
from mooncake_lab.store.eviction.queued import QueuedPolicy


class FIFO(QueuedPolicy):
    """Evicts the oldest key. A hit changes nothing, so a lookup needs no lock: the cheapest policy to run."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()  # oldest first
        super().__init__(self._order)

    def touch(self, key: BlockKey, /) -> None:
        """Change nothing."""

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key as the youngest one."""
        self._order[key] = None

    def victim(
        self, _incoming: BlockKey | None = None, spared: frozenset[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Forget and return the oldest key that is not spared."""
        if self._order and not spared:
            return self._order.popitem(last=False)[0]
        for key in self._order:
            if key not in spared:
                del self._order[key]
                return key
        raise NothingToEvictError(len(self))


class LRU(FIFO):
    """Evicts the least recently used key; the best of the three policies in arXiv Table 1."""

    def touch(self, key: BlockKey, /) -> None:
        """Make the key the most recently used one, and so the last in the queue."""
        self._order.move_to_end(key)
