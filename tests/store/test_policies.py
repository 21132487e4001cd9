"""Each policy against libCacheSim, access for access, and where that has none, against plain lists.

LRU, FIFO, LFU, ARC, SIEVE and Belady's optimum mean the same thing in both: LFU counts live in the cache, ties go
by recency, and the victim leaves before the newcomer enters. Where they differ:

* S3-FIFO: while nothing was evicted yet, libCacheSim fills the main queue as soon as the small one is full; the
  published algorithm does not. `fill_main_first=True` does as libCacheSim does and is compared here. Below about
  50 blocks libCacheSim's S3-FIFO ends the process, so capacities start at 60.
* 2Q: below 4 blocks libCacheSim's first queue, a quarter of the capacity, has no room, and newcomers never stay.
* Belady's optimum: which of the blocks that are never used again leaves first is free, and changes no hit.
"""

from collections import Counter

import libcachesim
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
    "2q": libcachesim.TwoQ,
    "belady": libcachesim.Belady,
    "s3fifo": libcachesim.S3FIFO,
}
NEVER = 2**63 - 1
SKEWED = st.lists(st.integers(0, 400).map(lambda draw: draw * draw // 400), min_size=1, max_size=3000)
SEQUENCES = st.lists(st.integers(0, 12), max_size=120)
CAPACITIES = st.integers(1, 8)


class Counts:
    """LengthAware: the smallest of (uses, minus position, last use) leaves."""

    def __init__(self) -> None:
        self.rank = {}

    def access(self, key, step, capacity):
        hit = key in self.rank
        if not hit and len(self.rank) == capacity:
            del self.rank[min(self.rank, key=self.rank.__getitem__)]
        uses = self.rank[key][0] if hit else 0
        self.rank[key] = (uses + 1, -position_of(key), step)
        return hit


class ThreeQueues:
    """S3-FIFO as published, oldest last; one block leaves at a time."""

    def __init__(self) -> None:
        self.small, self.main, self.ghosts, self.uses = [], [], [], {}

    def evict(self, capacity):
        small_capacity = max(1, int(0.1 * capacity))
        while True:
            if self.small and len(self.main) <= capacity - small_capacity:
                key = self.small.pop()
                if self.uses[key] < 2:
                    self.ghosts.insert(0, key)
                    del self.ghosts[int(0.9 * capacity) :]
                    return
                self.uses[key] = 0
                self.main.insert(0, key)
            else:
                key = self.main.pop()
                if not self.uses[key]:
                    return
                self.uses[key] -= 1
                self.main.insert(0, key)

    def access(self, key, _step, capacity):
        if key in self.small + self.main:
            self.uses[key] = min(self.uses[key] + 1, 3)
            return True
        remembered = key in self.ghosts
        if remembered:
            self.ghosts.remove(key)
        if len(self.small + self.main) == capacity:
            self.evict(capacity)
        (self.main if remembered else self.small).insert(0, key)
        self.uses[key] = 0
        return False


def position_of(key):
    """Where a key stands in its request: blocks keep their place, since a key names its whole prefix."""
    return key % 4


def hits_of(policy, accesses, capacity):
    """Hit or miss of each access under one of our policies."""
    if isinstance(policy, Belady):
        policy.foresee(accesses)
    found = []
    for key in accesses:
        found.append(key in policy)
        if key in policy:
            policy.touch(key)
            continue
        if len(policy) == capacity:
            policy.victim(key)
        policy.insert(key, position_of(key))
    return found


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


def ours(name, capacity):
    """Our policy, which fills the queues of S3-FIFO as libCacheSim does."""
    return S3FIFO(capacity, fill_main_first=True) if name == "s3fifo" else EVICTION_POLICIES[name](capacity)


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "s3fifo"])
@settings(deadline=None, max_examples=40)
@given(accesses=SKEWED, capacity=st.integers(1, 60))
def test_random_sequences_hit_alike(name, accesses, capacity):
    """On random sequences each policy hits and misses exactly where libCacheSim does."""
    capacity = max(4, capacity) if name == "2q" else capacity
    assert hits_of(ours(name, capacity), accesses, capacity) == their_hits(name, accesses, capacity)


@settings(deadline=None, max_examples=40)
@given(accesses=SKEWED, capacity=st.integers(60, 150))
def test_s3fifo_hits_alike_with_the_same_warm_up(accesses, capacity):
    """On random sequences S3-FIFO with libCacheSim's warm-up hits and misses exactly where libCacheSim does."""
    assert hits_of(ours("s3fifo", capacity), accesses, capacity) == their_hits("s3fifo", accesses, capacity)


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize(("capacity", "requests"), [(100, 2000), (10_000, 12_031)])
def test_the_released_traces_hit_alike(released, name, capacity, requests):
    """On the released traces each policy hits exactly where libCacheSim does."""
    accesses = released.head(requests).block_ids.tolist()
    assert hits_of(ours(name, capacity), accesses, capacity) == their_hits(name, accesses, capacity)


@pytest.mark.parametrize(("name", "simple"), [("length_aware", Counts), ("s3fifo", ThreeQueues)])
@given(accesses=SEQUENCES, capacity=CAPACITIES)
def test_a_policy_hits_when_its_simple_twin_hits(name, simple, accesses, capacity):
    """The paper's policy, and S3-FIFO as published, hit and miss like a reference made of plain lists."""
    reference = simple()
    expected = [reference.access(key, step, capacity) for step, key in enumerate(accesses)]
    assert hits_of(EVICTION_POLICIES[name](capacity), accesses, capacity) == expected


@given(accesses=SEQUENCES, capacity=CAPACITIES)
def test_no_policy_beats_the_optimum(accesses, capacity):
    """Belady's optimum has at least as many hits as every other policy, on every sequence."""
    best = sum(hits_of(Belady(), accesses, capacity))
    for name, factory in EVICTION_POLICIES.items():
        assert sum(hits_of(factory(capacity), accesses, capacity)) <= best, name


@given(accesses=SEQUENCES, capacity=st.integers(1, 6))
def test_the_optimum_is_the_best_of_all_choices(accesses, capacity):
    """Belady's optimum equals the best that an exhaustive search over all evictions finds."""
    accesses = accesses[:40]
    reachable = {frozenset(): 0}  # content of the cache to the most hits that lead there
    for key in accesses:
        following = Counter()
        for content, hits in reachable.items():
            if key in content:
                following[content] = max(following[content], hits + 1)
            elif len(content) < capacity:
                following[content | {key}] = max(following[content | {key}], hits)
            else:
                for victim in content:
                    following[(content - {victim}) | {key}] = max(following[(content - {victim}) | {key}], hits)
        reachable = following
    assert sum(hits_of(Belady(), accesses, capacity)) == max(reachable.values())


def test_the_optimum_refuses_a_future_it_did_not_see():
    """Belady's optimum fails loudly when it was not told the future, was told another, or was told too late."""
    with pytest.raises(ValueError, match="meets key 1 at access 0, but foresaw no access"):
        Belady().insert(1)
    policy = Belady()
    policy.foresee([1, 2])
    policy.insert(1)
    with pytest.raises(ValueError, match="meets key 3 at access 1, but foresaw 2"):
        policy.insert(3)
    with pytest.raises(ValueError, match="after 1 accesses"):
        policy.foresee([1, 2])


@given(accesses=SEQUENCES)
def test_length_aware_forgets_outdated_entries(accesses):
    """However long the sequence, LengthAware remembers a bounded number of entries."""
    policy = EVICTION_POLICIES["length_aware"](3)
    hits_of(policy, accesses * 10, 3)
    assert len(policy._heap) <= 2 * 3 + 64 + 1
