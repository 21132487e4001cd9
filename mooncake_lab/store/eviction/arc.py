"""ARC: two LRU lists, once-used and used-again, whose shares adapt to what was evicted too early."""

from collections import OrderedDict

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NOTHING_SPARED, NothingToEvictError
from mooncake_lab.store.eviction.queued import QueuedPolicy


class ARC(QueuedPolicy):
    """Adaptive replacement (Megiddo and Modha, FAST'03); not in the Mooncake papers.

    Remembers as many evicted keys as it holds blocks. A miss on a remembered key says which of the two lists
    was too short, and moves the target length of the first list. The published pseudo code trims the memory
    before it evicts; trimming after the insertion, as here, forgets the same keys.

    Raises:
        ValueError: when `capacity_blocks` is below 1.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"ARC for {capacity_blocks} blocks; at least 1 is needed")
        self._capacity = capacity_blocks
        self._once: OrderedDict[BlockKey, None] = OrderedDict()  # T1; all lists: least recently used first
        self._again: OrderedDict[BlockKey, None] = OrderedDict()  # T2
        super().__init__(self._once, self._again)
        self._once_ghosts: OrderedDict[BlockKey, None] = OrderedDict()  # B1
        self._again_ghosts: OrderedDict[BlockKey, None] = OrderedDict()  # B2
        self._once_target = 0.0  # p
        self._adapted_for: BlockKey | None = None

    def touch(self, key: BlockKey, /) -> None:
        """Make the key the most recently used one of those used again."""
        if key in self._again:
            self._again.move_to_end(key)
        else:
            del self._once[key]
            self._again[key] = None

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key: among those used again when it is remembered, else among those used once."""
        self._adapt(key)
        self._adapted_for = None
        remembered = key in self._once_ghosts or key in self._again_ghosts
        self._once_ghosts.pop(key, None)
        self._again_ghosts.pop(key, None)
        (self._again if remembered else self._once)[key] = None
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self._capacity:
            self._once_ghosts.popitem(last=False)
        lists = (self._once, self._again, self._once_ghosts, self._again_ghosts)
        while self._again_ghosts and sum(map(len, lists)) > 2 * self._capacity:
            self._again_ghosts.popitem(last=False)

    def victim(
        self, incoming: BlockKey | None = None, spared: frozenset[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Forget and return the oldest key of the list that is too long, and remember it as evicted."""
        if incoming is not None:
            self._adapt(incoming)
        length = len(self._once)
        from_once = length > self._once_target or (
            length == self._once_target and length > 0 and incoming in self._again_ghosts
        )
        lists = [(self._once, self._once_ghosts), (self._again, self._again_ghosts)]
        for keys, ghosts in lists if from_once else reversed(lists):
            for key in keys:
                if key not in spared:
                    del keys[key]
                    ghosts[key] = None
                    return key
        raise NothingToEvictError(len(self))

    def _adapt(self, incoming: BlockKey) -> None:
        """Move the target once for each newcomer, before the lists change on its behalf."""
        if incoming == self._adapted_for:
            return
        self._adapted_for = incoming
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if incoming in self._once_ghosts:
            self._once_target = min(self._once_target + max(1.0, again / once), self._capacity)
        elif incoming in self._again_ghosts:
            self._once_target = max(self._once_target - max(1.0, once / again), 0.0)
