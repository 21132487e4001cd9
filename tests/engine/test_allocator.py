"""The allocator's books."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_lab.engine import BlockAllocator

BLOCKS = 12


class Books(RuleBasedStateMachine):
    """Requests come with prompts, find prefixes, grow and go; every key is a prefix of letters."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS)
        self.tables = {}
        self.written = {}
        self.next_id = 0

    @rule(letters=st.text("ab", min_size=1, max_size=5))
    def enter(self, letters):
        keys = [letters[: i + 1] for i in range(len(letters))]
        found = self.allocator.match(keys)
        assert [self.written[block] for block in found] == keys[: len(found)]
        needed = len(keys) - len(found)
        kept = sum(not self.allocator.holders(block) for block in found)
        if needed > self.allocator.available - kept:
            return
        self.allocator.acquire(found)
        table = found + self.allocator.allocate(needed)
        for block, key in list(zip(table, keys, strict=True))[len(found) :]:
            assert all(block not in other for other in self.tables.values())
            self.written[block] = key
            self.allocator.publish(block, key)
        self.tables[self.next_id] = table
        self.next_id += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data):
        self.allocator.release(self.tables.pop(data.draw(st.sampled_from(sorted(self.tables)))))

    @rule()
    def forget(self):
        self.allocator.forget()
        assert self.allocator.kept == 0

    @rule(count=st.integers(0, 3))
    def refuse(self, count):
        before = self.allocator.available
        with pytest.raises(MemoryError, match=r"blocks asked for"):
            self.allocator.allocate(before + 1 + count)
        assert self.allocator.available == before

    @invariant()
    def books_agree(self):
        self.allocator.check(self.tables.values())
        held = {block for table in self.tables.values() for block in table}
        assert self.allocator.available == BLOCKS - len(held)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


class TestReuse:
    def test_least_recently_used_goes_first(self):
        """Of two kept prefixes, the one released earlier is evicted, and its last block before its first."""
        allocator = BlockAllocator(4)
        old, new = allocator.allocate(2), allocator.allocate(2)
        for prefix, table in (("old", old), ("new", new)):
            for index, block in enumerate(table):
                allocator.publish(block, prefix[: index + 1].encode())
        allocator.release(old)
        allocator.release(new)
        assert allocator.allocate(1) == [old[1]]
        assert allocator.match([b"o", b"ol"]) == [old[0]]
        assert allocator.match([b"n", b"ne"]) == new


class TestCheck:
    def test_it_sees_a_lost_block(self):
        """A block that no table holds but that is counted as held is reported."""
        allocator = BlockAllocator(2)
        allocator.allocate(1)
        with pytest.raises(AssertionError, match="held 0 times"):
            allocator.check([])
