"""Prefix caching in GPU memory, as engines do it: computed prompts stay until their room is needed."""

from collections.abc import Iterable, Sequence

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

    def keep(self, request: Request, held: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Share a computed prompt's whole blocks, beyond those held; all that the request holds now."""
        keys, changes = request.block_keys[: request.input_tokens // self._block], self._changes
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
