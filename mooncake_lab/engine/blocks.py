"""The KVCache blocks of an engine: the state of each, and which of them each request of an `Instance` holds."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import final

from msgspec.structs import replace

from mooncake_lab.batching import Progress
from mooncake_lab.core import BlockKey, block_keys
from mooncake_lab.engine.kvcache import KVSpan
from mooncake_lab.engine.sequence import RunningRequest


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


@final
class EngineBlocks:
    """A `BlockSpace` over a `BlockAllocator`. Mutable: it fills the block tables of requests.

    Args:
        allocator: of the engine's KVCache.
        block_size_tokens: tokens per block.
        requests: of the engine, by id.
        namespace: identifies the model in block keys; None disables prefix reuse.
        swap_out: copies the KVCache of a request's first tokens out of the engine.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size_tokens: int,
        requests: Mapping[int, RunningRequest],
        namespace: bytes | None,
        swap_out: Callable[[RunningRequest, int], tuple[KVSpan, ...]],
    ) -> None:
        self._allocator = allocator
        self._size = block_size_tokens
        self._requests = requests
        self._namespace = namespace
        self._swap_out = swap_out
        self._found: dict[int, list[int]] = {}  # by waiting request: the cached blocks that `match` found for it

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds; those that are kept for reuse count as free."""
        return self._allocator.available

    def match(
        self, waiting: Sequence[Progress], running: Sequence[Progress]
    ) -> tuple[Sequence[Progress], Sequence[Progress]]:
        """Waiting requests with the prefix that is cached for them, running requests with their shared blocks.

        A block that a waiting request would reuse counts as shared: preempting its holder would not free it.
        """
        self._found = {}
        shown = tuple(map(self._with_prefix, waiting))
        wanted = {block for blocks in self._found.values() for block in blocks}
        return shown, tuple(self._with_shared(progress, wanted) for progress in running)

    def acquire(self, requests: Sequence[Progress]) -> None:
        """Allocate blocks. The cached blocks of all requests are taken first, so that none of them is evicted."""
        for progress in requests:
            request = self._requests[progress.request_id]
            if not request.held:
                self._take_prefix(request, progress)
        for progress in requests:
            request = self._requests[progress.request_id]
            new = self._allocator.allocate(progress.held_blocks - request.held)
            request.table[request.held : progress.held_blocks] = new
            request.held = progress.held_blocks

    def publish(self, requests: Sequence[Progress]) -> None:
        """Add the blocks that are now full to the prefix cache."""
        for progress in requests:
            request = self._requests[progress.request_id]
            full = min(progress.cached_tokens // self._size, len(request.keys))
            for index in range(request.published, full):
                self._allocator.publish(int(request.table[index]), request.keys[index])
            request.published = max(request.published, full)

    def release(self, request: Progress, *, swap: bool = False) -> None:
        """Free the blocks of a request; full blocks of generated tokens first get keys for reuse."""
        running = self._requests[request.request_id]
        if swap:
            running.swapped_kv = self._swap_out(running, request.cached_tokens)
        if running.held and request.cached_tokens // self._size > len(running.keys):
            self.name_blocks(running)
            self.publish([request])
        if running.kv_loader is not None:  # its blocks are reused, so the loader must not write into them
            running.kv_loader.stop()
            running.kv_loader = None
        self._allocator.release(running.blocks.tolist())
        running.held = running.published = 0

    def name_blocks(self, request: RunningRequest) -> None:
        """Compute the keys of the full blocks of all present tokens of a request."""
        if self._namespace is not None:
            tokens = request.tokens[: request.known]
            request.keys = list(block_keys(tokens, self._size, namespace=self._namespace, partial=False))

    def check(self, running: Collection[Progress]) -> None:
        """Verify that the running requests, and no others, hold the allocator's blocks.

        Raises:
            AssertionError: naming the block that is lost or counted twice.
        """
        for progress in running:
            held = self._requests[progress.request_id].held
            assert held == progress.held_blocks, f"request {progress.request_id} holds {held} blocks"  # noqa: S101  # our own mistake
        self._allocator.check([self._requests[progress.request_id].blocks.tolist() for progress in running])

    def _with_prefix(self, progress: Progress) -> Progress:
        request = self._requests[progress.request_id]
        # the last token is always computed, because its logits are needed
        found = self._allocator.match(request.keys[: (request.known - 1) // self._size])
        if len(found) * self._size <= progress.cached_tokens:
            return progress
        self._found[progress.request_id] = found
        used = sum(self._allocator.holders(block) > 0 for block in found)
        return replace(progress, cached_tokens=len(found) * self._size, held_blocks=used, shared_blocks=used)

    def _with_shared(self, progress: Progress, wanted: set[int]) -> Progress:
        request, holders = self._requests[progress.request_id], self._allocator.holders
        published = request.blocks[: request.published].tolist()
        return replace(progress, shared_blocks=sum(block in wanted or holders(block) > 1 for block in published))

    def _take_prefix(self, request: RunningRequest, progress: Progress) -> None:
        found = self._found.get(request.id, ())
        if found:
            self._allocator.acquire(found)
            request.table[: len(found)] = found
            request.held = request.published = len(found)
            request.swapped_kv, request.kv_loader = (), None
        if request.reused is None:
            request.reused = progress.cached_tokens
