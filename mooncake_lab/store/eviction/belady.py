"""Belady's optimum: the block whose next use is farthest in the future leaves. It needs that future."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.policy import NOTHING_SPARED, NothingToEvictError

_NEVER = -1


class Belady:
    """Evicts the key that is next used last (MIN; Belady 1966): no policy gets more block hits from equal blocks.

    A bound, not a policy that a system can run: `foresee` must be told every access before the first one. The
    optimum is of *block* hits; a policy that keeps prefixes whole can have more *prefix* hits.
    """

    __slots__ = ("_dead", "_future", "_next_use", "_next_use_of", "_now", "_uses_to_come")

    def __init__(self) -> None:
        self._future: Sequence[BlockKey] = ()
        self._next_use: list[int] = []  # of the key accessed at each step, the step of its next access
        self._now = 0
        self._next_use_of: dict[BlockKey, int] = {}  # the held keys
        self._uses_to_come: list[int] = []  # heap of minus the steps at which held keys are next used
        self._dead: OrderedDict[BlockKey, None] = OrderedDict()  # held keys that are never used again

    def foresee(self, accesses: Sequence[BlockKey]) -> None:
        """Learn the whole sequence of accesses, hits and misses alike, in order.

        Raises:
            ValueError: when accesses were already made.
        """
        if self._now or self._next_use_of:
            raise ValueError(
                f"Belady's optimum learns the future after {self._now} accesses; allowed is before any"
            )
        self._future = accesses
        self._next_use = [_NEVER] * len(accesses)
        last_seen: dict[BlockKey, int] = {}
        for step, key in enumerate(accesses):
            before = last_seen.get(key)
            if before is not None:
                self._next_use[before] = step
            last_seen[key] = step

    def touch(self, key: BlockKey, /) -> None:
        """Take one step into the future.

        Raises:
            ValueError: when the access is not the foreseen one.
        """
        self._step(key)

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key, and take one step into the future.

        Raises:
            ValueError: when the access is not the foreseen one.
        """
        self._step(key)

    def victim(
        self, _incoming: BlockKey | None = None, spared: AbstractSet[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Forget and return the key that is never used again, else the one used last, among those not spared."""
        for key in self._dead:
            if key not in spared:
                self.remove(key)
                return key
        passed: list[int] = []
        try:
            while self._uses_to_come:
                minus_step = heapq.heappop(self._uses_to_come)
                key = self._future[-minus_step]
                if self._next_use_of.get(key) != -minus_step:
                    continue  # it left, or was used already
                if key not in spared:
                    del self._next_use_of[key]
                    return key
                passed.append(minus_step)
        finally:
            for minus_step in passed:
                heapq.heappush(self._uses_to_come, minus_step)
        raise NothingToEvictError(len(self))

    def remove(self, key: BlockKey, /) -> None:
        """Forget the key."""
        del self._next_use_of[key]
        self._dead.pop(key, None)

    def __contains__(self, key: object, /) -> bool:
        return key in self._next_use_of

    def __len__(self) -> int:
        return len(self._next_use_of)

    def _step(self, key: BlockKey) -> None:
        now = self._now
        if now >= len(self._future) or self._future[now] != key:
            foreseen = repr(self._future[now]) if now < len(self._future) else "no access at all"
            raise ValueError(
                f"Belady's optimum meets key {key!r} at access {now}, but foresaw {foreseen};"
                " tell `foresee` the whole sequence of accesses first"
            )
        self._now = now + 1
        step = self._next_use_of[key] = self._next_use[now]
        if step == _NEVER:
            self._dead[key] = None
        else:
            heapq.heappush(self._uses_to_come, -step)
