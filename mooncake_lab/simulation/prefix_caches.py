"""The KVCache stores of prefill instances: DRAM, and an SSD below it; one per instance, or one for all of them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Final

import msgspec

from mooncake_lab.core import BlockKey, Request
from mooncake_lab.store import Block
from mooncake_lab.store.eviction import make_policy
from mooncake_lab.store.tiers import Entry, TierSpec, TierStack

HeldBlock = Block[Entry[BlockKey]]
_HELD: Final = Entry[BlockKey](is_ready=True)
"""What each block carries, since there are no bytes."""


class CacheChange(msgspec.Struct, frozen=True, gc=False):
    """What came to an instance and what left it then, each once, and what has moved between its tiers."""

    added: tuple[BlockKey, ...] = ()
    removed: tuple[BlockKey, ...] = ()
    promoted: tuple[BlockKey, ...] = ()
    """Blocks that were on SSD only, and are in DRAM now."""
    demoted: tuple[BlockKey, ...] = ()
    """Blocks that are on SSD only now."""


_NO_CHANGE: Final = CacheChange()


class Reused(msgspec.Struct, frozen=True, gc=False):
    """The leading blocks of a prompt that an instance held, those of them on SSD, and what moved for them."""

    blocks: int
    from_ssd: int = 0
    change: CacheChange = _NO_CHANGE


class InstanceCache:
    """The KVCache of an instance, in the tiers of the real `TieredStore`. Mutable: the state of a cache.

    The rules are those of `TierStack`: a new block goes into DRAM, what DRAM evicts goes to SSD, and a block read
    from SSD is put into DRAM and stays on SSD as well. Transfers between tiers take no time: demotions are done
    behind the requests' backs. The handle of a block is its key. Where there is DRAM alone, a prompt is one run.

    Args:
        dram_bytes: capacity of the upper tier.
        ssd_bytes: that of the lower one; 0 where the instance has none.
        block_bytes: of each block.
        eviction: a name in `EVICTION_POLICIES`.
    """

    __slots__ = ("_block_bytes", "_stack", "dram", "ssd")

    def __init__(self, dram_bytes: int, ssd_bytes: int, block_bytes: int, eviction: str) -> None:
        self._block_bytes = block_bytes
        specs = list[TierSpec]()
        queue_bytes = block_bytes if ssd_bytes else 0  # for the block that is demoted at once
        for name, held, queue in (("dram", dram_bytes, queue_bytes), ("ssd", ssd_bytes, 0)):
            if held:
                policy = make_policy(eviction, max(1, held // block_bytes))
                specs.append(
                    TierSpec(
                        name=name,
                        capacity_bytes=held + queue,
                        queue_bytes=queue,
                        eviction=lambda _, policy=policy: policy,
                    )
                )
        self._stack = TierStack[BlockKey](specs)
        self.dram = self._stack.tiers[0].blocks
        self.ssd = self._stack.tiers[1].blocks if ssd_bytes else None

    def __contains__(self, key: object) -> bool:
        return key in self.dram or (self.ssd is not None and key in self.ssd)

    def keys(self) -> set[BlockKey]:
        """Everything the instance holds."""
        return {*self.dram, *(self.ssd or ())}

    def reuse(self, keys: Sequence[BlockKey], blocks: Sequence[HeldBlock]) -> Reused:
        """Use the leading keys that are here; those on SSD are put into DRAM.

        Args:
            keys: of a prompt, front to back.
            blocks: one for each position.
        """
        if self.ssd is None:
            return Reused(self.dram.touch_prefix(keys))
        held, rising = 0, list[int]()
        for position, key in enumerate(keys):
            tier = self._stack.tier_of(key)
            if tier is None:
                break
            tier.touch(key)
            held += 1
            if tier.index:
                rising.append(position)
        return Reused(held, len(rising), self.keep([keys[i] for i in rising], [blocks[i] for i in rising]))

    def keep(self, keys: Sequence[BlockKey], blocks: Iterable[HeldBlock]) -> CacheChange:
        """Hold a prompt's blocks, front to back."""
        if self.ssd is None:
            run = self.dram.put_run(keys, blocks)
            came, left = run.stored, [key for key, _ in run.evicted]
            if left and not set(left).isdisjoint(came):  # some went and came back, or came and did not stay
                # what was there has left as often as it came, and once more unless it is there now
                was = Counter([*left, *(key for key in {*came, *left} if key in self.dram)])
                was.subtract(came)
                came = [key for key in dict.fromkeys(came) if not was[key]]
                left = [key for key in dict.fromkeys(left) if key not in self.dram]
            return CacheChange(tuple(came), tuple(left))
        new = {key for key in keys if key not in self}
        stored, left_dram, left_ssd = dict[BlockKey, None](), dict[BlockKey, None](), dict[BlockKey, None]()
        dram = self._stack.tiers[0]
        for key, block in zip(keys, blocks, strict=False):
            if dram.has_intact(key):
                dram.touch(key)
            elif self._write(0, key, block.position, left_dram):
                stored[key] = None
            while dram.queue:
                evicted = dram.queue.popleft()
                left_dram[evicted] = None
                self._write(1, evicted, dram.pending[evicted].position, left_ssd)
                for handle in dram.end_demotion(evicted):
                    dram.freed(handle)
        return CacheChange(
            added=tuple([key for key in stored if key in new]),
            removed=tuple([key for key in left_dram | left_ssd if key not in self]),
            promoted=tuple([key for key in stored if key not in new and key in self.dram]),
            demoted=tuple([key for key in left_dram if key in self and key not in self.dram]),
        )

    def _write(self, index: int, key: BlockKey, position: int, left: dict[BlockKey, None]) -> bool:
        """Write a block into one tier; whether the tier takes it, and which blocks left for it."""
        tier = self._stack.tiers[index]
        entry, unused = tier.put(key, Entry(key, is_ready=True), self._block_bytes, position)
        for handle in unused:
            tier.freed(handle)
            left[handle] = None
        return entry is not None

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """These blocks are lost."""
        for store in filter(None, (self.dram, self.ssd)):
            for key in keys:
                if key in store:
                    store.remove(key)

    def check(self) -> None:
        """Verify the stores.

        Raises:
            AssertionError: naming what is broken.
        """
        self._stack.check()


class PrefixCaches:
    """The KVCache stores of the prefill instances; it changes as blocks come and go.

    Args:
        instances: their names.
        capacity_tokens: what each instance holds; with `shared`, all of it forms one store that all read.
        bytes_per_token: KVCache bytes of a token.
        eviction: a name in `EVICTION_POLICIES`.
        shared: one Mooncake Store instead of a cache per instance (FAST'25 §5.3, global cache).
        ssd_tokens: what each instance holds on SSD besides; 0 where it has none.
        changed: told of each change of a cache, by its name in `caches`.

    Raises:
        ValueError: when there is no instance, the capacity is negative or the policy unknown.
    """

    def __init__(
        self,
        instances: Sequence[str],
        *,
        capacity_tokens: int,
        bytes_per_token: int,
        block_size_tokens: int = 512,
        eviction: str = "lru",
        shared: bool = False,
        ssd_tokens: int = 0,
        changed: Callable[[str, CacheChange], None] | None = None,
    ) -> None:
        if not instances:
            raise ValueError("a pool of 0 instances; at least one is needed")
        self._block_bytes = bytes_per_token * block_size_tokens
        self._blocks: list[HeldBlock] = []  # one a position, for every prompt: it carries nothing
        sharers = len(instances) if shared else 1
        tokens = capacity_tokens * sharers
        self.caches = {name: instances[0] if shared else name for name in instances}
        """The name of the cache that each instance uses: its own, or with `shared` the first instance's."""
        below = ssd_tokens * sharers

        stores = {
            cache: InstanceCache(tokens * bytes_per_token, below * bytes_per_token, self._block_bytes, eviction)
            for cache in dict.fromkeys(self.caches.values())
        }
        self.stores = {name: stores[cache] for name, cache in self.caches.items()}
        """What each instance reads, by its name."""
        self.is_shared = shared
        """Whether all instances use one store."""
        self.has_ssd = ssd_tokens > 0
        """Whether instances have an SSD below their DRAM."""
        self._changed = changed
        self._share_blocks = (tokens + below) // sharers // block_size_tokens
        self._owners: dict[BlockKey, str] = {}  # of a shared store: the instance that each block lies on
        self._owned = dict.fromkeys(instances, 0) if shared else {}  # blocks of each instance that is up

    def matched(self, instance: str, request: Request) -> int:
        """The number of leading blocks of a prompt that an instance holds; changes nothing."""
        store = self.stores[instance]
        return sum(1 for _ in takewhile(store.__contains__, request.block_keys))

    def on_ssd(self, instance: str, keys: Sequence[BlockKey]) -> int:
        """How many of these blocks, which it holds, the instance would read from SSD; changes nothing."""
        store = self.stores[instance]
        return 0 if store.ssd is None else sum(key not in store.dram for key in keys)

    def before_ssd(self, instance: str, request: Request) -> int | None:
        """Leading blocks before the first that the instance would read from SSD; None where it would read none."""
        store = self.stores[instance]
        if store.ssd is None:
            return None
        held = store.dram.match_prefix(request.block_keys)
        return held if held < len(request.block_keys) and request.block_keys[held] in store.ssd else None

    def reuse(self, instance: str, request: Request, blocks: int | None = None) -> Reused:
        """The leading blocks that the instance holds now, at most `blocks`; each of them counts as used."""
        keys = request.block_keys[:blocks]
        reused = self.stores[instance].reuse(keys, self._positions(len(keys)))
        self._tell(instance, reused.change)
        return reused

    def use(self, instance: str, request: Request, places: Sequence[int]) -> int:
        """The blocks at some places of a prompt are read on their holder, as by `reuse`, to be sent elsewhere.

        Returns:
            How many of them, front to back, the instance still holds.
        """
        positions = self._positions(places[-1] + 1)
        keys = [request.block_keys[place] for place in places]
        read = self.stores[instance].reuse(keys, [positions[place] for place in places])
        self._tell(instance, read.change)
        return read.blocks

    def keep(self, instance: str, request: Request, blocks: int | None = None, *, first: int = 0) -> None:
        """Store a prompt's blocks on an instance, front to back: those from `first` on, up to `blocks`."""
        keys = request.block_keys[first:blocks]
        positions = self._positions(first + len(keys))
        self._tell(instance, self.stores[instance].keep(keys, positions[first:] if first else positions))

    def elsewhere(self, instance: str, keys: Sequence[BlockKey]) -> dict[str, list[int]]:
        """Which of these blocks of a shared store lie on other instances: their places, by instance."""
        places = defaultdict[str, list[int]](list)
        for place, key in enumerate(keys):
            if self._owners[key] != instance:
                places[self._owners[key]].append(place)
        return places

    def _own(self, instance: str, change: CacheChange) -> None:
        """New blocks lie on the instance that computed them while its share has room, else where most room is."""
        self._disown(key for key in change.removed if key in self._owners)
        for key in change.added:
            has_room = instance in self._owned and self._owned[instance] < self._share_blocks
            owner = instance if has_room else min(self._owned, key=self._owned.__getitem__)
            self._owners[key] = owner
            self._owned[owner] += 1
        self._disown(key for key in change.removed if key in self._owners)  # came and left at once

    def _disown(self, keys: Iterable[BlockKey]) -> None:
        for key in list(keys):
            self._owned[self._owners.pop(key)] -= 1

    def _tell(self, instance: str, change: CacheChange) -> None:
        if self._owned:
            self._own(instance, change)
        if self._changed is not None and change != _NO_CHANGE:
            self._changed(self.caches[instance], change)

    def _positions(self, count: int) -> list[HeldBlock]:
        """A block for each position of a prompt of at least this length."""
        while len(self._blocks) < count:
            self._blocks.append(HeldBlock(_HELD, self._block_bytes, len(self._blocks)))
        return self._blocks

    def drop(self, instance: str) -> None:
        """Forget what an instance held, because it failed; of a shared store, the blocks that lay on it."""
        store = self.stores[instance]
        held = store.keys()
        held = tuple(sorted((key for key in held if self._owners.get(key, instance) == instance), key=str))
        store.remove(held)
        self._tell(instance, CacheChange(removed=held))
        self._owned.pop(instance, None)
