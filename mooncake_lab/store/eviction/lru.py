"""LRU: the least recently used block leaves first."""

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.fifo import FIFO


class LRU(FIFO):
    """Evicts the least recently used key; the best of the three policies in arXiv Table 1."""

    __slots__ = ()

    def touch(self, key: BlockKey, /) -> None:
        """Make the key the most recently used one, and so the last in the queue."""
        self._order.move_to_end(key)
