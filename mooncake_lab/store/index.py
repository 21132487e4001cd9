"""The global index: which instance holds which blocks, and how much of a prompt each could reuse.

A block's holders are the bits of one integer, a bit an instance. One walk along a prompt's keys then gives every
instance's prefix match at once: an instance drops out where its bit does.
"""

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from mooncake_lab.core import BlockKey


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """One life of an instance in a `PrefixIndex`: what it says is believed while that life lasts."""

    instance: str
    bit: int
    """The place of its bit among a block's holders."""


@dataclass(frozen=True, slots=True)
class _View:
    """What a reader sees at once: who is in, and who holds what."""

    members: tuple[Membership | None, ...]
    """By bit; `None` where the instance is gone."""
    alive: int
    holders: dict[BlockKey, int]


@final
class PrefixIndex:
    """Who holds which prefix over all instances (FAST'25 §3: what Conductor places requests by).

    It is told and does not ask. An instance that joins gets a `Membership`, and with it announces and retracts its
    blocks, in the order in which they came and went. One that died is dropped and, when it comes back, joins anew;
    what was still under way from its former life is not believed then, so nobody is sent to blocks that died. What
    is read is a hint and may be old: whoever acts on it finds out at the instance.

    Any thread may call any method. Changes take a lock; reading takes none, and sees each block either before or
    after a change. Mutable: it changes as blocks come and go.
    """

    __slots__ = ("_changing", "_view")

    def __init__(self) -> None:
        self._view = _View((), 0, {})
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._view.holders)

    @property
    def instances(self) -> tuple[str, ...]:
        """Those that are in, in the order of `matches`."""
        return tuple(member.instance for member in self._view.members if member is not None)

    def join(self, instance: str) -> Membership:
        """Let an instance in, holding nothing.

        Raises:
            ValueError: when it is in already.
        """
        with self._changing:
            if instance in self.instances:
                raise ValueError(f"instance {instance!r} is in the index already; drop it before it joins again")
            members = self._view.members if None in self._view.members else (*self._view.members, None)
            member = Membership(instance, members.index(None))
            alive = self._view.alive | 1 << member.bit
            self._view = _View(_replaced(members, member.bit, member), alive, self._view.holders)
            return member

    def drop(self, instance: str) -> None:
        """Forget an instance and all it held. It goes through every block anybody holds, about 0.1 us each.

        Raises:
            KeyError: when it is not in.
        """
        with self._changing:
            member = self._member(instance)
            alive = self._view.alive & ~(1 << member.bit)
            holders = {key: left for key, mask in self._view.holders.items() if (left := mask & alive)}
            self._view = _View(_replaced(self._view.members, member.bit, None), alive, holders)

    def announce(self, member: Membership, keys: Iterable[BlockKey]) -> bool:
        """The instance holds these blocks from now on; false, and nothing changed, where its life is over."""
        return self._change(member, keys, ())

    def retract(self, member: Membership, keys: Iterable[BlockKey]) -> bool:
        """The instance holds these blocks no longer, if it did; false where its life is over."""
        return self._change(member, (), keys)

    def update(self, member: Membership, added: Iterable[BlockKey], removed: Iterable[BlockKey]) -> bool:
        """Blocks came and others left at once; false where its life is over."""
        return self._change(member, added, removed)

    def replace(self, member: Membership, keys: Collection[BlockKey]) -> bool:
        """The instance holds exactly these blocks: for when messages were lost. False where its life is over."""
        kept = frozenset(keys)
        with self._changing:
            if not self._believes(member):
                return False
            self._apply(member, kept, [key for key in self._held_by(member) if key not in kept])
            return True

    def matches(self, keys: Sequence[BlockKey]) -> list[int]:
        """How many leading blocks of a prompt each instance holds, in the order of `instances`."""
        view = self._view
        found = _walk(view, keys)
        if None in view.members:
            return [depth for depth, member in zip(found, view.members, strict=True) if member is not None]
        return found

    def longest(self, keys: Sequence[BlockKey]) -> tuple[str, int] | None:
        """The instance with the longest prefix of a prompt and its blocks; `None` where nobody holds the first.

        Of several it is the first by name, whoever joined when.
        """
        view = self._view
        found = zip(_walk(view, keys), view.members, strict=True)
        ranked = [(-blocks, member.instance) for blocks, member in found if member is not None and blocks]
        return (min(ranked)[1], -min(ranked)[0]) if ranked else None

    def holders(self, key: BlockKey) -> tuple[str, ...]:
        """Who holds a block, in the order of `instances`."""
        view = self._view
        mask = view.holders.get(key, 0)
        return tuple(member.instance for member in view.members if member is not None and mask >> member.bit & 1)

    def held_by(self, instance: str) -> set[BlockKey]:
        """What an instance holds; goes through every block.

        Raises:
            KeyError: when it is not in.
        """
        with self._changing:
            return self._held_by(self._member(instance))

    def replicas(self) -> dict[BlockKey, int]:
        """By how many instances each held block is held (FAST'25 Fig. 11)."""
        return {key: mask.bit_count() for key, mask in self._view.holders.copy().items()}

    # with the lock held

    def _change(self, member: Membership, added: Iterable[BlockKey], removed: Iterable[BlockKey]) -> bool:
        with self._changing:
            if not self._believes(member):
                return False
            self._apply(member, added, removed)
            return True

    def _apply(self, member: Membership, added: Iterable[BlockKey], removed: Iterable[BlockKey]) -> None:
        bit, holders = 1 << member.bit, self._view.holders
        for key in added:
            holders[key] = holders.get(key, 0) | bit
        for key in removed:
            left = holders.get(key, 0) & ~bit
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def _believes(self, member: Membership) -> bool:
        return self._view.members[member.bit] is member

    def _held_by(self, member: Membership) -> set[BlockKey]:
        return {key for key, mask in self._view.holders.items() if mask >> member.bit & 1}

    def _member(self, instance: str) -> Membership:
        for member in self._view.members:
            if member is not None and member.instance == instance:
                return member
        raise KeyError(f"instance {instance!r} is not in the index; there are {list(self.instances)}")


def _replaced(
    members: tuple[Membership | None, ...], bit: int, member: Membership | None
) -> tuple[Membership | None, ...]:
    return (*members[:bit], member, *members[bit + 1 :])


def _walk(view: _View, keys: Sequence[BlockKey]) -> list[int]:
    """The leading blocks of each bit; a bit that left the mask keeps the depth at which it did."""
    found = [0] * len(view.members)
    holders, mask, depth = view.holders, view.alive, 0
    for key in keys:
        still = mask & holders.get(key, 0)
        if still != mask:
            _note(found, mask ^ still, depth)
            mask = still
            if not mask:
                return found
        depth += 1
    _note(found, mask, depth)
    return found


def _note(found: list[int], bits: int, depth: int) -> None:
    while bits:
        lowest = bits & -bits
        found[lowest.bit_length() - 1] = depth
        bits ^= lowest
