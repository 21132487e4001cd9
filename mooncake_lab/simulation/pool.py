"""Who holds which prefix: the nodes' stores, and one index over all of them."""

from collections.abc import Callable, Sequence

from mooncake_lab.core import BlockKey, Request
from mooncake_lab.simulation.node_cache import NodeCache, Reused
from mooncake_lab.store import Block, BlockStore, PrefixIndex
from mooncake_lab.store.eviction import make_policy


class PrefixPool:
    """The KVCache stores of the prefill nodes; it changes as blocks come and go.

    Args:
        nodes: their names.
        capacity_tokens: what each node holds; with `shared`, all of it forms one store that every node reads.
        bytes_per_token: KVCache bytes of a token.
        eviction: a name in `EVICTION_POLICIES`.
        shared: one Mooncake Store instead of a cache a node (FAST'25 §5.3, global cache).
        ssd_tokens: what each node holds on SSD besides; 0 where it has none.
        changed: told which blocks came to which node, and which left it then; with `shared`, to the first one.

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
        ssd_tokens: int = 0,
        changed: Callable[[str, Sequence[BlockKey], Sequence[BlockKey]], None] | None = None,
    ) -> None:
        if not nodes:
            raise ValueError("a pool of 0 nodes; at least one is needed")
        self._block_bytes = bytes_per_token * block_size_tokens
        self._blocks: list[Block[None]] = []  # one a position, for every prompt: it carries nothing
        self._sharers = len(nodes) if shared else 1
        tokens = capacity_tokens * self._sharers
        owners = {name: nodes[0] if shared else name for name in nodes}
        below = ssd_tokens * self._sharers

        def store(held_tokens: int) -> BlockStore[None]:
            blocks = max(1, held_tokens // block_size_tokens)
            return BlockStore[None](held_tokens * bytes_per_token, make_policy(eviction, blocks))

        stores = {
            owner: NodeCache(store(tokens), store(below) if below else None)
            for owner in dict.fromkeys(owners.values())
        }
        self.index = PrefixIndex()
        members = {owner: self.index.join(owner) for owner in stores}
        self._stores = {name: stores[owner] for name, owner in owners.items()}
        self._members = {name: members[owner] for name, owner in owners.items()}
        self._changed = changed

    def matches(self, request: Request) -> list[int]:
        """How many leading blocks of a prompt each node holds, in the order of the nodes."""
        return self.index.matches(request.block_keys) * self._sharers

    def on_ssd(self, node: str, request: Request, blocks: int) -> int:
        """How many of the first `blocks` blocks of a prompt the node would read from SSD; changes nothing."""
        return self._stores[node].ssd_only(request.block_keys[:blocks])

    def reuse(self, node: str, request: Request) -> Reused:
        """The leading blocks the node holds now; each of them counts as used."""
        keys = request.block_keys
        reused = self._stores[node].reuse(keys, self._positions(len(keys)))
        if reused.lost:
            self._tell(node, (), reused.lost)
        return reused

    def use(self, node: str, request: Request, blocks: int) -> None:
        """The first `blocks` blocks of a prompt are read on their holder, as by `reuse`, to be sent elsewhere."""
        read = self._stores[node].reuse(request.block_keys[:blocks], self._positions(blocks))
        if read.lost:
            self._tell(node, (), read.lost)

    def keep(self, node: str, request: Request, blocks: int | None = None, *, first: int = 0) -> None:
        """Store a prompt's blocks on a node, front to back: those from `first` on, up to `blocks`."""
        keys = request.block_keys[first:blocks]
        positions = self._positions(first + len(keys))
        came, left = self._stores[node].keep(keys, positions[first:] if first else positions)
        if came or left:
            self._tell(node, came, left)

    def _tell(self, node: str, came: Sequence[BlockKey], left: Sequence[BlockKey]) -> None:
        member = self._members[node]
        self.index.update(member, came, left)
        if self._changed is not None:
            self._changed(member.instance, came, left)

    def _positions(self, count: int) -> list[Block[None]]:
        """A block for each position of a prompt of so many, or more."""
        while len(self._blocks) < count:
            self._blocks.append(Block(None, self._block_bytes, len(self._blocks)))
        return self._blocks

    def drop(self, node: str) -> None:
        """Forget everything a node held, because it died."""
        held = sorted(self._stores[node].keys(), key=str)
        self._stores[node].clear()
        if held:
            self._tell(node, (), held)

    def replicas(self) -> dict[BlockKey, int]:
        """On how many nodes each held block is (FAST'25 Fig. 11)."""
        return {key: holders * self._sharers for key, holders in self.index.replicas().items()}

    def check(self) -> None:
        """Verify the stores, and that the index says exactly what they hold.

        Raises:
            AssertionError: naming what is broken.
        """
        for name, store in self._stores.items():
            store.check()
            owner = self._members[name].instance
            told, held = self.index.held_by(owner), store.keys()
            if told != held:
                raise AssertionError(f"the index names {len(told)} blocks of {name}, it has {len(held)}")
