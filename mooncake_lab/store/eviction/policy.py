"""The contract of eviction policies: they order keys, and know nothing of bytes, payloads or clocks."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from mooncake_lab.core import BlockKey

NOTHING_SPARED: frozenset[BlockKey] = frozenset()
"""The usual second argument of `victim`."""


class NothingToEvictError(LookupError):
    """A policy was asked for a victim while it held no key, or none that may go."""

    def __init__(self, held: int) -> None:
        super().__init__(f"no victim: the policy holds {held} keys and every one of them is spared")


class EvictionPolicy(Protocol):
    """Chooses which block leaves a full store (arXiv §4.2, Table 1).

    The store calls `touch` on a hit. On a miss it calls `victim` until the newcomer fits, then `insert`;
    so a newcomer is never its own victim. The same calls always give the same victims.
    """

    def touch(self, key: BlockKey, /) -> None:
        """Record a hit on a held key. Changes the order, never the set of keys."""
        ...

    def insert(self, key: BlockKey, position: int = 0, /) -> None:
        """Start to hold `key`, the block number `position` of its request (0 is the first)."""
        ...

    def victim(
        self, incoming: BlockKey | None = None, spared: frozenset[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Choose the key that leaves, forget it and return it; never one of `spared` (the pinned ones).

        `incoming` is the key that needs the space, `None` without one.

        Raises:
            NothingToEvictError: when every held key is spared, or no key is held.
        """
        ...

    def remove(self, key: BlockKey, /) -> None:
        """Forget a held key that left for a reason of its own; it was not a victim and leaves no trace."""
        ...

    def __contains__(self, key: object, /) -> bool:
        """Whether the key is held."""
        ...

    def __len__(self) -> int:
        """How many keys are held."""
        ...


PolicyFactory: TypeAlias = Callable[[int], EvictionPolicy]
"""Makes a fresh policy for a store, from its capacity in blocks."""
