"""Who holds which prefix: the nodes' stores, and one index over all of them.

The index maps a block to the set of nodes that hold it, as the bits of one integer. One walk along a
prompt's keys then gives every node's prefix match at once: a node drops out where its bit does.
"""

from collections.abc import Sequence

from mooncake_lab.core import BlockKey, Request
from mooncake_lab.store import BlockStore, Stored
from mooncake_lab.store.eviction import make_policy


class PrefixPool:
    """The KVCache stores of the prefill nodes; it changes as blocks come and go.

    Args:
        nodes: their names.
        capacity_tokens: what each node holds; with `shared`, all of it forms one store that every node reads.
        bytes_per_token: KVCache bytes of a token.
        eviction: a name in `EVICTION_POLICIES`.
        shared: one Mooncake Store instead of a cache a node (FAST'25 §5.3, global cache).

    Raises:
        ValueError: when there is no node, the capacity is negative or the policy unknown.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        capacity_tokens: int,
        bytes_per_token: int,
        block_size_tokens: int = 512,
        eviction: str = "lru",
        shared: bool = False,
    ) -> None:
        if not nodes:
            raise ValueError("a pool of 0 nodes; at least one is needed")
        self._bit = {name: 1 << i for i, name in enumerate(nodes)}
        self._everyone = (1 << len(nodes)) - 1
        self._bytes_per_token = bytes_per_token
        self._block_bytes = bytes_per_token * block_size_tokens
        self._holders: dict[BlockKey, int] = {}
        self._stores: dict[str, BlockStore[None]] = {}
        tokens = capacity_tokens * (len(nodes) if shared else 1)
        blocks = max(1, tokens // block_size_tokens)
        one = BlockStore[None](tokens * bytes_per_token, make_policy(eviction, blocks))
        for name in nodes:
            if shared:
                self._stores[name], self._bit[name] = one, self._everyone
            else:
                self._stores[name] = BlockStore[None](tokens * bytes_per_token, make_policy(eviction, blocks))

    def matches(self, request: Request) -> list[int]:
        """How many leading blocks of a prompt each node holds, in the order of the nodes."""
        names = list(self._stores)
        found = [0] * len(names)
        mask, depth = self._everyone, 0
        for key in request.block_keys:
            still = mask & self._holders.get(key, 0)
            gone = mask ^ still
            while gone:
                lowest = gone & -gone
                found[lowest.bit_length() - 1] = depth
                gone ^= lowest
            mask = still
            if not mask:
                return found
            depth += 1
        while mask:
            lowest = mask & -mask
            found[lowest.bit_length() - 1] = depth
            mask ^= lowest
        return found

    def reuse(self, node: str, request: Request) -> int:
        """How many leading blocks the node holds now; each of them counts as used."""
        store = self._stores[node]
        blocks = store.match_prefix(request.block_keys)
        touch = store.touch
        for key in request.block_keys[:blocks]:
            touch(key)
        return blocks

    def keep(self, node: str, request: Request, blocks: int | None = None) -> None:
        """Store a prompt's blocks (the first `blocks` of them) on a node, front to back."""
        store, bit, holders = self._stores[node], self._bit[node], self._holders
        for position, key in enumerate(request.block_keys[:blocks]):
            if key in store:
                store.touch(key)
                continue
            outcome = store.put(key, None, size_bytes=self._block_bytes, position=position)
            if not isinstance(outcome, Stored):
                continue
            holders[key] = holders.get(key, 0) | bit
            for evicted, _ in outcome.evicted:
                left = holders[evicted] & ~bit
                if left:
                    holders[evicted] = left
                else:
                    del holders[evicted]

    def drop(self, node: str) -> None:
        """Forget everything a node held, because it died."""
        store, bit = self._stores[node], self._bit[node]
        for key in list(store):
            store.remove(key)
            left = self._holders[key] & ~bit
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]

    def replicas(self) -> dict[BlockKey, int]:
        """On how many nodes each held block is (FAST'25 Fig. 11)."""
        return {key: mask.bit_count() for key, mask in self._holders.items()}

    def check(self) -> None:
        """Verify the stores, and that the index says exactly what they hold.

        Raises:
            AssertionError: naming what is broken.
        """
        expected: dict[BlockKey, int] = {}
        for name, store in self._stores.items():
            store.check()
            for key in store:
                expected[key] = expected.get(key, 0) | self._bit[name]
        if expected != self._holders:
            raise AssertionError(f"the index names {len(self._holders)} blocks, the stores hold {len(expected)}")
