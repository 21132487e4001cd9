"""Extents: a slab's free runs, against a plain list of pages."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_lab.store.backends.allocation import ExtentAllocator

PAGES = 24


class ExtentMachine(RuleBasedStateMachine):
    """Whatever is taken and given back, no page has two owners and none is lost."""

    def __init__(self):
        super().__init__()
        self.extents = ExtentAllocator(PAGES * 10 + 3, 10)
        self.owner = [0] * PAGES
        self.runs = {}
        self.last = 0

    def own(self, start, size):
        """Note a run in the plain list."""
        self.last += 1
        pages = range(start // 10, (start + size + 9) // 10)
        assert [self.owner[page] for page in pages] == [0] * len(pages)
        for page in pages:
            self.owner[page] = self.last
        self.runs[self.last] = (start, size)

    @rule(size=st.integers(1, 80))
    def take(self, size):
        """A run is found exactly when there is one, and it is the first."""
        pages = -(-size // 10)
        fits = [i for i in range(PAGES - pages + 1) if not any(self.owner[i : i + pages])]
        start = self.extents.take(size)
        assert start == (fits[0] * 10 if fits else None)
        if start is not None:
            self.own(start, size)

    @rule(page=st.integers(-2, PAGES), size=st.integers(1, 50))
    def take_at(self, page, size):
        """A given run is had exactly when all of it is free."""
        pages = range(page, page + -(-size // 10))
        free = page >= 0 and pages[-1] < PAGES and not any(self.owner[i] for i in pages)
        assert self.extents.take_at(page * 10, size) == free
        if free:
            self.own(page * 10, size)

    @rule(data=st.data())
    def give(self, data):
        """A used run can be given back once."""
        if not self.runs:
            return
        run = data.draw(st.sampled_from(sorted(self.runs)))
        start, size = self.runs.pop(run)
        self.owner = [0 if owner == run else owner for owner in self.owner]
        self.extents.give(start, size)
        with pytest.raises(ValueError, match="only used runs"):
            self.extents.give(start, size)

    @invariant()
    def adds_up(self):
        """Used bytes are the pages with an owner."""
        assert self.extents.used_bytes == 10 * sum(owner > 0 for owner in self.owner)
        assert self.extents.capacity_bytes == 10 * PAGES


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_slab_without_room_is_refused():
    """A capacity below the alignment is an error."""
    with pytest.raises(ValueError, match="at least one aligned run"):
        ExtentAllocator(9, 10)
