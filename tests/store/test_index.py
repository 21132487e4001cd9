"""The global index: it says what instances told it, of the current incarnation of each, and nothing else."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mooncake_lab.store import PrefixIndex

NAMES = st.sampled_from(["a", "b", "c", "d"])
KEYS = st.lists(st.integers(0, 9), max_size=6)


class Interleavings(RuleBasedStateMachine):
    """Instances join, update, fail and come back, and updates of former incarnations arrive late."""

    members = Bundle("members")

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.now = {}  # name: (membership, what it holds)

    @rule(target=members, name=NAMES)
    def join(self, name):
        """A member cannot join twice; one that was dropped comes back with nothing."""
        if name in self.now:
            with pytest.raises(ValueError, match="already"):
                self.index.join(name)
            return self.now[name][0]
        member = self.index.join(name)
        self.now[name] = (member, set())
        return member

    @rule(member=members, added=KEYS, removed=KEYS)
    def update(self, member, added, removed):
        """Blocks are added, then removed, for this instance only; a former incarnation changes nothing."""
        current, held = self.now.get(member.instance, (None, None))
        assert self.index.update(member, added, removed) == (current is member)
        if current is member:
            held.update(added)
            held.difference_update(removed)

    @rule(name=NAMES)
    def drop(self, name):
        """A dropped instance is forgotten at once; one that is no member cannot be dropped."""
        if name in self.now:
            self.index.drop(name)
            del self.now[name]
        else:
            with pytest.raises(KeyError, match="not in the index"):
                self.index.drop(name)

    @rule(member=consumes(members))
    def lose(self, member):
        """Some memberships are never used again."""

    @rule(keys=KEYS)
    def match(self, keys):
        """Every instance's match is what a walk through its own blocks finds."""
        held = [self.now[name][1] for name in self.index.instances]
        expected = [next((i for i, key in enumerate(keys) if key not in own), len(keys)) for own in held]
        assert self.index.matches(keys) == expected

    @invariant()
    def says_what_it_was_told(self):
        """The members are the current ones, and each holds what it reported."""
        assert sorted(self.index.instances) == sorted(self.now)
        for key in range(10):
            assert self.index.matches([key]) == [key in self.now[name][1] for name in self.index.instances]


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_readers_never_see_the_dead_after_a_drop():
    """While threads add, remove, fail and join, every match is a possible one and no reader stumbles."""
    index, stop, wrong = PrefixIndex(), threading.Event(), []
    keys = list(range(40))
    steady = index.join("steady")
    index.update(steady, keys[:20])

    def live(name):
        while not stop.is_set():
            member = index.join(name)
            index.update(member, keys)
            index.update(member, (), keys[30:])
            index.drop(name)

    def read():
        for _ in range(2000):
            found = index.matches(keys)
            if found[0] != 20 or max(found) > 40:
                wrong.append(found)
        stop.set()

    threads = [threading.Thread(target=live, args=(f"x{i}",)) for i in range(3)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert index.instances == ("steady",)
    assert index.matches(keys) == [20]
