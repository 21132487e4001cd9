"""The GPU memory of a coupled instance with prefix caching: computed prompts stay until their room is needed."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import final

import msgspec

from mooncake_lab.batching import Progress
from mooncake_lab.core import BlockKey, Request
from mooncake_lab.store import BlockStore, Stored
from mooncake_lab.store.eviction import make_policy


class DeviceCache:
    """Whole prompt blocks of one instance, counted in tokens; it changes as requests come and go.

    A block is pinned as often as running requests use it. Unpinned ones are kept only while their
    room is not needed (vLLM's automatic prefix caching: LRU over what is free).

    Args:
        capacity_tokens: KVCache tokens of the GPU memory.
        block_size_tokens: tokens per block; a prompt's last, partial block is never shared.
        eviction: a name in `EVICTION_POLICIES`.

    Raises:
        ValueError: when the capacity is negative or the policy unknown.
    """

    def __init__(self, capacity_tokens: int, *, block_size_tokens: int = 512, eviction: str = "lru") -> None:
        blocks = max(1, capacity_tokens // block_size_tokens)
        self._store = BlockStore[None](capacity_tokens, make_policy(eviction, blocks))
        self._block = block_size_tokens
        self._changes: dict[BlockKey, bool] = {}  # since they were taken: whether a block came, or else left

    @property
    def pinned_tokens(self) -> int:
        """Tokens that running requests use."""
        return self._store.pinned_bytes

    def matched(self, request: Request) -> int:
        """Leading blocks of a prompt that are here; its last token is always left to compute."""
        return self._store.match_prefix(request.block_keys[: (request.input_tokens - 1) // self._block])

    def pinned_among(self, keys: Iterable[BlockKey], *, times: int = 1) -> int:
        """How many of these blocks are used by at least `times` running requests."""
        count = self._store.pins.get
        return sum([count(key, 0) >= times for key in keys])

    def acquire(self, request: Request, blocks: int) -> tuple[BlockKey, ...]:
        """Use the first blocks of a prompt: they stay until released."""
        keys = request.block_keys[:blocks]
        for key in keys:
            self._store.touch(key)
            self._store.pin(key)
        return keys

    def keep(self, request: Request, held: Sequence[BlockKey], blocks: int) -> tuple[BlockKey, ...]:
        """Share the first blocks of a prompt, beyond those held; all that the request holds now."""
        keys, changes = request.block_keys[:blocks], self._changes
        for position in range(len(held), len(keys)):
            key = keys[position]
            put = self._store.put(key, None, size_bytes=self._block, position=position)
            if isinstance(put, Stored) and not put.was_held:
                for gone, _ in put.evicted:
                    self._left(gone)
                if changes.pop(key, True):
                    changes[key] = True  # else it left and is back
            self._store.pin(key)
        return keys

    def release(self, keys: Iterable[BlockKey]) -> None:
        """Use these blocks no longer; they stay while there is room."""
        for key in keys:
            self._store.unpin(key)

    def make_room(self, private_tokens: int) -> None:
        """Evict until this many tokens outside the cache fit into the memory beside it."""
        room = self._store.capacity_bytes - private_tokens
        while self._store.used_bytes > room and (gone := self._store.evict()) is not None:
            self._left(gone[0])

    def take_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Blocks that came and blocks that left since this was asked last."""
        if not self._changes:
            return (), ()
        changes, self._changes = self._changes.items(), {}
        return tuple([key for key, came in changes if came]), tuple([key for key, came in changes if not came])

    def _left(self, key: BlockKey) -> None:
        if not self._changes.pop(key, False):
            self._changes[key] = False  # else it came and is gone again

    def check(self) -> None:
        """Verify the store's invariants.

        Raises:
            AssertionError: naming what is broken.
        """
        self._store.check()


@final
class CachedBlocks:
    """A `BlockSpace` over a `DeviceCache`. Mutable: requests take blocks and give them back.

    The cache counts the blocks of the trace, a policy those of the memory, which are smaller. A request shares a
    whole trace block of its prompt once it is computed, as in vLLM and in the engine.

    Args:
        capacity_blocks: memory blocks.
        block_size_tokens: tokens per memory block; a trace block is a whole number of them.
        cache: of the same memory.
        request_of: gives a request by its id.
    """

    def __init__(
        self,
        capacity_blocks: int,
        block_size_tokens: int,
        cache: DeviceCache,
        request_of: Callable[[int], Request],
    ) -> None:
        self._capacity_blocks = capacity_blocks
        self._block = block_size_tokens
        self._cache = cache
        self._request_of = request_of
        self._found: dict[int, int] = {}  # trace blocks that each waiting request was shown with
        self._held: dict[int, int] = {}  # memory blocks of each running request
        self._shared: dict[int, tuple[BlockKey, ...]] = {}  # trace blocks, of those, that the cache knows
        self._complete: set[int] = set()  # running requests that share all of their prompt
        self._private_blocks = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request holds; what is kept only for reuse counts as free."""
        pinned = self._cache.pinned_tokens // self._block
        return max(0, self._capacity_blocks - pinned - self._private_blocks)

    def match(
        self, waiting: Sequence[Progress], running: Sequence[Progress]
    ) -> tuple[Sequence[Progress], Sequence[Progress]]:
        """Waiting requests with the prefix that they would find, running ones with the blocks that they share."""
        self._found.clear()
        return [self._with_prefix(request) for request in waiting], [self._with_shared(r) for r in running]

    def acquire(self, requests: Sequence[Progress]) -> None:
        """Count new blocks; a request that held none uses its prefix from the cache."""
        for progress in requests:
            request_id = progress.request_id
            if request_id not in self._held:
                request, found = self._request_of(request_id), self._found.get(request_id, 0)
                self._shared[request_id] = self._cache.acquire(request, found)
                self._private_blocks -= self._in_memory_blocks(request_id)
            self._private_blocks += progress.held_blocks - self._held.get(request_id, 0)
            self._held[request_id] = progress.held_blocks

    def publish(self, requests: Sequence[Progress]) -> None:
        """Evict what is in the way of the new tokens, and share the whole blocks of prompts that are computed."""
        self._cache.make_room(self._private_blocks * self._block)
        for progress in requests:
            request_id = progress.request_id
            if request_id in self._complete:
                continue
            if progress.decoding:
                self._complete.add(request_id)
            request, shared = self._request_of(request_id), self._shared[request_id]
            computed = min(progress.cached_tokens, request.input_tokens) // request.block_size_tokens
            if computed > len(shared):
                self._private_blocks += self._in_memory_blocks(request_id)
                self._shared[request_id] = self._cache.keep(request, shared, computed)
                self._private_blocks -= self._in_memory_blocks(request_id)

    def release(self, request: Progress, *, swap: bool = False) -> None:  # noqa: ARG002  # host memory is not modelled
        """Free the blocks; shared ones stay in the cache while there is room."""
        request_id = request.request_id
        if request_id not in self._held:
            return
        self._private_blocks -= self._held.pop(request_id) - self._in_memory_blocks(request_id)
        self._cache.release(self._shared.pop(request_id))
        self._complete.discard(request_id)

    def check(self, running: Collection[Progress]) -> None:
        """Verify the cache, and that the running requests hold what is not free.

        Raises:
            AssertionError: naming what is lost or counted twice.
        """
        self._cache.check()
        expected = {request.request_id: request.held_blocks for request in running}
        assert self._held == expected, f"blocks are held as {self._held}; the running hold {expected}"  # noqa: S101  # our own mistake
        private = sum(held - self._in_memory_blocks(request_id) for request_id, held in expected.items())
        assert self._private_blocks == private, f"{self._private_blocks} private blocks, counted {private}"  # noqa: S101  # likewise

    def _with_prefix(self, progress: Progress) -> Progress:
        request = self._request_of(progress.request_id)
        found = self._cache.matched(request)
        tokens = found * request.block_size_tokens
        if tokens <= progress.cached_tokens:
            return progress
        self._found[progress.request_id] = found
        in_use = self._cache.pinned_among(request.block_keys[:found])
        whole = request.block_size_tokens // self._block
        return msgspec.structs.replace(progress, cached_tokens=tokens, held_blocks=in_use * whole)

    def _with_shared(self, progress: Progress) -> Progress:
        keys = self._shared.get(progress.request_id, ())
        shared = self._cache.pinned_among(keys, times=2) if keys else 0
        if not shared:
            return progress
        whole = self._request_of(progress.request_id).block_size_tokens // self._block
        return msgspec.structs.replace(progress, shared_blocks=shared * whole)

    def _in_memory_blocks(self, request_id: int) -> int:
        """Memory blocks of what a request shares."""
        keys = self._shared[request_id]
        return len(keys) * (self._request_of(request_id).block_size_tokens // self._block)
