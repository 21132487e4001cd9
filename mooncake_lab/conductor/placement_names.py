"""All placement policies by the names of the command line."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from mooncake_lab.conductor.placement import (
    CacheAware,
    KVCacheCentric,
    LoadBalance,
    LongestPrefix,
    PlacementPolicy,
    PrefixAffinity,
    Random,
)
from mooncake_lab.conductor.routers import FewestRequests, RoundRobin

PLACEMENT_POLICIES: Final[Mapping[str, Callable[[], PlacementPolicy]]] = MappingProxyType(
    {
        "random": Random,
        "round_robin": RoundRobin,
        "load_balance": LoadBalance,
        "fewest_requests": FewestRequests,
        "longest_prefix": LongestPrefix,
        "prefix_affinity": PrefixAffinity,
        "cache_aware": CacheAware,
        "kvcache_centric": KVCacheCentric,
    }
)
"""Every placement policy by the name the command line uses."""


def named_placement(name: str, seed: int = 0) -> PlacementPolicy:
    """The placement policy of a name, with its own defaults; chance, where it plays a part, by the seed.

    Raises:
        KeyError: when there is no policy of that name.
    """
    return Random(seed) if name == "random" else PLACEMENT_POLICIES[name]()
