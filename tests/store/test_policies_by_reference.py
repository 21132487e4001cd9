"""Each policy against a second one that is too simple to be wrong: lists, counters, and a walk over all of it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.store.eviction import EVICTION_POLICIES, S3FIFO, Belady

SEQUENCES = st.lists(st.integers(0, 12), max_size=120)
CAPACITIES = st.integers(1, 8)


class Recency:
    """LRU, and FIFO when hits do not count."""

    def __init__(self, *, hits_count: bool) -> None:
        self.hits_count = hits_count
        self.keys = []

    def access(self, key, _step, capacity):
        hit = key in self.keys
        if hit and self.hits_count:
            self.keys.remove(key)
            self.keys.append(key)
        if not hit:
            if len(self.keys) == capacity:
                self.keys.pop(0)
            self.keys.append(key)
        return hit


class Counts:
    """LFU, and LengthAware when positions matter: the smallest of (uses, minus position, last use) leaves."""

    def __init__(self, *, positions_count: bool) -> None:
        self.positions_count = positions_count
        self.rank = {}

    def access(self, key, step, capacity):
        hit = key in self.rank
        if not hit and len(self.rank) == capacity:
            del self.rank[min(self.rank, key=self.rank.__getitem__)]
        uses = self.rank[key][0] if hit else 0
        self.rank[key] = (uses + 1, -position_of(key) if self.positions_count else 0, step)
        return hit


class AdaptiveLists:
    """ARC as published: four lists, newest first, cut before the eviction."""

    def __init__(self) -> None:
        self.t1, self.t2, self.b1, self.b2, self.p = [], [], [], [], 0

    def replace(self, key):
        if self.t1 and (len(self.t1) > self.p or (key in self.b2 and len(self.t1) == self.p)):
            self.b1.insert(0, self.t1.pop())
        else:
            self.b2.insert(0, self.t2.pop())

    def access(self, key, _step, capacity):
        if key in self.t1 or key in self.t2:
            (self.t1 if key in self.t1 else self.t2).remove(key)
            self.t2.insert(0, key)
            return True
        if key in self.b1:
            self.p = min(self.p + max(1, len(self.b2) / len(self.b1)), capacity)
            self.replace(key)
            self.b1.remove(key)
            self.t2.insert(0, key)
            return False
        if key in self.b2:
            self.p = max(self.p - max(1, len(self.b1) / len(self.b2)), 0)
            self.replace(key)
            self.b2.remove(key)
            self.t2.insert(0, key)
            return False
        if len(self.t1) + len(self.b1) == capacity:
            if len(self.t1) < capacity:
                self.b1.pop()
                self.replace(key)
            else:
                self.t1.pop()
        elif len(self.t1 + self.t2 + self.b1 + self.b2) >= capacity:
            if len(self.t1 + self.t2 + self.b1 + self.b2) == 2 * capacity:
                self.b2.pop()
            self.replace(key)
        self.t1.insert(0, key)
        return False


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


class Hand:
    """SIEVE as published: one queue, oldest first, and a hand that names the key it points at."""

    def __init__(self) -> None:
        self.queue, self.hit, self.hand = [], set(), None

    def access(self, key, _step, capacity):
        if key in self.queue:
            self.hit.add(key)
            return True
        if len(self.queue) == capacity:
            at = self.queue.index(self.hand) if self.hand in self.queue else 0
            while self.queue[at] in self.hit:
                self.hit.remove(self.queue[at])
                at = (at + 1) % len(self.queue)
            self.queue.pop(at)
            self.hand = self.queue[at] if at < len(self.queue) else None
        self.queue.append(key)
        return False


class Oracle:
    """Belady's optimum: look ahead from here, each time."""

    def __init__(self, future) -> None:
        self.future, self.keys = future, set()

    def access(self, key, step, capacity):
        hit = key in self.keys
        if not hit and len(self.keys) == capacity:
            ahead = self.future[step + 1 :]
            self.keys.remove(max(self.keys, key=lambda held: ahead.index(held) if held in ahead else len(ahead)))
        self.keys.add(key)
        return hit


REFERENCES = {
    "lru": lambda _: Recency(hits_count=True),
    "fifo": lambda _: Recency(hits_count=False),
    "lfu": lambda _: Counts(positions_count=False),
    "length_aware": lambda _: Counts(positions_count=True),
    "arc": lambda _: AdaptiveLists(),
    "s3fifo": lambda _: ThreeQueues(),
    "sieve": lambda _: Hand(),
    "belady": Oracle,
}


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


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@given(accesses=SEQUENCES, capacity=CAPACITIES)
def test_a_policy_hits_when_its_simple_twin_hits(name, accesses, capacity):
    """Every policy hits and misses, access for access, like a reference made of plain lists."""
    reference = REFERENCES[name](accesses)
    expected = [reference.access(key, step, capacity) for step, key in enumerate(accesses)]
    assert hits_of(EVICTION_POLICIES[name](capacity), accesses, capacity) == expected


def test_every_policy_has_a_reference():
    """No policy escapes the comparison."""
    assert list(REFERENCES) == list(EVICTION_POLICIES)


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


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_s3fifo_refuses_an_empty_queue(share):
    """The small queue of S3-FIFO has a share strictly between none and all."""
    with pytest.raises(ValueError, match="between 0 and 1"):
        S3FIFO(100, small_share=share)


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_policies_with_a_memory_need_a_capacity(name):
    """ARC and S3-FIFO refuse a capacity below one block."""
    with pytest.raises(ValueError, match="at least 1"):
        EVICTION_POLICIES[name](0)
