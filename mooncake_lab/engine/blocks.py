"""The blocks of an engine's `Instance`: which KVCache blocks each request holds and shares."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import final

from msgspec.structs import replace

from mooncake_lab.batching import Progress
from mooncake_lab.core import block_keys
from mooncake_lab.engine.allocator import BlockAllocator
from mooncake_lab.engine.kvcache import KVSpan
from mooncake_lab.engine.sequence import RunningRequest


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
        shown = [self._with_prefix(progress) for progress in waiting]
        wanted = {block for blocks in self._found.values() for block in blocks}
        return shown, [self._with_shared(progress, wanted) for progress in running]

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
        used = sum(self._allocator.in_use(block) for block in found)
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
