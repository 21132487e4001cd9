"""The live set and reuse distances, against their definitions and against replays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.chapters.store.experiment import live_set, reuse_distances
from mooncake_lab.chapters.store.replay import replay

ACCESSES = st.lists(st.integers(0, 15), max_size=80)


@given(accesses=ACCESSES)
def test_a_block_is_live_between_its_first_and_last_use(accesses):
    """After each access the live blocks are those already seen that will be seen again."""
    found = live_set(accesses)
    for step in range(len(accesses)):
        seen, coming = set(accesses[: step + 1]), set(accesses[step + 1 :])
        assert found.live_blocks[step] == len(seen & coming)
        assert found.seen_blocks[step] == len(seen)


@given(accesses=ACCESSES)
def test_the_optimum_needs_the_live_set_and_one_block_more(accesses):
    """With room for all live blocks and a newcomer, Belady's optimum hits like an unlimited cache."""
    room = int(live_set(accesses).live_blocks.max(initial=0)) + 1
    assert replay([accesses], "belady", room).hits == replay([accesses], "belady", None).hits


@given(accesses=ACCESSES, capacity=st.integers(1, 16))
def test_lru_hits_where_the_reuse_distance_fits(accesses, capacity):
    """LRU with n blocks hits exactly the repeated accesses whose reuse distance is at most n."""
    assert replay([accesses], "lru", capacity).hits == int((reuse_distances(accesses) <= capacity).sum())


def test_reuse_distances_of_a_short_sequence():
    """The distance counts distinct blocks since the last use, with the block itself."""
    assert reuse_distances([1, 2, 2, 3, 1, 1]).tolist() == [1, 3, 1]
    assert reuse_distances([]).dtype == np.int64
