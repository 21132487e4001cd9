"""SIEVE: one queue and a hand that walks from old to new, sparing each block once for a hit."""

from collections import OrderedDict

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NOTHING_SPARED
from mooncake_lab.store.eviction.queued import QueuedPolicy


class SIEVE(QueuedPolicy):
    """Evicts the first block under its hand without a hit since the hand last passed (Zhang et al., NSDI'24).

    Mooncake's Transfer Engine keeps its connections with it (FAST'25 §4.3); its store does not. The queue is held
    in two parts, behind the hand and ahead of it, so that walking is moving a key from one to the other.
    """

    def __init__(self) -> None:
        self._behind: OrderedDict[BlockKey, bool] = OrderedDict()  # key to hit or not; oldest first
        self._ahead: OrderedDict[BlockKey, bool] = OrderedDict()  # empty only when there is no key at all
        super().__init__(self._ahead, self._behind)

    def touch(self, key: BlockKey, /) -> None:
        """Mark the key as hit."""
        (self._ahead if key in self._ahead else self._behind)[key] = True

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key as the newest one, not hit."""
        self._ahead[key] = False

    def victim(
        self, _incoming: BlockKey | None = None, spared: frozenset[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Forget and return the first unhit key the hand meets, clearing marks (but not of the spared)."""
        self._check_victim(spared)
        while True:
            key, hit = self._ahead.popitem(last=False)
            if key in spared:
                self._behind[key] = hit
            elif hit:
                self._behind[key] = False
            self._wrap()
            if not hit and key not in spared:
                return key

    def remove(self, key: BlockKey, /) -> None:
        """Forget the key; the hand stays where it is."""
        super().remove(key)
        self._wrap()

    def _wrap(self) -> None:
        """Start again from the oldest key when the hand has met the newest."""
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead
