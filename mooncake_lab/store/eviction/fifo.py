"""FIFO: the block that came first leaves first, however often it was used."""

from collections import OrderedDict
from collections.abc import Set as AbstractSet

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NOTHING_SPARED, NothingToEvictError


class FIFO:
    """Evicts the oldest key. A hit changes nothing, so a lookup needs no lock: the cheapest policy to run."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: OrderedDict[BlockKey, None] = OrderedDict()  # oldest first

    def touch(self, key: BlockKey, /) -> None:
        """Change nothing."""

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key as the youngest one."""
        self._queue[key] = None

    def victim(
        self, _incoming: BlockKey | None = None, spared: AbstractSet[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Forget and return the oldest key that is not spared."""
        for key in self._queue:
            if key not in spared:
                del self._queue[key]
                return key
        raise NothingToEvictError(len(self))

    def remove(self, key: BlockKey, /) -> None:
        """Forget the key."""
        del self._queue[key]

    def __contains__(self, key: object, /) -> bool:
        return key in self._queue

    def __len__(self) -> int:
        return len(self._queue)
