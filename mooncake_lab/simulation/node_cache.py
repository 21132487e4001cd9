"""The KVCache of one node: DRAM, and an SSD below it where the node has one; blocks sink and rise."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mooncake_lab.core import BlockKey
from mooncake_lab.store import Block, BlockStore


class CacheChange(NamedTuple):
    """What came to a node and what left it then, each once, and what has moved between its tiers."""

    added: Sequence[BlockKey] = ()
    removed: Sequence[BlockKey] = ()
    promoted: Sequence[BlockKey] = ()
    """Blocks that were on SSD only, and are in DRAM now."""
    demoted: Sequence[BlockKey] = ()
    """Blocks that are on SSD only now."""


class Reused(NamedTuple):
    """The part of a prompt that a node held."""

    blocks: int
    """Leading blocks that were there."""
    from_ssd: int = 0
    """Those of them that had to be read from SSD."""
    change: CacheChange = CacheChange()
    """What moved, and left the node, while they rose into DRAM."""


class NodeCache:
    """Two stacked block stores under the rules of the real `TieredStore`. Mutable: the state of a cache.

    A new block goes into DRAM; what DRAM evicts sinks to SSD; a block read from SSD rises into DRAM and stays on
    SSD as well. Sinking costs no time: it is done behind the requests' backs.

    Args:
        dram: the store of the upper tier.
        ssd: that of the lower one; None where the node has none.
    """

    __slots__ = ("dram", "ssd")

    def __init__(self, dram: BlockStore[None], ssd: BlockStore[None] | None = None) -> None:
        self.dram = dram
        self.ssd = ssd

    def __contains__(self, key: object) -> bool:
        return key in self.dram or (self.ssd is not None and key in self.ssd)

    def keys(self) -> set[BlockKey]:
        """Everything the node holds."""
        return {*self.dram, *(self.ssd or ())}

    def ssd_only(self, keys: Iterable[BlockKey]) -> int:
        """How many of these keys would have to be read from SSD; changes nothing."""
        return 0 if self.ssd is None else sum(key not in self.dram for key in keys)

    def reuse(self, keys: Sequence[BlockKey], blocks: Sequence[Block[None]]) -> Reused:
        """Use the leading keys that are here; those on SSD rise into DRAM.

        Args:
            keys: of a prompt, front to back.
            blocks: one for each position.
        """
        held = self.dram.touch_prefix(keys)
        if self.ssd is None or held == len(keys):
            return Reused(held)
        rising: list[int] = []
        for position in range(held, len(keys)):
            key = keys[position]
            if key in self.dram:
                self.dram.touch(key)
            elif key in self.ssd:
                self.ssd.touch(key)
                rising.append(position)
            else:
                break
            held += 1
        return Reused(held, len(rising), self.keep([keys[i] for i in rising], [blocks[i] for i in rising]))

    def keep(self, keys: Sequence[BlockKey], blocks: Iterable[Block[None]]) -> CacheChange:
        """Hold a prompt's blocks, front to back."""
        if self.ssd is None:
            run = self.dram.put_run(keys, blocks)
            came, left = run.stored, [key for key, _ in run.evicted]
            if left and not set(came).isdisjoint(left):  # some went and came back, or came and did not stay
                # what was there has left as often as it came, and once more unless it is there now
                was = Counter([*left, *(key for key in {*came, *left} if key in self.dram)])
                was.subtract(came)
                came = [key for key in dict.fromkeys(came) if not was[key]]
                left = [key for key in dict.fromkeys(left) if key not in self.dram]
            return CacheChange(came, left)
        new = {key for key in keys if key not in self}
        run = self.dram.put_run(keys, blocks)
        leaving = run.evicted
        sunk = self.ssd.put_run([key for key, _ in leaving], [block for _, block in leaving])
        gone = dict.fromkeys(key for key, _ in (*leaving, *sunk.evicted) if key not in self)
        stored = dict.fromkeys(run.stored)
        return CacheChange(
            added=[key for key in stored if key in new],
            removed=list(gone),
            promoted=[key for key in stored if key not in new and key in self.dram],
            demoted=[
                key for key in dict.fromkeys(key for key, _ in leaving) if key in self and key not in self.dram
            ],
        )

    def clear(self) -> None:
        """The node is gone, and all it held."""
        for store in filter(None, (self.dram, self.ssd)):
            for key in list(store):
                store.remove(key)

    def check(self) -> None:
        """Verify the stores.

        Raises:
            AssertionError: naming what is broken.
        """
        for store in filter(None, (self.dram, self.ssd)):
            store.check()
