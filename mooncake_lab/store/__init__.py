"""KVCache storage: block stores, eviction policies, tiers, backends, and replay of requests through a cache."""

from typing import TYPE_CHECKING

from mooncake_lab.core.lazy import lazy_names
from mooncake_lab.store.blockstore import Block, BlockStore, Refused, Run, Stored
from mooncake_lab.store.eviction import EVICTION_POLICIES, EvictionPolicy, NothingToEvictError, PolicyFactory
from mooncake_lab.store.index import Membership, PrefixIndex

if TYPE_CHECKING:
    from mooncake_lab.store.replay import Replay, Requests, replay, replay_tokens

__all__ = [
    "EVICTION_POLICIES",
    "Block",
    "BlockStore",
    "EvictionPolicy",
    "Membership",
    "NothingToEvictError",
    "PolicyFactory",
    "PrefixIndex",
    "Refused",
    "Replay",
    "Requests",
    "Run",
    "Stored",
    "replay",
    "replay_tokens",
]

__getattr__ = lazy_names(
    __name__,
    {"replay": ("Replay", "Requests", "replay", "replay_tokens")},
)
