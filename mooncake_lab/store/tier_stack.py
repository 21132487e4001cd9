"""Which block is in which tier: the pure part of a tiered store, without I/O, clock or threads.

The caller holds one lock around all calls, or has one thread. It carries out the commands that it gets (`Free`,
`Demote`) and reports what came of its transfers (`end_write`, `abort_write`, `end_read`, `end_demotion`).
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, final

from mooncake_lab.core import BlockKey
from mooncake_lab.store.backends.base import Reservation
from mooncake_lab.store.blockstore import Block, Refused
from mooncake_lab.store.tier import Demote, Entry, Free, PendingEviction, Tier, TierSpec


class WriteOutcome(NamedTuple):
    """Outcome of `begin_write`: the entry to fill, `None` where the tier does not take the block; and commands."""

    entry: Entry | None
    commands: Sequence[Free | Demote] = ()


@final
class TierStack:
    """Tiers, the fastest first, and the rules between them. Mutable.

    A new block goes into the first tier that takes it. An evicted block goes to the tier below, where it is only
    touched if it is held there already; when the queue is full it is dropped, because no request may wait for it.

    Args:
        specs: the fastest first.

    Raises:
        ValueError: when there are none.
    """

    __slots__ = ("tiers",)

    def __init__(self, specs: Sequence[TierSpec]) -> None:
        if not specs:
            raise ValueError("a tiered store of 0 tiers; at least 1 is needed")
        self.tiers: list[Tier] = [
            Tier(spec, index, is_last=index + 1 == len(specs)) for index, spec in enumerate(specs)
        ]

    def tier_of(self, key: BlockKey) -> int | None:
        """The first tier that holds a block; changes nothing."""
        return next((tier.index for tier in self.tiers if tier.holds(key)), None)

    def match_prefix(self, keys: Iterable[BlockKey]) -> int:
        """How many of these keys are held, in any tier, before the first that is not; changes nothing."""
        return sum(1 for _ in takewhile(lambda key: self.tier_of(key) is not None, keys))

    def is_taken(self, key: BlockKey) -> bool:
        """Whether any tier has the block or is being written."""
        return any(tier.is_taken(key) for tier in self.tiers)

    def is_taken_above(self, key: BlockKey, index: int) -> bool:
        """Whether a tier above this one has the block by now, or another writer has begun to write it anywhere."""
        return any(tier.is_taken(key) and (tier.index < index or not tier.holds(key)) for tier in self.tiers)

    def begin_write(self, index: int, key: BlockKey, size_bytes: int, position: int) -> WriteOutcome:
        """Evict until the block fits and pin an entry for it, which is readable after `end_write`.

        A block that could not be read is replaced, since its bytes are at hand now.
        """
        tier = self.tiers[index]
        is_stale = tier.is_replaceable(key)
        if (key in tier.blocks and not is_stale) or key in tier.pending or not tier.writes.allows():
            return WriteOutcome(None)
        commands: list[Free | Demote] = []
        if is_stale:
            commands += tier.free(tier.blocks.remove(key).payload.handle)
        entry = Entry()
        outcome = tier.blocks.put(key, entry, size_bytes=size_bytes, position=position)
        if isinstance(outcome, Refused):
            tier.counters.refused += 1
            return WriteOutcome(None, commands)
        tier.blocks.pin(key)
        return WriteOutcome(entry, commands + self._depart(tier, outcome.evicted))

    def end_write(self, index: int, key: BlockKey) -> None:
        """The bytes of a block are there: it can be read."""
        blocks = self.tiers[index].blocks
        block = blocks.peek(key)
        if block is not None:
            block.payload.is_ready = True
        blocks.unpin(key)

    def abort_write(self, index: int, key: BlockKey) -> list[Free]:
        """The bytes of a block will not come."""
        tier = self.tiers[index]
        tier.blocks.unpin(key)
        return tier.free(tier.blocks.remove(key).payload.handle)

    def evict_one(self, index: int) -> Sequence[Free | Demote] | None:
        """Evict one block for space in one piece; `None` when all are pinned, or the device evicts by itself."""
        tier = self.tiers[index]
        if tier.spec.evicts:
            return None
        victim = tier.blocks.evict()
        return None if victim is None else self._depart(tier, [victim])

    def end_demotion(self, index: int, key: BlockKey) -> list[Free]:
        """A `Demote` has ended; counts whether the block is in the tier below now."""
        tier = self.tiers[index]
        is_below = self.tiers[index + 1].has_intact(key)
        tier.counters.demoted += is_below
        tier.counters.dropped += not is_below
        return tier.unref(key)

    def recover(self, index: int, block: Reservation, size_bytes: int) -> list[Reservation]:
        """Hold a block that was found on the device; those that are not held because of it."""
        entry = Entry(block, is_ready=True)
        outcome = self.tiers[index].blocks.put(block.key, entry, size_bytes=size_bytes, position=block.position)
        if isinstance(outcome, Refused):
            return [block]
        return [old.payload.handle for _, old in outcome.evicted if old.payload.handle is not None]

    def check(self) -> None:
        """Verify every tier's invariants."""
        for tier in self.tiers:
            tier.check()

    def _depart(self, tier: Tier, evicted: Iterable[tuple[BlockKey, Block[Entry]]]) -> list[Free | Demote]:
        """Queue what the tier below lacks or could not read, and free the rest."""
        below = None if tier.is_last else self.tiers[tier.index + 1]
        commands: list[Free | Demote] = []
        for key, block in evicted:
            handle, size = block.payload.handle, block.size_bytes
            if handle is None:
                continue  # not reachable: an entry without bytes is pinned
            if tier.spec.evicts:
                continue  # only forgotten: its device chooses what leaves
            tier.counters.evicted += 1
            if below is not None and below.has_intact(key):
                below.touch(key)
                commands += tier.free(handle)
            elif below is not None and tier.pending_bytes + size <= tier.spec.queue_bytes:
                tier.pending[key] = PendingEviction(handle, size, block.position)
                tier.pending_bytes += size
                tier.queue.append(key)
                commands.append(Demote(tier.index))
            else:
                tier.counters.dropped += below is not None
                commands += tier.free(handle)
        return commands
