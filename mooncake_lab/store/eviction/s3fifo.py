"""S3-FIFO: a small first-in-first-out queue sorts out blocks used once before they reach the main one."""

from collections import OrderedDict

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NOTHING_SPARED
from mooncake_lab.store.eviction.queued import QueuedPolicy

_MOST_USES_COUNTED = 3
_USES_TO_STAY = 2


class S3FIFO(QueuedPolicy):
    """Three FIFO queues: small, main and ghost (Yang et al., SOSP'23); not in the Mooncake papers.

    A new block enters the small queue, a tenth of the capacity. After two hits there it moves to the main queue.
    Otherwise it leaves, and only its key is remembered. A remembered key that returns enters the main queue.

    Args:
        capacity_blocks: the capacity of the store.
        small_share: the share of the small queue.
        fill_main_first: while nothing was evicted yet and the small queue is full, newcomers go straight to the
            main queue. libCacheSim does so; the published algorithm does not. It only shapes the warm-up, but on a
            trace of one hour the warm-up is a good part of the whole.

    Raises:
        ValueError: when a parameter is out of range.
    """

    def __init__(self, capacity_blocks: int, *, small_share: float = 0.1, fill_main_first: bool = False) -> None:
        if capacity_blocks < 1 or not 0 < small_share < 1:
            raise ValueError(
                f"S3-FIFO for {capacity_blocks} blocks with a small queue of {small_share} of them;"
                " at least 1 block and a share between 0 and 1 are needed"
            )
        self._small_capacity = max(1, int(small_share * capacity_blocks))
        self._main_capacity = capacity_blocks - self._small_capacity
        self._ghost_capacity = int((1 - small_share) * capacity_blocks)
        self._small: OrderedDict[BlockKey, int] = OrderedDict()  # key to uses after the first; oldest first
        self._main: OrderedDict[BlockKey, int] = OrderedDict()
        super().__init__(self._small, self._main)
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._fills_main = fill_main_first
        self._returning: BlockKey | None = None  # a remembered key on its way in

    def touch(self, key: BlockKey, /) -> None:
        """Count one more use, up to three. No queue changes its order."""
        queue = self._small if key in self._small else self._main
        if queue[key] < _MOST_USES_COUNTED:
            queue[key] += 1

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key: in the main queue when it is remembered, else in the small one."""
        self._recall(key)
        small_is_full = len(self._small) >= self._small_capacity
        to_main = key == self._returning or (self._fills_main and small_is_full)
        (self._main if to_main else self._small)[key] = 0
        self._returning = None

    def victim(
        self, incoming: BlockKey | None = None, spared: frozenset[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Forget and return a block without a second use, moving on the used ones it meets on the way.

        A spared block is in use, and treated as wanted.
        """
        self._check_victim(spared)
        self._fills_main = False
        if incoming is not None:
            self._recall(incoming)
        while True:
            chosen = self._from_main(spared) if self._main_is_next(spared) else self._from_small(spared)
            if chosen is not None:
                return chosen

    def _recall(self, incoming: BlockKey) -> None:
        """Take a returning key out of the ghosts before an eviction can push it out of them."""
        if incoming in self._ghosts:
            del self._ghosts[incoming]
            self._returning = incoming

    def _main_is_next(self, spared: frozenset[BlockKey]) -> bool:
        if not self._small:
            return True
        everything_spared = bool(spared) and all(key in spared for key in self._main)
        return len(self._main) > self._main_capacity and not everything_spared

    def _from_small(self, spared: frozenset[BlockKey]) -> BlockKey | None:
        """Move wanted blocks to the main queue until an unwanted one leaves; `None` when all were wanted."""
        while self._small:
            key, uses = self._small.popitem(last=False)
            if uses < _USES_TO_STAY and key not in spared:
                self._ghosts[key] = None
                if len(self._ghosts) > self._ghost_capacity:
                    self._ghosts.popitem(last=False)
                return key
            self._main[key] = 0
        return None

    def _from_main(self, spared: frozenset[BlockKey]) -> BlockKey | None:
        """Give each used block another round, with one use less, until an unused one leaves."""
        while self._main:
            key, uses = self._main.popitem(last=False)
            if key in spared:
                self._main[key] = uses
            elif uses:
                self._main[key] = uses - 1
            else:
                return key
        return None
