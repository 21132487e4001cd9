"""The state of each block of the KVCache: free, in use (counted), or kept for reuse under its key."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from mooncake_lab.core import BlockKey


class BlockAllocator:
    """Hands out block ids. In use: held by one request or more. Kept: held by none, findable by key, evicted LRU.

    Mutable: blocks change hands. It knows nothing of tensors.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: the free ones and those only kept for reuse."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """Blocks that no request holds and that a key still finds."""
        return len(self._kept)

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks that hold the longest known prefix of `keys`. Changes nothing."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def in_use(self, block: int) -> bool:
        """Whether a request holds it. Changes nothing."""
        return self._holders[block] > 0

    def holders(self, block: int) -> int:
        """How many requests hold it. Changes nothing."""
        return self._holders[block]

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more request holds each of these blocks, which are in use or kept."""
        for block in blocks:
            self._kept.pop(block, None)
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """New blocks for one request, evicting kept ones where no free ones are left.

        Raises:
            MemoryError: when fewer are available; nothing has changed then.
        """
        if count > self.available:
            raise MemoryError(f"{count} KVCache blocks asked for, {self.available} of {self.blocks} are available")
        taken: list[int] = []
        for _ in range(count):
            if not self._free:
                self._free.append(self._evict())
            block = self._free.pop()
            self._holders[block] = 1
            taken.append(block)
        return taken

    def publish(self, block: int, key: BlockKey) -> None:
        """Let `key` find a block from now on; the first block of a key stays the one that is found."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """One request fewer holds these blocks, given front to back; those with a key are kept for reuse.

        The last of a prefix is evicted first: what follows it is useless without it, not the other way round.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def forget(self) -> None:
        """Evict everything that is only kept for reuse."""
        while self._kept:
            self._free.append(self._evict())

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify that every block is in exactly one state and counted as often as `tables` hold it.

        Raises:
            AssertionError: naming the block that is lost or counted twice.
        """
        held = Counter(block for table in tables for block in table)
        free, kept = set(self._free), set(self._kept)
        assert len(free) == len(self._free), f"free list names a block twice: {sorted(self._free)}"  # noqa: S101  # our own mistake
        for block in range(self.blocks):
            states = (block in free) + (block in kept) + (self._holders[block] > 0)
            assert states == 1, f"block {block} is in {states} states"  # noqa: S101  # our own mistake
            assert self._holders[block] == held[block], f"block {block} is held {held[block]} times"  # noqa: S101  # likewise
        for key, block in self._block_of.items():
            assert self._key_of.get(block) == key, f"key of block {block} does not lead back"  # noqa: S101  # likewise
            assert block not in free, f"block {block} is free and has a key"  # noqa: S101  # likewise
