"""check_policy tells good policies from bad ones, and says what is wrong with the bad."""

import random

import pytest

from mooncake_lab.course.eviction import check_policy, shared_prefix_requests
from mooncake_lab.store import EVICTION_POLICIES, NothingToEvictError
from mooncake_lab.store.replay import replay


class Student:
    """A plain list of keys; the bad policies below spoil one promise each."""

    def __init__(self):
        self.keys = []

    def touch(self, key):
        """Do nothing."""

    def insert(self, key, _position=0):
        """Append."""
        self.keys.append(key)

    def victim(self, _incoming=None, spared=frozenset()):
        """Choose the youngest key."""
        for key in reversed(self.keys):
            if key not in spared:
                self.keys.remove(key)
                return key
        raise NothingToEvictError(len(self.keys))

    def remove(self, key):
        """Forget."""
        self.keys.remove(key)

    def __contains__(self, key):
        return key in self.keys

    def __len__(self):
        return len(self.keys)


class KeepsVictims(Student):
    """Forgets to forget."""

    def victim(self, _incoming=None, spared=frozenset()):
        """Choose, and keep."""
        if not set(self.keys) - spared:
            raise NothingToEvictError(len(self.keys))
        return next(key for key in self.keys if key not in spared)


class IgnoresPins(Student):
    """Does not look at what is spared."""

    def victim(self, _incoming=None, _spared=frozenset()):
        """Choose anything."""
        if not self.keys:
            raise NothingToEvictError(0)
        return self.keys.pop(0)


class Dices(Student):
    """Draws its victims."""

    def victim(self, _incoming=None, spared=frozenset()):
        """Choose at random."""
        allowed = [key for key in self.keys if key not in spared]
        if not allowed:
            raise NothingToEvictError(len(self.keys))
        victim = random.choice(allowed)
        self.keys.remove(victim)
        return victim


class Invents(Student):
    """Names a victim it never held."""

    def victim(self, _incoming=None, spared=frozenset()):
        """Choose, and return another."""
        super().victim(None, spared)
        return -1


class ShrugsWhenStuck(Student):
    """Says `None` where it has to say that nothing may go."""

    def victim(self, _incoming=None, spared=frozenset()):
        """Choose, or shrug."""
        return super().victim(None, spared) if set(self.keys) - spared else None


class LosesCount(Student):
    """Remembers no more than fifty keys."""

    def insert(self, key, _position=0):
        """Append, and lose the oldest of more than fifty."""
        self.keys = [*self.keys, key][-50:]


class Crashes(Student):
    """Cannot be replayed at all."""

    def insert(self, key, _position=0):
        """Fail."""
        raise RuntimeError(f"no room for {key}")


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_our_policies_pass(name):
    """Every policy of the package passes, and its hit rate is the replay's."""
    report = check_policy(EVICTION_POLICIES[name])
    assert report.passed, str(report)
    assert report.hit_rate == replay(shared_prefix_requests(), name, 300).hit_rate


def test_a_plain_list_passes():
    """A student's policy needs no class of ours, only the methods."""
    report = check_policy(lambda _blocks: Student())
    assert report.passed, str(report)
    assert report.hit_rate < report.lru_hit_rate < report.belady_hit_rate


@pytest.mark.parametrize(
    ("policy", "law"),
    [
        (KeepsVictims, "holds exactly the inserted keys"),
        (IgnoresPins, "never evicts a pinned block"),
        (IgnoresPins, "works behind a store"),
        (Dices, "is deterministic"),
        (Invents, "works behind a store"),
        (ShrugsWhenStuck, "never evicts a pinned block"),
        (ShrugsWhenStuck, "starts empty"),
        (Crashes, "agrees with its store over a workload"),
        (LosesCount, "agrees with its store over a workload"),
    ],
)
def test_a_broken_promise_is_named(policy, law):
    """Each spoiled policy breaks the law it was spoiled for, and the report says so in words."""
    report = check_policy(lambda _blocks: policy())
    assert law in report.broken
    assert f"FAILED  {law}: {report.broken[law]}" in str(report)
    assert not report.passed


def test_a_policy_that_cannot_run_has_no_hit_rate():
    """The report of a crashing policy is complete all the same."""
    report = check_policy(lambda _blocks: Crashes())
    assert report.hit_rate is None
    assert "RuntimeError: no room for" in str(report)
    assert "block hit rate none; LRU has" in str(report)


def test_the_workload_is_seeded_and_shares_prefixes():
    """The same seed gives the same requests, and policies differ on them."""
    assert shared_prefix_requests(1) == shared_prefix_requests(1) != shared_prefix_requests(2)
    rates = {replay(shared_prefix_requests(), name, 300).hits for name in EVICTION_POLICIES}
    assert len(rates) == len(EVICTION_POLICIES)
