"""KVCache storage: block stores, eviction policies, the prefix index, tiers and backends."""

from mooncake_lab.store.blockstore import Block, BlockStore, Refused, Run, Stored
from mooncake_lab.store.eviction import EVICTION_POLICIES, EvictionPolicy, NothingToEvictError, PolicyFactory
from mooncake_lab.store.index import PrefixIndex

__all__ = [
    "EVICTION_POLICIES",
    "Block",
    "BlockStore",
    "EvictionPolicy",
    "NothingToEvictError",
    "PolicyFactory",
    "PrefixIndex",
    "Refused",
    "Run",
    "Stored",
]
