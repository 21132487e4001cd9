"""Each policy against libCacheSim, access for access.

LRU, FIFO, LFU, ARC, SIEVE and Belady's optimum mean the same thing in both: LFU counts live in the cache, ties go
by recency, and the victim leaves before the newcomer enters. Where they differ:

* S3-FIFO: while nothing was evicted yet, libCacheSim fills the main queue as soon as the small one is full; the
  published algorithm does not. `fill_main_first=True` does as libCacheSim does and is compared here. Below about
  50 blocks libCacheSim's S3-FIFO ends the process, so capacities start at 60.
* Belady's optimum: which of the blocks that are never used again leaves first is free, and changes no hit.
"""

import libcachesim
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.store.eviction import EVICTION_POLICIES, S3FIFO, Belady

THEIRS = {
    "lru": libcachesim.LRU,
    "fifo": libcachesim.FIFO,
    "lfu": libcachesim.LFU,
    "arc": libcachesim.ARC,
    "sieve": libcachesim.Sieve,
    "belady": libcachesim.Belady,
    "s3fifo": libcachesim.S3FIFO,
}
NEVER = 2**63 - 1
SKEWED = st.lists(st.integers(0, 400).map(lambda draw: draw * draw // 400), min_size=1, max_size=3000)


def their_hits(name, accesses, capacity):
    """Hit or miss of each access in libCacheSim; its optimum wants the step of each next access."""
    cache = THEIRS[name](capacity, hashpower=12)
    upcoming = {}
    next_use = [NEVER] * len(accesses)
    for step in range(len(accesses) - 1, -1, -1):
        next_use[step] = upcoming.get(accesses[step], NEVER)
        upcoming[accesses[step]] = step
    request = libcachesim.Request()
    request.obj_size = 1
    found = []
    for step, key in enumerate(accesses):
        request.obj_id = key + 1
        request.clock_time = step
        request.next_access_vtime = next_use[step]
        found.append(bool(cache.get(request)))
    return found


def our_hits(name, accesses, capacity):
    """Hit or miss of each access here."""
    policy = S3FIFO(capacity, fill_main_first=True) if name == "s3fifo" else EVICTION_POLICIES[name](capacity)
    if isinstance(policy, Belady):
        policy.foresee(accesses)
    found = []
    for key in accesses:
        hit = key in policy
        found.append(hit)
        if hit:
            policy.touch(key)
            continue
        if len(policy) == capacity:
            policy.victim(key)
        policy.insert(key)
    return found


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "s3fifo"])
@settings(deadline=None, max_examples=40)
@given(accesses=SKEWED, capacity=st.integers(1, 60))
def test_random_sequences_hit_alike(name, accesses, capacity):
    """On random sequences each policy hits and misses exactly where libCacheSim does."""
    assert our_hits(name, accesses, capacity) == their_hits(name, accesses, capacity)


@settings(deadline=None, max_examples=40)
@given(accesses=SKEWED, capacity=st.integers(60, 150))
def test_s3fifo_hits_alike_with_the_same_warm_up(accesses, capacity):
    """On random sequences S3-FIFO with libCacheSim's warm-up hits and misses exactly where libCacheSim does."""
    assert our_hits("s3fifo", accesses, capacity) == their_hits("s3fifo", accesses, capacity)


def test_s3fifo_as_published_differs_by_its_warm_up_alone():
    """The published warm-up gives other hits than libCacheSim's, so the comparison above is not vacuous."""
    draw = np.random.default_rng(0)
    accesses = (draw.zipf(1.2, 20_000) % 5_000).tolist()
    published = S3FIFO(100)
    found = []
    for key in accesses:
        found.append(key in published)
        if found[-1]:
            published.touch(key)
            continue
        if len(published) == 100:
            published.victim(key)
        published.insert(key)
    theirs = their_hits("s3fifo", accesses, 100)
    assert found != theirs
    assert abs(sum(found) - sum(theirs)) < 0.01 * len(accesses)


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize(("capacity", "requests"), [(100, 2000), (10_000, 12_031)])
def test_the_released_traces_hit_alike(released, name, capacity, requests):
    """On the released traces each policy hits exactly where libCacheSim does."""
    accesses = released.head(requests).block_ids.tolist()
    assert our_hits(name, accesses, capacity) == their_hits(name, accesses, capacity)
