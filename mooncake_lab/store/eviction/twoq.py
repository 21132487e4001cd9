"""2Q: a first-in-first-out queue for newcomers, and an LRU list for keys that return after they left it."""

from collections import OrderedDict

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NOTHING_SPARED, NothingToEvictError
from mooncake_lab.store.eviction.queued import QueuedPolicy


class TwoQ(QueuedPolicy):
    """The full version of 2Q (Johnson and Shasha, VLDB'94); not in the Mooncake papers.

    A new block enters the first queue, A1in, and hits there change nothing. When A1in has more than its share, its
    oldest block leaves, and its key is remembered in A1out. A remembered key that returns enters the LRU list Am.

    Args:
        capacity_blocks: the capacity of the store.
        in_share: the share of A1in.
        out_share: the keys that A1out remembers, as a share of the capacity.

    Raises:
        ValueError: when a parameter is out of range.
    """

    def __init__(self, capacity_blocks: int, *, in_share: float = 0.25, out_share: float = 0.5) -> None:
        if capacity_blocks < 1 or not 0 < in_share < 1 or not out_share > 0:
            raise ValueError(
                f"2Q for {capacity_blocks} blocks with a first queue of {in_share} and {out_share} remembered;"
                " at least 1 block, a share between 0 and 1 and one above 0 are needed"
            )
        self._in_capacity = int(in_share * capacity_blocks)
        self._out_capacity = int(out_share * capacity_blocks)
        self._in: OrderedDict[BlockKey, None] = OrderedDict()  # A1in, oldest first
        self._main: OrderedDict[BlockKey, None] = OrderedDict()  # Am, least recently used first
        super().__init__(self._in, self._main)
        self._out: OrderedDict[BlockKey, None] = OrderedDict()  # A1out, oldest first
        self._returning: BlockKey | None = None  # a remembered key on its way in

    def touch(self, key: BlockKey, /) -> None:
        """Make a key of the LRU list the most recently used one."""
        if key in self._main:
            self._main.move_to_end(key)

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key: in the LRU list when it is remembered, else in the first queue."""
        self._recall(key)
        (self._main if key == self._returning else self._in)[key] = None
        self._returning = None

    def victim(
        self, incoming: BlockKey | None = None, spared: frozenset[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Forget and return the oldest key of the first queue if that is too long, else that of the LRU list."""
        if incoming is not None:
            self._recall(incoming)
        from_in = len(self._in) > self._in_capacity
        for queue in (self._in, self._main) if from_in else (self._main, self._in):
            for key in queue:
                if key not in spared:
                    del queue[key]
                    if queue is self._in:
                        self._remember(key)
                    return key
        raise NothingToEvictError(len(self))

    def _recall(self, incoming: BlockKey) -> None:
        """Take a returning key out of A1out before an eviction can push it out."""
        if incoming in self._out:
            del self._out[incoming]
            self._returning = incoming

    def _remember(self, key: BlockKey) -> None:
        self._out[key] = None
        if len(self._out) > self._out_capacity:
            self._out.popitem(last=False)
