"""Block ids of a trace, each for one block and all before it (FAST'25 Appendix A).

An id that occurs at two positions, after two different prefixes, twice in one prompt, or for blocks of different
numbers of tokens stands for different KVCache each time, whatever the file says: it may hash the tokens of a block
alone. Only the first of these blocks keeps the id. Each other one gets an id of its own, the same wherever prefix
and tokens are the same, so that blocks count as reusable exactly where they are.
"""

from array import array
from dataclasses import dataclass, field
from typing import Final

import xxhash

_MANY: Final = 1 << 20
"""From this many blocks on it is worth to ask numpy whether any id stands for two blocks."""
_FRONT: Final = -1
"""What stands before the first block of a prompt."""


@dataclass(slots=True)
class PrefixIds:
    """Makes block ids unambiguous, prompt by prompt, in the order of the file. Mutable: it remembers all ids."""

    renamed: int = 0
    """Blocks that could not keep their id."""
    _before: dict[int, int] = field(default_factory=dict[int, int])
    """The id before each id."""
    _partial_tokens: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens of each block that is not full."""

    def of(self, ids: list[int], last_tokens: int, block_size_tokens: int) -> list[int]:
        """The ids of a prompt, front to back; the same list where each keeps its id.

        Args:
            ids: those of the file.
            last_tokens: tokens in the last block.
            block_size_tokens: tokens in the others.
        """
        befores = [_FRONT, *ids[:-1]]
        agree = (
            list(map(self._before.get, ids, befores)) == befores  # an id that is new has the right one before it
            and len(set(ids)) == len(ids)
            and self._partial_tokens.keys().isdisjoint(ids[:-1])
            and self._tokens(ids[-1], last_tokens, block_size_tokens) == last_tokens
        )
        if not agree:
            ids, befores = self._told_apart(ids, last_tokens, block_size_tokens)
        self._before.update(zip(ids, befores, strict=True))
        if last_tokens < block_size_tokens:
            self._partial_tokens[ids[-1]] = last_tokens
        return ids

    def _tokens(self, block_id: int, otherwise: int, block_size_tokens: int) -> int:
        """Tokens of the block that an id stands for so far; what is given for a new id."""
        if block_id not in self._before:
            return otherwise
        return self._partial_tokens.get(block_id, block_size_tokens)

    def _told_apart(self, ids: list[int], last_tokens: int, block_size_tokens: int) -> tuple[list[int], list[int]]:
        """New ids for the blocks that are not those which their ids stand for, and the id before each."""
        unique, befores, seen, before = list[int](), list[int](), set[int](), _FRONT
        for place, block_id in enumerate(ids):
            tokens = last_tokens if place == len(ids) - 1 else block_size_tokens
            known = self._before.get(block_id, before), self._tokens(block_id, tokens, block_size_tokens)
            own = block_id
            if known != (before, tokens) or block_id in seen:
                own = xxhash.xxh3_64_intdigest(f"{before} {block_id} {tokens}".encode())
                self.renamed += 1
            seen.add(block_id)
            unique.append(own)
            befores.append(before)
            before = own
        return unique, befores


def unambiguous(
    ids: "array[int]",
    starts: "array[int]",
    input_tokens: "array[int]",
    block_size_tokens: int,
    *,
    many: int = _MANY,
) -> int:
    """Make the block ids of all prompts unambiguous, in place, in their order; how many could not keep theirs.

    Args:
        ids: of all prompts, one after another.
        starts: shape (prompts + 1,), where each prompt's begin.
        input_tokens: shape (prompts,).
        block_size_tokens: of a full block.
        many: from this many ids on, a look at all of them at once says first whether there is anything to do; it
            takes a tenth of the time and of the memory.
    """
    if len(ids) >= many and _agree(ids, starts, input_tokens, block_size_tokens):
        return 0
    told = PrefixIds()
    for i, tokens in enumerate(input_tokens):
        first, end = starts[i], starts[i + 1]
        prompt = ids[first:end].tolist()
        own = told.of(prompt, tokens - (len(prompt) - 1) * block_size_tokens, block_size_tokens)
        if own is not prompt:
            ids[first:end] = array("Q", own)
    return told.renamed


def _agree(ids: "array[int]", starts: "array[int]", input_tokens: "array[int]", block_size_tokens: int) -> bool:
    """Whether every id always stands for a block of equal tokens after the same id, and once in a prompt."""
    try:
        import numpy as np
    except ImportError:  # in a browser; the dictionaries say it as well
        return False
    all_ids, first = np.frombuffer(ids, np.uint64), np.frombuffer(starts, np.int64)
    before = np.empty_like(all_ids)
    before[1:] = all_ids[:-1]
    is_first = np.zeros(len(all_ids), np.bool_)
    is_first[first[:-1]] = True
    before[is_first] = 0
    sizes = np.full(len(all_ids), block_size_tokens, np.int64)
    last = first[1:] - 1
    sizes[last] = np.frombuffer(input_tokens, np.int64) - (np.diff(first) - 1) * block_size_tokens
    order = np.argsort(all_ids, kind="stable")
    same = np.flatnonzero(all_ids[order[1:]] == all_ids[order[:-1]])
    one, other = order[same], order[same + 1]
    if (before[one] != before[other]).any() or (is_first[one] != is_first[other]).any():
        return False
    if (sizes[one] != sizes[other]).any():
        return False
    owner = np.searchsorted(first, one, side="right"), np.searchsorted(first, other, side="right")
    return not (owner[0] == owner[1]).any()
