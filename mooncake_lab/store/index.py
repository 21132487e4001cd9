"""The global index: which instance holds which blocks, and how much of a prompt each could reuse.

The holders of a block are the bits of one integer, one bit per instance. One walk along the keys of a prompt gives
the prefix match of every instance at once: an instance drops out where its bit does.
"""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import final

from mooncake_lab.core import BlockKey


@final
class PrefixIndex:
    """Which instance holds which prefix (FAST'25 §3: what Conductor places requests by).

    It only knows what it is told. An instance joins, and reports which blocks it added and removed, in order. One
    that failed is dropped, and joins again when it comes back. A match is a hint and may be old: the instance
    itself knows. Mutable, and for one thread.
    """

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}  # of each instance, its place among the holders of a block
        self._all = 0
        """The bits of all members."""
        self._shared = 0
        """The bits of members whose blocks every member can read."""
        self._holders: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, instance: object) -> bool:
        return instance in self._bits

    @property
    def instances(self) -> tuple[str, ...]:
        """The members, in the order of `matches`."""
        return tuple(self._bits)

    def join(self, instance: str, *, shared: bool = False) -> None:
        """Add an instance that holds nothing.

        Args:
            instance: its name.
            shared: whether it is a shared store: what it holds counts as held by every instance.

        Raises:
            ValueError: when it is a member already.
        """
        if instance in self:
            raise ValueError(f"instance {instance!r} is in the index already; drop it before it joins again")
        bit = self._bits[instance] = next(bit for bit in count() if not self._all >> bit & 1)
        self._all |= 1 << bit
        self._shared |= shared << bit

    def drop(self, instance: str) -> None:
        """Remove an instance and all it held. It visits every block of all instances, about 0.1 us each.

        Raises:
            KeyError: when it is no member.
        """
        self._all &= ~(1 << self._bit(instance))
        del self._bits[instance]
        self._shared &= self._all
        self._holders = {key: left for key, mask in self._holders.items() if (left := mask & self._all)}

    def update(self, instance: str, added: Iterable[BlockKey], removed: Iterable[BlockKey] = ()) -> None:
        """Add, then remove blocks of an instance.

        Raises:
            KeyError: when it is no member.
        """
        bit, holders = 1 << self._bit(instance), self._holders
        for key in added:
            holders[key] = holders.get(key, 0) | bit
        for key in removed:
            left = holders.pop(key, 0) & ~bit
            if left:
                holders[key] = left

    def matches(self, keys: Sequence[BlockKey]) -> list[int]:
        """How many leading blocks of a prompt each instance holds, in the order of `instances`."""
        holders, shared, mask, depth = self._holders, self._shared, self._all, 0
        found = [0] * mask.bit_length()  # by bit; one that leaves the mask keeps the depth at which it does
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
        return [found[bit] for bit in self._bits.values()]

    def held_by(self, instance: str) -> set[BlockKey]:
        """What an instance holds; visits every block.

        Raises:
            KeyError: when it is no member.
        """
        bit = self._bit(instance)
        return {key for key, mask in self._holders.items() if mask >> bit & 1}

    def _bit(self, instance: str) -> int:
        bit = self._bits.get(instance)
        if bit is None:
            raise KeyError(f"instance {instance!r} is not in the index; there are {list(self._bits)}")
        return bit


def _note(found: list[int], bits: int, depth: int) -> None:
    while bits:
        lowest = bits & -bits
        found[lowest.bit_length() - 1] = depth
        bits ^= lowest
