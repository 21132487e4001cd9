"""Drafts: requests that know whose prefix they continue, on their way to being a trace of block ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mooncake_lab.workload.twin.draws import Floats, Ints

BLOCK_SIZE_TOKENS = 512
"""Of the released files (FAST'25 Appendix A)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafts:
    """Requests as columns, in any order in which a parent comes before its children."""

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    parent: Ints
    """Row of the request whose prompt this one continues; `-1 - p` for one that begins with common prefix `p`."""
    kept_blocks: Ints
    """How many of the parent's leading blocks it shares; every block after them is new."""

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.arrival_s)


def stack(parts: Sequence[Drafts]) -> Drafts:
    """Parts of one whole under each other; their parents are rows of the whole already."""
    return Drafts(
        arrival_s=np.concatenate([part.arrival_s for part in parts]),
        input_tokens=np.concatenate([part.input_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        parent=np.concatenate([part.parent for part in parts]),
        kept_blocks=np.concatenate([part.kept_blocks for part in parts]),
    )


def join(wholes: Sequence[Drafts]) -> Drafts:
    """Wholes under each other; parents are rows of their own whole, and become rows of the result."""
    offsets = np.cumsum([0, *(len(whole) for whole in wholes)])
    return stack(
        [
            replace(whole, parent=np.where(whole.parent < 0, whole.parent, whole.parent + offset))
            for whole, offset in zip(wholes, offsets, strict=False)
        ]
    )


def hours_until(requests: int, hour: Callable[[int], Drafts], hour_s: float) -> Drafts:
    """As many hours of a process as it takes until `requests` requests have arrived before the last one ends.

    `hour(i)` gives all requests of the sessions that begin in hour i, also those that arrive later.
    A shorter trace is therefore the beginning of a longer one.
    """
    parts: list[Drafts] = []
    arrived = 0
    while arrived < requests:
        parts.append(hour(len(parts)))
        arrived = sum(int((part.arrival_s < len(parts) * hour_s).sum()) for part in parts)
    return join(parts)


def lay_blocks(drafts: Drafts, prefixes: Sequence[int]) -> list[Ints]:
    """The blocks of every draft, front to back: those kept from the parent, then new ones, numbered as they come.

    Common prefix `p` is `prefixes[p]` blocks long.
    """
    heads = [np.arange(length) + start for length, start in zip(prefixes, np.cumsum([0, *prefixes]), strict=False)]
    fresh = sum(prefixes)
    laid: list[Ints] = []
    lengths: list[int] = (-(-drafts.input_tokens // BLOCK_SIZE_TOKENS)).tolist()
    parents, kept_blocks = drafts.parent.tolist(), drafts.kept_blocks.tolist()
    for length, parent, kept in zip(lengths, parents, kept_blocks, strict=True):
        head = laid[parent] if parent >= 0 else heads[-1 - parent]
        new = np.arange(fresh, fresh + length - kept)
        laid.append(np.concatenate([head[:kept], new]))
        fresh += length - kept
    return laid


def renumber(ids: Ints) -> Ints:
    """The same ids numbered 0, 1, 2 ... in order of first appearance, as the released files do."""
    _, first, position = np.unique(ids, return_index=True, return_inverse=True)
    rank: npt.NDArray[np.int64] = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[position]
