"""The global index: which instance holds which blocks, and how much of a prompt each could reuse.

The holders of a block are the bits of one integer, one bit per instance. One walk along the keys of a prompt gives
the prefix match of every instance at once: an instance drops out where its bit does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from mooncake_lab.core import BlockKey


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """One incarnation of an instance in a `PrefixIndex`; its updates count until it is dropped."""

    instance: str
    bit: int
    """Its bit among the holders of a block."""


@final
class PrefixIndex:
    """Which instance holds which prefix (FAST'25 §3: what Conductor places requests by).

    It only knows what it is told. An instance that joins gets a `Membership`, and reports with it which blocks it
    added and removed, in order. A failed instance is dropped and joins again when it comes back; late updates of
    its former incarnation are ignored. A match is a hint and may be old: the instance itself knows. Mutable, and
    for one thread.
    """

    def __init__(self) -> None:
        self._members: list[Membership | None] = []  # by bit; None where the instance was dropped
        self._alive = 0
        self._shared = 0
        """The bits of members whose blocks every member can read."""
        self._holders: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def instances(self) -> tuple[str, ...]:
        """The members, in the order of `matches`."""
        return tuple([member.instance for member in self._members if member is not None])

    def join(self, instance: str, *, shared: bool = False) -> Membership:
        """Add an instance that holds nothing.

        Args:
            instance: its name.
            shared: whether it is a pool: what it holds counts as held by every instance.

        Raises:
            ValueError: when it is a member already.
        """
        if instance in self.instances:
            raise ValueError(f"instance {instance!r} is in the index already; drop it before it joins again")
        if None not in self._members:
            self._members.append(None)
        member = Membership(instance, self._members.index(None))
        self._members[member.bit] = member
        self._alive |= 1 << member.bit
        self._shared |= shared << member.bit
        return member

    def drop(self, instance: str) -> None:
        """Remove an instance and all it held. It visits every block of all instances, about 0.1 us each.

        Raises:
            KeyError: when it is no member.
        """
        member = self._member(instance)
        self._members[member.bit] = None
        self._alive &= ~(1 << member.bit)
        self._shared &= self._alive
        self._holders = {key: left for key, mask in self._holders.items() if (left := mask & self._alive)}

    def update(self, member: Membership, added: Iterable[BlockKey], removed: Iterable[BlockKey] = ()) -> bool:
        """Add, then remove blocks of an instance; false, and nothing changed, where it was dropped."""
        if self._members[member.bit] is not member:
            return False
        bit, holders = 1 << member.bit, self._holders
        for key in added:
            holders[key] = holders.get(key, 0) | bit
        for key in removed:
            left = holders.get(key, 0) & ~bit
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)
        return True

    def matches(self, keys: Sequence[BlockKey]) -> list[int]:
        """How many leading blocks of a prompt each instance holds, in the order of `instances`."""
        found = [0] * len(self._members)
        holders, shared, mask, depth = self._holders, self._shared, self._alive, 0
        for key in keys:
            held = holders.get(key, 0)
            still = mask if held & shared else mask & held
            if still != mask:
                _note(found, mask ^ still, depth)
                mask = still
                if not mask:
                    break
            depth += 1
        _note(found, mask, depth)
        if None in self._members:
            return [depth for depth, member in zip(found, self._members, strict=True) if member is not None]
        return found

    def held_by(self, instance: str) -> set[BlockKey]:
        """What an instance holds; visits every block.

        Raises:
            KeyError: when it is no member.
        """
        bit = self._member(instance).bit
        return {key for key, mask in self._holders.items() if mask >> bit & 1}

    def replicas(self) -> dict[BlockKey, int]:
        """How many instances hold each block (FAST'25 Fig. 11)."""
        return {key: mask.bit_count() for key, mask in self._holders.items()}

    def _member(self, instance: str) -> Membership:
        for member in self._members:
            if member is not None and member.instance == instance:
                return member
        raise KeyError(f"instance {instance!r} is not in the index; there are {list(self.instances)}")


def _note(found: list[int], bits: int, depth: int) -> None:
    """Record how deep these bits came, which leave the mask there."""
    while bits:
        lowest = bits & -bits
        found[lowest.bit_length() - 1] = depth
        bits ^= lowest
