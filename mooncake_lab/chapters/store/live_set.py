"""The live set: the blocks that will be used again, which are all a perfect cache has to hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import BlockKey


@dataclass(frozen=True, slots=True, eq=False)
class LiveSet:
    """How many blocks a cache would have to hold, access by access; both vectors have shape (accesses,)."""

    live_blocks: npt.NDArray[np.int64]
    """Blocks used already that will be used again: what Belady's optimum keeps."""
    seen_blocks: npt.NDArray[np.int64]
    """Distinct blocks so far: what a cache that never evicts holds."""


def live_set(accesses: Sequence[BlockKey]) -> LiveSet:
    """The live and the seen blocks after each access of a sequence."""
    first: dict[BlockKey, int] = {}
    last: dict[BlockKey, int] = {}
    for step, key in enumerate(accesses):
        first.setdefault(key, step)
        last[key] = step
    born = np.zeros(len(accesses), np.int64)
    died = np.zeros(len(accesses), np.int64)
    born[list(first.values())] = 1
    died[list(last.values())] = 1
    return LiveSet(np.cumsum(born - died), np.cumsum(born))


def reuse_distances(accesses: Sequence[BlockKey]) -> npt.NDArray[np.int64]:
    """The LRU capacity that would turn each repeated access into a hit, in order; first accesses have none.

    It is the number of distinct blocks since the block's last use, itself included (Mattson et al., 1970). A
    Fenwick tree marks the latest use of each block, and counts the marks between the two uses.
    """
    size = len(accesses)
    tree = [0] * (size + 1)
    latest: dict[BlockKey, int] = {}
    distances: list[int] = []
    for step, key in enumerate(accesses, start=1):
        before = latest.get(key)
        if before is not None:
            distances.append(len(latest) - _marks_up_to(tree, before) + 1)
            _mark(tree, before, -1)
        latest[key] = step
        _mark(tree, step, 1)
    return np.array(distances, np.int64)


def _mark(tree: list[int], step: int, change: int) -> None:
    while step < len(tree):
        tree[step] += change
        step += step & -step


def _marks_up_to(tree: list[int], step: int) -> int:
    total = 0
    while step:
        total += tree[step]
        step &= step - 1
    return total
