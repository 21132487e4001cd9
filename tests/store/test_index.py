"""The global index: it says what its members told it, and nothing else."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_lab.store import PrefixIndex

POOL = "pool"
"""What it holds, every other instance can read."""
NAMES = st.sampled_from(["a", "b", "c", POOL])
KEYS = st.lists(st.integers(0, 9), max_size=6)


class Interleavings(RuleBasedStateMachine):
    """Instances join, update, fail and come back."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.now = {}  # name: what it holds

    @rule(name=NAMES)
    def join(self, name):
        """A member cannot join twice; one that was dropped comes back with nothing."""
        if name in self.now:
            with pytest.raises(ValueError, match="already"):
                self.index.join(name, shared=name == POOL)
        else:
            self.index.join(name, shared=name == POOL)
            self.now[name] = set()

    @rule(name=NAMES, added=KEYS, removed=KEYS)
    def update(self, name, added, removed):
        """Blocks are added, then removed, for this instance only; one that is no member is refused."""
        if name in self.now:
            self.index.update(name, added, removed)
            self.now[name].update(added)
            self.now[name].difference_update(removed)
        else:
            with pytest.raises(KeyError, match="not in the index"):
                self.index.update(name, added, removed)

    @rule(name=NAMES)
    def drop(self, name):
        """A dropped instance is forgotten at once; one that is no member cannot be dropped."""
        if name in self.now:
            self.index.drop(name)
            del self.now[name]
        else:
            with pytest.raises(KeyError, match="not in the index"):
                self.index.drop(name)

    @rule(keys=KEYS)
    def match(self, keys):
        """Every instance's match is what a walk through its own blocks finds."""
        held = [self.readable(name) for name in self.index.instances]
        expected = [next((i for i, key in enumerate(keys) if key not in own), len(keys)) for own in held]
        assert self.index.matches(keys) == expected

    def readable(self, name):
        """What an instance holds, and what the pool holds."""
        return self.now[name] | self.now.get(POOL, set())

    @invariant()
    def says_what_it_was_told(self):
        """The members are the current ones, and each holds what it reported."""
        assert list(self.index.instances) == list(self.now)
        assert {name for name in (*"abcd", POOL) if name in self.index} == set(self.now)
        for key in range(10):
            assert self.index.matches([key]) == [key in self.readable(name) for name in self.index.instances]
        assert {name: self.index.held_by(name) for name in self.now} == self.now
        assert len(self.index) == len(set().union(*self.now.values()))


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
