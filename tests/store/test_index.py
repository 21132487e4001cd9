"""The global index: it says what instances told it, of the current incarnation of each, and nothing else."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mooncake_lab.store import PrefixIndex

POOL = "pool"
"""What it holds, every other instance can read."""
NAMES = st.sampled_from(["a", "b", "c", POOL])
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
                self.index.join(name, shared=name == POOL)
            return self.now[name][0]
        member = self.index.join(name, shared=name == POOL)
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
        held = [self.readable(name) for name in self.index.instances]
        expected = [next((i for i, key in enumerate(keys) if key not in own), len(keys)) for own in held]
        assert self.index.matches(keys) == expected

    def readable(self, name):
        """What an instance holds, and what the pool holds."""
        return self.now[name][1] | self.now.get(POOL, (None, set()))[1]

    @invariant()
    def says_what_it_was_told(self):
        """The members are the current ones, and each holds what it reported."""
        assert sorted(self.index.instances) == sorted(self.now)
        for key in range(10):
            assert self.index.matches([key]) == [key in self.readable(name) for name in self.index.instances]
        held = {name: own for name, (_, own) in self.now.items()}
        assert {name: self.index.held_by(name) for name in self.now} == held
        assert self.index.replicas() == Counter(key for own in held.values() for key in own)
        assert len(self.index) == len(set().union(*held.values()))


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
