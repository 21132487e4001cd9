"""Eviction policies: which block leaves when a store is full. Keys only."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from mooncake_lab.core.project import entry
from mooncake_lab.store.eviction.arc import ARC
from mooncake_lab.store.eviction.belady import Belady
from mooncake_lab.store.eviction.lru import FIFO, LRU
from mooncake_lab.store.eviction.policy import EvictionPolicy, NothingToEvictError, PolicyFactory
from mooncake_lab.store.eviction.ranked import LFU, LengthAware
from mooncake_lab.store.eviction.s3fifo import S3FIFO
from mooncake_lab.store.eviction.sieve import SIEVE
from mooncake_lab.store.eviction.twoq import TwoQ

EVICTION_POLICIES: Final[Mapping[str, PolicyFactory]] = MappingProxyType(
    {
        "lru": lambda _capacity_blocks: LRU(),
        "fifo": lambda _capacity_blocks: FIFO(),
        "lfu": lambda _capacity_blocks: LFU(),
        "length_aware": lambda _capacity_blocks: LengthAware(),
        "arc": ARC,
        "s3fifo": S3FIFO,
        "sieve": lambda _capacity_blocks: SIEVE(),
        "2q": TwoQ,
        "belady": lambda _capacity_blocks: Belady(),
    }
)
"""Every policy by name; a factory takes the capacity in blocks. `belady` must still be told the future."""


def make_policy(policy: str | PolicyFactory, capacity_blocks: int) -> EvictionPolicy:
    """A fresh policy, from a name in `EVICTION_POLICIES` or from a factory of one's own.

    Raises:
        ValueError: when the name is unknown.
    """
    if not isinstance(policy, str):
        return policy(capacity_blocks)
    return entry(EVICTION_POLICIES, policy, "unknown eviction policy")(capacity_blocks)


__all__ = [
    "ARC",
    "EVICTION_POLICIES",
    "FIFO",
    "LFU",
    "LRU",
    "S3FIFO",
    "SIEVE",
    "Belady",
    "EvictionPolicy",
    "LengthAware",
    "NothingToEvictError",
    "PolicyFactory",
    "TwoQ",
    "make_policy",
]
