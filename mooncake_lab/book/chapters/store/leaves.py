"""Replay of a cache that holds whole prefixes: a block is there only where all blocks before it are.

Only leaves leave, blocks whose continuations are all gone, so no block lies behind a gap. These are the rules of
radix trees as in SGLang, and of `kvcache-simulator`, the hit-rate simulator of Mooncake's authors. `replay` beside
this file has other rules: a block leaves whatever continues it, and blocks behind a gap still take room.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import BlockKey

LeafOrder: TypeAlias = Literal["lru", "slru", "optimum"]
"""Which leaf leaves first. `lru`: the one last used longest ago. `slru`, segmented LRU: the same, but leaves
that were never found again leave before those that were. `optimum`: the one that is next used last; a block that
is itself next used no sooner is not taken up at all (bypass)."""
_NEVER_USED_SO_LATE: Final = 1 << 62


def replay_leaves(
    requests: Sequence[Sequence[BlockKey]], capacity_blocks: int, order: LeafOrder = "lru"
) -> npt.NDArray[np.int64]:
    """Shape (requests,): blocks of each prompt's front that a cache of prefixes still holds.

    Args:
        requests: the block keys of each, front to back; a key names its block and all before it.
        capacity_blocks: of the cache.
        order: which leaf leaves first.

    Raises:
        ValueError: when the capacity is negative.
    """
    if capacity_blocks < 0:
        raise ValueError(f"a cache of {capacity_blocks} blocks; allowed are 0 and more")
    next_uses = _next_uses(requests) if order == "optimum" else None
    tree = _PrefixTree(capacity_blocks, kept_longer=_NEVER_USED_SO_LATE if order == "slru" else 0)
    found = np.zeros(len(requests), np.int64)
    clock = 0
    for number, keys in enumerate(requests):
        # the tree evicts its largest rank: the next use, or how long ago the last one was
        if next_uses is None:
            ranks: Sequence[int] = range(-clock, -clock - len(keys), -1)
            clock += len(keys)
        else:
            ranks = next_uses[number]
        found[number] = tree.use(keys, ranks, bypass=order == "optimum")
    return found


def _next_uses(requests: Sequence[Sequence[BlockKey]]) -> list[list[int]]:
    """For each block of each request, the number of the next request that has it; that of none is the largest."""
    later: dict[BlockKey, int] = {}
    never = len(requests)
    found = list[list[int]]()
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number]
        found.append([later.get(key, never) for key in keys])
        later.update(dict.fromkeys(keys, number))
    return found[::-1]


@dataclass(slots=True)
class _PrefixTree:
    """The blocks that are held. Mutable: every use changes it."""

    capacity: int
    kept_longer: int
    """What a block that is found again has less in rank."""
    children: dict[BlockKey, int] = field(default_factory=dict[BlockKey, int])
    """How many continuations of each block are held."""
    parent: dict[BlockKey, BlockKey | None] = field(default_factory=dict[BlockKey, BlockKey | None])
    rank: dict[BlockKey, int] = field(default_factory=dict[BlockKey, int])
    leaves: list[tuple[int, int, BlockKey]] = field(default_factory=list[tuple[int, int, BlockKey]])
    """A heap of the largest ranks; entries of blocks that changed meanwhile are passed over."""
    entries: int = 0

    def use(self, keys: Sequence[BlockKey], ranks: Sequence[int], *, bypass: bool) -> int:
        """Find the front of a prompt, and take up what is missing as far as there is room; the blocks found."""
        found = 0
        while found < len(keys) and keys[found] in self.children:
            self._set_rank(keys[found], ranks[found] - self.kept_longer)
            found += 1
        kept = {*keys[:found]}
        before = keys[found - 1] if found else None
        for key, rank in zip(keys[found:], ranks[found:], strict=True):
            if len(self.children) >= self.capacity and not self._evict(kept, rank if bypass else None):
                break
            if before is not None and before not in self.children:
                break  # the block before it has just left to make room for it
            self.children[key], self.parent[key] = 0, before
            if before is not None:
                self.children[before] += 1
            self._set_rank(key, rank)
            before = key
        return found

    def _set_rank(self, key: BlockKey, rank: int) -> None:
        self.rank[key] = rank
        self._offer(key)

    def _offer(self, key: BlockKey) -> None:
        if not self.children[key]:
            self.entries += 1
            heapq.heappush(self.leaves, (-self.rank[key], self.entries, key))

    def _evict(self, kept: set[BlockKey], at_most: int | None) -> bool:
        """Let the leaf with the largest rank go, unless it is kept or its rank is no larger than `at_most`."""
        passed = list[tuple[int, int, BlockKey]]()
        gone = False
        while self.leaves and not gone:
            entry = heapq.heappop(self.leaves)
            rank, key = -entry[0], entry[2]
            if self.children.get(key) != 0 or self.rank[key] != rank:
                continue
            if key in kept:
                passed.append(entry)
                continue
            if at_most is not None and rank <= at_most:
                passed.append(entry)
                break
            self._remove(key)
            gone = True
        for entry in passed:
            heapq.heappush(self.leaves, entry)
        return gone

    def _remove(self, key: BlockKey) -> None:
        del self.children[key], self.rank[key]
        parent = self.parent.pop(key)
        if parent is not None:
            self.children[parent] -= 1
            self._offer(parent)
