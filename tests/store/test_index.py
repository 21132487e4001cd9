"""The global index: it says what instances told it, of those that live, and nothing else."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mooncake_lab.store import PrefixIndex

NAMES = st.sampled_from(["a", "b", "c", "d"])
KEYS = st.lists(st.integers(0, 9), max_size=6)


class Interleavings(RuleBasedStateMachine):
    """Instances join, tell, die and come back, and messages of former lives arrive late."""

    lives = Bundle("lives")

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.now = {}  # the living: name -> (membership, what it holds)

    def holds(self, life):
        """What the model believes of a life; None where it is over."""
        current, held = self.now.get(life.instance, (None, None))
        return held if current is life else None

    @rule(target=lives, name=NAMES)
    def join(self, name):
        """A living instance cannot join twice; a dead one comes back with nothing."""
        if name in self.now:
            with pytest.raises(ValueError, match="already"):
                self.index.join(name)
            return self.now[name][0]
        life = self.index.join(name)
        self.now[name] = (life, set())
        return life

    @rule(life=lives, keys=KEYS)
    def announce(self, life, keys):
        """The living are believed."""
        held = self.holds(life)
        assert self.index.announce(life, keys) == (held is not None)
        if held is not None:
            held.update(keys)

    @rule(life=lives, keys=KEYS)
    def retract(self, life, keys):
        """What is retracted is gone, for this instance only."""
        held = self.holds(life)
        assert self.index.retract(life, keys) == (held is not None)
        if held is not None:
            held.difference_update(keys)

    @rule(life=lives, keys=KEYS)
    def replace(self, life, keys):
        """A snapshot is the whole truth."""
        held = self.holds(life)
        assert self.index.replace(life, keys) == (held is not None)
        if held is not None:
            held.clear()
            held.update(keys)

    @rule(name=NAMES)
    def drop(self, name):
        """The dead are forgotten at once; who is not in cannot die."""
        if name in self.now:
            self.index.drop(name)
            del self.now[name]
        else:
            with pytest.raises(KeyError, match="not in the index"):
                self.index.drop(name)

    @rule(life=consumes(lives))
    def lose(self, life):
        """Some memberships are never used again."""

    @rule(keys=KEYS)
    def match(self, keys):
        """Every instance's match is what a walk through its own blocks finds; the longest is the longest."""
        expected = {}
        for name in self.index.instances:
            held = self.now[name][1]
            expected[name] = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        assert self.index.matches(keys) == list(expected.values())
        best = self.index.longest(keys)
        if best is None:
            assert not any(expected.values())
        else:
            assert best == min(((n, d) for n, d in expected.items()), key=lambda found: (-found[1], found[0]))

    @invariant()
    def says_what_it_was_told(self):
        """Holders, replicas and holdings are those of the living."""
        assert sorted(self.index.instances) == sorted(self.now)
        by_key = {}
        for name, (_, held) in self.now.items():
            assert self.index.held_by(name) == held
            for key in held:
                by_key.setdefault(key, set()).add(name)
        assert self.index.replicas() == {key: len(names) for key, names in by_key.items()}
        assert len(self.index) == len(by_key)
        for key in range(10):
            assert set(self.index.holders(key)) == by_key.get(key, set())


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_former_life_is_not_believed():
    """What a dead instance's last messages say does not stick to the one that took its place."""
    index = PrefixIndex()
    old = index.join("a")
    index.announce(old, [1, 2])
    index.drop("a")
    new = index.join("b")  # takes the same bit
    assert new.bit == old.bit
    assert not index.announce(old, [1, 2, 3])
    assert index.matches([1, 2, 3]) == [0]
    assert index.replicas() == {}


def test_of_equals_the_first_by_name_is_the_longest():
    """Ties break on names, not on who joined first."""
    index = PrefixIndex()
    for name in ("b", "a"):
        index.announce(index.join(name), [1, 2])
    assert index.longest([1, 2, 3]) == ("a", 2)
    assert index.longest([9]) is None


def test_readers_never_see_the_dead_after_a_drop():
    """While threads announce, retract, die and join, every match is a possible one and no reader stumbles."""
    index, stop, wrong = PrefixIndex(), threading.Event(), []
    keys = list(range(40))
    steady = index.join("steady")
    index.announce(steady, keys[:20])

    def live(name):
        while not stop.is_set():
            life = index.join(name)
            index.announce(life, keys)
            index.retract(life, keys[30:])
            index.drop(name)

    def read():
        for _ in range(2000):
            best = index.longest(keys)
            if index.matches(keys[:20])[0] != 20 or best is None or best[1] < 20:
                wrong.append(best)
        stop.set()

    threads = [threading.Thread(target=live, args=(f"x{i}",)) for i in range(3)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert index.instances == ("steady",)
    assert index.replicas() == dict.fromkeys(keys[:20], 1)
