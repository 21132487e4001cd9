"""What is kept: block stores, eviction policies, replay of requests through a cache."""

from typing import TYPE_CHECKING

from mooncake_lab.core.lazy import lazy_names
from mooncake_lab.store.blockstore import Block, BlockStore, Refused, Run, Stored
from mooncake_lab.store.eviction import EVICTION_POLICIES, EvictionPolicy, NothingToEvictError, PolicyFactory
from mooncake_lab.store.index import Membership, PrefixIndex

if TYPE_CHECKING:
    from mooncake_lab.store.fine_grained import fine_grained_reuse
    from mooncake_lab.store.live_set import LiveSet, live_set, reuse_distances
    from mooncake_lab.store.replay import Replay, Requests, replay, replay_tokens

__all__ = [
    "EVICTION_POLICIES",
    "Block",
    "BlockStore",
    "EvictionPolicy",
    "LiveSet",
    "Membership",
    "NothingToEvictError",
    "PolicyFactory",
    "PrefixIndex",
    "Refused",
    "Replay",
    "Requests",
    "Run",
    "Stored",
    "fine_grained_reuse",
    "live_set",
    "replay",
    "replay_tokens",
    "reuse_distances",
]

__getattr__ = lazy_names(
    __name__,
    {
        "fine_grained": ("fine_grained_reuse",),
        "live_set": ("LiveSet", "live_set", "reuse_distances"),
        "replay": ("Replay", "Requests", "replay", "replay_tokens"),
    },
)
