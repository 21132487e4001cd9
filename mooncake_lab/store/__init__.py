"""What is kept: block stores, eviction policies, replay of requests through a cache."""

from mooncake_lab.store.blockstore import Block, BlockStore, Refused, Stored
from mooncake_lab.store.eviction import EVICTION_POLICIES, EvictionPolicy, NothingToEvictError, PolicyFactory
from mooncake_lab.store.hit_rates import fine_grained_hit_rate, mean_request_hit_rate, token_hit_rate
from mooncake_lab.store.live_set import LiveSet, live_set, reuse_distances
from mooncake_lab.store.replay import Replay, Requests, replay, replay_tokens

__all__ = [
    "EVICTION_POLICIES",
    "Block",
    "BlockStore",
    "EvictionPolicy",
    "LiveSet",
    "NothingToEvictError",
    "PolicyFactory",
    "Refused",
    "Replay",
    "Requests",
    "Stored",
    "fine_grained_hit_rate",
    "live_set",
    "mean_request_hit_rate",
    "replay",
    "replay_tokens",
    "reuse_distances",
    "token_hit_rate",
]
