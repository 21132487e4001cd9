"""What policies share that keep their keys in queues."""

from collections import OrderedDict
from typing import Any

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NothingToEvictError


class QueuedPolicy:
    """A policy that keeps its keys in queues, of which each key is in one."""

    def __init__(self, *queues: OrderedDict[BlockKey, Any]) -> None:
        self._queues = queues

    def remove(self, key: BlockKey, /) -> None:
        """Forget the key without remembering it."""
        del next(queue for queue in self._queues if key in queue)[key]

    def __contains__(self, key: object, /) -> bool:
        return any(key in queue for queue in self._queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def _check_victim(self, spared: frozenset[BlockKey]) -> None:
        """Refuse to choose where every key is spared."""
        if not len(self) or (spared and all(key in spared for queue in self._queues for key in queue)):
            raise NothingToEvictError(len(self))
