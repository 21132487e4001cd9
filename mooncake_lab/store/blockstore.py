"""A store of KVCache blocks: bytes are bounded, pinned blocks stay, and a refusal says why."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from mooncake_lab.core import BlockKey
from mooncake_lab.store.eviction import EvictionPolicy
from mooncake_lab.store.eviction.policy import NOTHING_SPARED

Payload = TypeVar("Payload")


class Block(msgspec.Struct, Generic[Payload], frozen=True):
    """A held block: what it carries (`None` in the simulator, buffers in the engine), its bytes, its place."""

    payload: Payload
    size_bytes: int
    position: int = 0
    """Which block of its request it is, from 0."""


@dataclass(frozen=True, slots=True)
class Stored(Generic[Payload]):
    """The block is held now, and these blocks left for it, in this order."""

    evicted: tuple[tuple[BlockKey, Block[Payload]], ...] = ()
    was_held: bool = False
    """The key was there already: the put counted as a touch, and the payload that was there stays."""


_STORED: Final[Stored[Any]] = Stored()
_HELD: Final[Stored[Any]] = Stored(was_held=True)


@dataclass(frozen=True, slots=True)
class Refused:
    """The block cannot be held, for this reason; nothing changed."""

    reason: str


class Run(NamedTuple, Generic[Payload]):
    """What a `put_run` changed, in this order; a block that the run both brought and pushed out is in both."""

    stored: list[BlockKey]
    """Those that were not held."""
    evicted: list[tuple[BlockKey, Block[Payload]]]
    refused: int
    """How many could not be held."""


class BlockStore(Generic[Payload]):
    """Blocks by key in a bounded number of bytes (FAST'25 §4.1: one node's share of the Mooncake Store).

    It has no clock, and tells its policy about keys only. `peek`, `match_prefix` and `in` change nothing; `touch`,
    `put`, `evict`, `remove`, `pin` and `unpin` do. Mutable: it is the state of a cache.

    Args:
        capacity_bytes: the bytes it may hold.
        policy: a fresh policy that holds no key; the store is the only one to talk to it.

    Raises:
        ValueError: when the capacity is negative, or the policy already holds keys.
    """

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"a store of {capacity_bytes} bytes; at least 0 are needed")
        if len(policy):
            raise ValueError(f"a store was given a policy that holds {len(policy)} keys; a fresh one is needed")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        """The bytes it holds."""
        self.pinned_bytes = 0
        """Those of them that cannot be evicted now."""
        self._policy = policy
        self._blocks: dict[BlockKey, Block[Payload]] = {}
        self._pins: dict[BlockKey, int] = {}
        self._spared: frozenset[BlockKey] | None = NOTHING_SPARED

    @property
    def pins(self) -> Mapping[BlockKey, int]:
        """How often each pinned key is pinned."""
        return MappingProxyType(self._pins)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def peek(self, key: BlockKey) -> Block[Payload] | None:
        """The block, or `None`; the policy does not hear of it."""
        return self._blocks.get(key)

    def match_prefix(self, keys: Iterable[BlockKey]) -> int:
        """How many of these keys are held before the first that is not; the policy does not hear of it.

        Only these blocks save prefill: the KVCache of a later one is of no use without all before it.
        """
        held = 0
        for key in keys:
            if key not in self._blocks:
                break
            held += 1
        return held

    def touch(self, key: BlockKey) -> Block[Payload]:
        """The block, now used once more.

        Raises:
            KeyError: when the key is not held.
        """
        block = self._held(key)
        self._policy.touch(key)
        return block

    def put(
        self, key: BlockKey, payload: Payload, *, size_bytes: int, position: int = 0
    ) -> Stored[Payload] | Refused:
        """Hold a block, evicting others until it fits; equal keys mean equal content, so a held key is touched.

        Raises:
            ValueError: when `size_bytes` is not positive, or a held block of this key has another size.
        """
        if size_bytes < 1:
            raise ValueError(f"block {key!r} has {size_bytes} bytes; at least 1 is needed")
        held = self._blocks.get(key)
        if held is not None:
            if held.size_bytes != size_bytes:
                raise ValueError(
                    f"block {key!r} of {size_bytes} bytes is held with {held.size_bytes} bytes;"
                    " one key names one content"
                )
            self._policy.touch(key)
            return _HELD
        if size_bytes > self.capacity_bytes - self.pinned_bytes:
            return Refused(
                f"block {key!r} of {size_bytes} bytes does not fit: {self.pinned_bytes}"
                f" of {self.capacity_bytes} bytes are pinned"
            )
        evicted: list[tuple[BlockKey, Block[Payload]]] = []
        while self.used_bytes + size_bytes > self.capacity_bytes:
            evicted.append(self._evict_for(key))
        self._policy.insert(key, position)
        self._blocks[key] = Block(payload, size_bytes, position)
        self.used_bytes += size_bytes
        return Stored(tuple(evicted)) if evicted else _STORED

    def touch_prefix(self, keys: Iterable[BlockKey]) -> int:
        """`match_prefix`, and each of these blocks is now used once more, front to back."""
        blocks, touch, held = self._blocks, self._policy.touch, 0
        for key in keys:
            if key not in blocks:
                break
            touch(key)
            held += 1
        return held

    def put_run(self, keys: Iterable[BlockKey], blocks: Iterable[Block[Payload]]) -> Run[Payload]:
        """Hold one block after the other, exactly as one `put` each would; the shorter argument ends it.

        Blocks are given as they will be held: they cannot change, so where they carry nothing one stands for many.

        Raises:
            ValueError: as `put` does; the blocks before are held then.
        """
        stored: list[BlockKey] = []
        evicted: list[tuple[BlockKey, Block[Payload]]] = []
        refused, used, capacity = 0, self.used_bytes, self.capacity_bytes
        held, policy = self._blocks, self._policy
        touch, insert, choose = policy.touch, policy.insert, policy.victim
        room = capacity - self.pinned_bytes
        try:
            for key, block in zip(keys, blocks, strict=False):
                size = block.size_bytes
                there = held.get(key)
                if there is not None and there.size_bytes == size:
                    touch(key)
                    continue
                if there is not None or size < 1:
                    self.put(key, block.payload, size_bytes=size)  # says what is wrong with it
                if size > room:
                    refused += 1
                    continue
                while used + size > capacity:
                    victim = choose(key, self._pinned())
                    gone = held.pop(victim)
                    used -= gone.size_bytes
                    evicted.append((victim, gone))
                insert(key, block.position)
                held[key] = block
                used += size
                stored.append(key)
        finally:
            self.used_bytes = used
        return Run(stored, evicted, refused)

    def evict(self) -> tuple[BlockKey, Block[Payload]] | None:
        """Let the policy's choice leave; `None` when everything is pinned or the store is empty."""
        if len(self._pins) == len(self._blocks):
            return None
        return self._evict_for(None)

    def remove(self, key: BlockKey) -> Block[Payload]:
        """Take a block out by name.

        Raises:
            KeyError: when the key is not held.
            ValueError: when it is pinned.
        """
        self._held(key)
        if key in self._pins:
            raise ValueError(
                f"block {key!r} is pinned {self._pins[key]} times; only unpinned blocks can be removed"
            )
        self._policy.remove(key)
        return self._take(key)

    def pin(self, key: BlockKey) -> None:
        """Keep the block until it is unpinned as often as it was pinned.

        Raises:
            KeyError: when the key is not held.
        """
        block = self._held(key)
        if key not in self._pins:
            self.pinned_bytes += block.size_bytes
            self._spared = None
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: BlockKey) -> None:
        """Undo one `pin`.

        Raises:
            ValueError: when the key is not pinned.
        """
        if key not in self._pins:
            raise ValueError(f"block {key!r} is not pinned, so it cannot be unpinned")
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            self._spared = None
            self.pinned_bytes -= self._blocks[key].size_bytes

    def check(self) -> None:
        """Verify what must always hold: no block lost or counted twice, and never more than the capacity.

        Raises:
            AssertionError: naming what is broken.
        """
        used = sum(block.size_bytes for block in self._blocks.values())
        pinned = sum(self._blocks[key].size_bytes for key in self._pins if key in self._blocks)
        invariants = {
            "used bytes are the sum of the blocks": used == self.used_bytes,
            "used bytes stay within the capacity": used <= self.capacity_bytes,
            "pinned bytes are the sum of the pinned blocks": pinned == self.pinned_bytes,
            "pinned keys are held": all(key in self._blocks for key in self._pins),
            "every pin is counted": all(count > 0 for count in self._pins.values()),
            "the policy holds as many keys as the store": len(self._policy) == len(self._blocks),
            "the policy holds the keys of the store": all(key in self._policy for key in self._blocks),
        }
        verify(f"a store of {self.capacity_bytes} bytes", invariants)

    def _held(self, key: BlockKey) -> Block[Payload]:
        if key not in self._blocks:
            raise KeyError(f"block {key!r} is not held; the store has {len(self._blocks)} other blocks")
        return self._blocks[key]

    def _pinned(self) -> frozenset[BlockKey]:
        """The pinned keys as policies get them; made anew only when they have changed since the last eviction."""
        if self._spared is None:
            self._spared = frozenset(self._pins)
        return self._spared

    def _take(self, key: BlockKey) -> Block[Payload]:
        block = self._blocks.pop(key)
        self.used_bytes -= block.size_bytes
        return block

    def _evict_for(self, incoming: BlockKey | None) -> tuple[BlockKey, Block[Payload]]:
        victim = self._policy.victim(incoming, self._pinned())
        return victim, self._take(victim)


def verify(what: str, invariants: Mapping[str, bool]) -> None:
    """Raise an `AssertionError` that names the invariants that are broken."""
    broken = [name for name, holds in invariants.items() if not holds]
    if broken:
        raise AssertionError(f"broken invariants of {what}: {'; '.join(broken)}")
