"""Belady's optimum: the block whose next use is farthest in the future leaves. It needs that future."""

from collections.abc import Sequence

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction.ranked import Ranked


class Belady(Ranked):
    """Evicts the key that is next used last (MIN; Belady 1966): no policy gets more block hits from equal blocks.

    A bound, not a policy that a system can run: `foresee` must be told every access before the first one. The
    optimum is of *block* hits; a policy that keeps prefixes whole can have more *prefix* hits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._future: Sequence[BlockKey] = ()
        self._next_use: list[int] = []  # of the key accessed at each step, the step of its next access
        self._now = 0

    def foresee(self, accesses: Sequence[BlockKey]) -> None:
        """Learn the whole sequence of accesses, hits and misses alike, in order.

        Raises:
            ValueError: when accesses were already made.
        """
        if self._now:
            raise ValueError(
                f"Belady's optimum learns the future after {self._now} accesses; allowed is before any"
            )
        self._future = accesses
        self._next_use = [len(accesses)] * len(accesses)  # never: later than all others
        last_seen: dict[BlockKey, int] = {}
        for step, key in enumerate(accesses):
            before = last_seen.get(key)
            if before is not None:
                self._next_use[before] = step
            last_seen[key] = step

    def touch(self, key: BlockKey, /) -> None:
        """Take one step into the future; for its errors see `insert`."""
        self.insert(key)

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key, and take one step into the future.

        Raises:
            ValueError: when the access is not the foreseen one.
        """
        now = self._now
        if now >= len(self._future) or self._future[now] != key:
            foreseen = repr(self._future[now]) if now < len(self._future) else "no access at all"
            raise ValueError(
                f"Belady's optimum meets key {key!r} at access {now}, but foresaw {foreseen};"
                " tell `foresee` the whole sequence of accesses first"
            )
        self._now = now + 1
        self._push(key, (-self._next_use[now], now))  # of those that are never used again, the oldest leaves first
