"""KVCache blocks with ids, a prefix cache and an order of eviction, as vLLM's block pool keeps them.

A free block keeps its contents until it is taken for something else, so that what is found there is reused. The
queue of free blocks is the order of eviction: what was never complete comes first, then what was released longest
ago, of each request its last block first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import final

from msgspec.structs import replace

from mooncake_lab.batching.plan import Progress


@final
class CountedAllocation:
    """An `Allocation` of counts alone: a waiting request finds the prefix with which it was shown. Mutable.

    Args:
        free_blocks: that no running request holds.
        block_size_tokens: tokens per block.
    """

    def __init__(self, free_blocks: int, block_size_tokens: int) -> None:
        self._free_blocks = free_blocks
        self._block = block_size_tokens
        self._held: dict[int, int] = {}  # of requests that got blocks here

    def found_tokens(self, request: Progress) -> int:
        """Its `cached_tokens`."""
        return request.cached_tokens

    def fits(self, request: Progress, kept_free_blocks: int = 0) -> bool:
        """Whether its known tokens fit."""
        return self._missing(request, request.num_tokens) + kept_free_blocks <= self._free_blocks

    def allocate(self, request: Progress, tokens: int) -> bool:
        """Count its new blocks as taken."""
        missing = self._missing(request, tokens)
        if missing > self._free_blocks:
            return False
        self._free_blocks -= missing
        self._held[request.request_id] = self._holds(request) + missing
        return True

    def free(self, request: Progress) -> None:
        """Count its blocks as free, but for those that others share."""
        self._free_blocks += self._holds(request) - request.shared_blocks

    def _holds(self, request: Progress) -> int:
        return self._held.get(request.request_id, request.held_blocks)

    def _missing(self, request: Progress, tokens: int) -> int:
        return max(0, -(-tokens // self._block) - self._holds(request))


@final
class PagedBlocks:
    """The blocks of an instance as a `BlockSpace` and as an `Allocation`. Mutable: requests take and give blocks.

    Args:
        capacity_blocks: in all.
        block_size_tokens: tokens per block.
        keys_of: gives the key of each complete block of a request, its generated tokens included; equal keys mean
            equal tokens up to the end of the block. Keys of tokens to come are not looked at.
    """

    def __init__(
        self, capacity_blocks: int, block_size_tokens: int, keys_of: Callable[[int], Sequence[Hashable]]
    ) -> None:
        self._capacity_blocks = capacity_blocks
        self._block = block_size_tokens
        self._keys_of = keys_of
        self._free = OrderedDict.fromkeys(range(capacity_blocks))  # ids, the next to be taken first
        self._key: dict[int, Hashable] = {}  # of each complete block
        self._found: dict[Hashable, dict[int, None]] = {}  # blocks of each key, the oldest first
        self._users = Counter[int]()  # requests that hold each block
        self._held: dict[int, list[int]] = {}  # blocks of each running request

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request holds."""
        return len(self._free)

    def found_tokens(self, request: Progress) -> int:
        """Tokens of the leading complete blocks that are there; the last known token is always computed."""
        return len(self._prefix(request)) * self._block

    def fits(self, request: Progress, kept_free_blocks: int = 0) -> bool:
        """Whether the free blocks suffice; those of its prefix that are free count as taken."""
        used = sum(block not in self._free for block in self._prefix(request))
        return -(-request.num_tokens // self._block) - used + kept_free_blocks <= len(self._free)

    def allocate(self, request: Progress, tokens: int) -> bool:
        """Share the prefix, evict what is first in the queue, and let the complete blocks be found."""
        if not self._grow(request, -(-tokens // self._block)):
            return False
        self._complete(request.request_id, tokens)
        return True

    def free(self, request: Progress) -> None:
        """Queue the blocks that nobody else holds, the last one first."""
        for block in reversed(self._held.pop(request.request_id, ())):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._key)

    def match(
        self, waiting: Sequence[Progress], running: Sequence[Progress]
    ) -> tuple[Sequence[Progress], Sequence[Progress]]:
        """Waiting requests with the prefix that they would find, running ones with the blocks that they share."""
        return [self._with_prefix(request) for request in waiting], [self._with_shared(each) for each in running]

    def acquire(self, requests: Sequence[Progress]) -> None:
        """Give each request its blocks, unless its policy has done so.

        Raises:
            ValueError: when the free blocks do not suffice.
        """
        for request in requests:
            if not self._grow(request, request.held_blocks):
                raise ValueError(f"request {request.request_id} needs more than the {len(self._free)} free blocks")

    def publish(self, requests: Sequence[Progress]) -> None:
        """Let others find the complete blocks."""
        for request in requests:
            self._complete(request.request_id, request.cached_tokens)

    def release(self, request: Progress, *, swap: bool = False) -> None:  # noqa: ARG002  # host memory is not modelled
        """Free the blocks, unless the policy has done so."""
        self.free(request)

    def check(self, running: Collection[Progress]) -> None:
        """Verify that the running requests hold what is not free.

        Raises:
            AssertionError: when a block is lost or counted twice.
        """
        expected = {request.request_id: request.held_blocks for request in running}
        held = {request_id: len(blocks) for request_id, blocks in self._held.items()}
        assert held == expected, f"blocks are held as {held}; the running hold {expected}"  # noqa: S101  # our own mistake
        users = Counter(block for blocks in self._held.values() for block in blocks)
        assert users == +self._users, f"blocks are used as {+self._users}; counted {users}"  # noqa: S101  # likewise
        used = self._capacity_blocks - len(self._free)
        assert users.keys().isdisjoint(self._free), "a block is held and free"  # noqa: S101  # likewise
        assert used == len(users), f"{used} blocks are in use, {len(users)} are held"  # noqa: S101  # likewise

    def _prefix(self, request: Progress) -> list[int]:
        """The leading complete blocks of a request that are there."""
        blocks: list[int] = []
        for key in self._keys_of(request.request_id)[: (request.num_tokens - 1) // self._block]:
            if key not in self._found:
                break
            blocks.append(next(iter(self._found[key])))
        return blocks

    def _grow(self, request: Progress, blocks: int) -> bool:
        """Give a request so many blocks in all; whether there were enough."""
        held = self._held.get(request.request_id)
        shared = self._prefix(request)[: request.cached_tokens // self._block] if held is None else []
        new = blocks - len(held or shared)
        if new + sum(block in self._free for block in shared) > len(self._free):
            return False
        for block in shared:
            self._free.pop(block, None)
        held = self._held.setdefault(request.request_id, shared)
        self._users.update(shared)
        for _ in range(new):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._users[block] += 1
            held.append(block)
        return True

    def _complete(self, request_id: int, tokens: int) -> None:
        """Give the blocks of so many tokens their keys."""
        keys = self._keys_of(request_id)
        for place, block in enumerate(self._held[request_id][: tokens // self._block]):
            if block not in self._key:
                self._key[block] = keys[place]
                self._found.setdefault(keys[place], {})[block] = None

    def _forget(self, block: int) -> None:
        """A block is taken for something else."""
        if block in self._key:
            key = self._key.pop(block)
            del self._found[key][block]
            if not self._found[key]:
                del self._found[key]

    def _with_prefix(self, request: Progress) -> Progress:
        blocks = self._prefix(request)
        used = sum(block not in self._free for block in blocks)
        return replace(request, cached_tokens=len(blocks) * self._block, held_blocks=used)

    def _with_shared(self, request: Progress) -> Progress:
        shared = sum(self._users[block] > 1 for block in self._held.get(request.request_id, ()))
        return replace(request, shared_blocks=shared)
