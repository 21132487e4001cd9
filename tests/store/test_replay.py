"""Replay: laws of hits and prefix hits, and the numbers of the released traces."""

import csv
from functools import cache
from operator import le
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.chapters.store.experiment import fine_grained_reuse
from mooncake_lab.metrics import hits as hit_rates
from mooncake_lab.store import EVICTION_POLICIES, BlockStore, Refused
from mooncake_lab.store.eviction import make_policy
from mooncake_lab.store.replay import replay, replay_tokens

REFERENCE = Path(__file__).parents[2] / "data/measured/reference_hit_rates.csv"
REQUESTS = st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=30)
ONLINE = [name for name in EVICTION_POLICIES if name != "belady"]


def chained(draws):
    """Requests whose keys name their prefix, as block keys do: the tuple of draws so far, numbered."""
    names = {}
    return [[names.setdefault(tuple(draw[: i + 1]), len(names)) for i in range(len(draw))] for draw in draws]


class TestReplay:
    """`replay`."""

    @pytest.mark.parametrize("name", EVICTION_POLICIES)
    @given(requests=REQUESTS, capacity=st.integers(0, 12))
    def test_counts_are_ordered(self, name, requests, capacity):
        """Prefix hits never exceed hits, hits never exceed accesses, request by request."""
        found = replay(requests, name, capacity)
        assert all(map(le, found.prefix_hits_by_request, found.hits_by_request))
        assert all(map(le, found.hits_by_request, found.accesses_by_request))
        assert found.accesses == sum(map(len, requests))

    @pytest.mark.parametrize("name", EVICTION_POLICIES)
    @given(draws=REQUESTS)
    def test_without_a_limit_only_first_accesses_miss(self, name, draws):
        """In an unlimited cache every policy misses each block once, and all hits are prefix hits."""
        requests = chained(draws)
        found = replay(requests, name, None)
        assert found.hits == found.accesses - len({key for request in requests for key in request})
        assert found.prefix_hits == found.hits

    @pytest.mark.parametrize("name", EVICTION_POLICIES)
    @given(requests=REQUESTS)
    def test_an_unlimited_cache_is_a_large_one(self, name, requests):
        """A cache with room for every block hits exactly where an unlimited one does."""
        large = replay(requests, name, 21)
        assert large.hits_by_request == replay(requests, name, None).hits_by_request

    @given(requests=REQUESTS, capacity=st.integers(1, 12))
    def test_lru_never_loses_by_growing(self, requests, capacity):
        """LRU has the inclusion property: a larger cache hits wherever a smaller one does."""
        small, large = replay(requests, "lru", capacity), replay(requests, "lru", capacity + 1)
        assert all(map(le, small.hits_by_request, large.hits_by_request))

    def test_fifo_can_lose_by_growing(self):
        """FIFO has no inclusion property: Belady's own sequence hits less often in four blocks than in three."""
        requests = [[1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]]
        assert replay(requests, "fifo", 3).hits == 3
        assert replay(requests, "fifo", 4).hits == 2

    @pytest.mark.parametrize("name", ONLINE)
    @given(draws=REQUESTS, capacity=st.integers(1, 12))
    def test_replay_is_a_store_fed_one_block_at_a_time(self, name, draws, capacity):
        """Replay hits exactly where a `BlockStore` with the same policy does, and matches the same prefixes."""
        requests = chained(draws)
        store = BlockStore(capacity, make_policy(name, capacity))
        hits, prefix_hits = [], []
        for keys in requests:
            prefix_hits.append(store.match_prefix(keys))
            held = 0
            for position, key in enumerate(keys):
                outcome = store.put(key, None, size_bytes=1, position=position)
                held += not isinstance(outcome, Refused) and outcome.was_held
            hits.append(held)
            store.check()
        found = replay(requests, name, capacity)
        assert found.hits_by_request == hits
        assert found.prefix_hits_by_request == prefix_hits

    def test_prefix_hits_end_at_the_first_miss(self):
        """A block behind a miss is a hit and not a prefix hit: its KVCache cannot be used."""
        found = replay([[1, 2, 3], [1, 2, 3]], "fifo", 2)
        assert found.hits_by_request == [0, 0]
        found = replay([[1, 2, 3], [9, 2, 3]], "lru", 5)
        assert found.hits_by_request == [0, 2]
        assert found.prefix_hits_by_request == [0, 0]

    def test_bad_parameters_are_named(self):
        """An unknown policy and a negative capacity are refused with what is allowed."""
        with pytest.raises(ValueError, match="unknown eviction policy 'mru'; allowed are lru, fifo"):
            replay([[1]], "mru", 1)
        with pytest.raises(ValueError, match="capacity -1; allowed are 0 and more"):
            replay([[1]], "lru", -1)


class TestReplayTokens:
    """`replay_tokens`."""

    @given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), capacity=st.integers(0, 100))
    def test_whole_blocks_cost_what_blocks_cost(self, lengths, capacity):
        """When every prompt fills its blocks, room for n tokens is room for n / size blocks."""
        requests = [list(range(length)) for length in lengths]
        tokens = np.array([4 * length for length in lengths])
        by_tokens = replay_tokens(requests, tokens, "lru", 4 * capacity, block_size_tokens=4)
        assert by_tokens.hits_by_request == replay(requests, "lru", capacity).hits_by_request

    def test_a_partial_block_costs_what_it_holds(self):
        """Two prompts of 5 tokens fit into 10 tokens, where blocks of 4 would need 16."""
        requests = [[1, 2], [3, 4], [1, 2]]
        found = replay_tokens(requests, np.array([5, 5, 5]), "lru", 10, block_size_tokens=4)
        assert found.hits_by_request == [0, 0, 2]

    def test_a_block_larger_than_the_cache_is_never_held(self):
        """A block that cannot fit is a miss each time, and evicts nothing."""
        found = replay_tokens([[1], [2], [1], [2]], np.array([2, 9, 2, 9]), "lru", 4, block_size_tokens=16)
        assert found.hits_by_request == [0, 0, 1, 0]

    @pytest.mark.parametrize("policy", EVICTION_POLICIES)
    def test_every_policy_lives_in_a_cache_below_one_block(self, policy):
        """Full blocks never fit, partial ones do, and no policy hears of what cannot be held."""
        requests, tokens = [[1, 2], [1, 2], [3, 4]], np.array([6, 6, 5])
        found = replay_tokens(requests, tokens, policy, 3, block_size_tokens=4)
        assert found.hits_by_request == [0, 1, 0]
        assert found.prefix_hits == 0

    def test_lengths_must_fit_blocks(self):
        """A prompt whose length does not fit its number of blocks is refused by its number."""
        with pytest.raises(ValueError, match="2 requests and 1 input lengths"):
            replay_tokens([[1], [2]], np.array([4]), "lru", 8, block_size_tokens=4)
        with pytest.raises(ValueError, match="request 1 has 2 blocks for 3 tokens"):
            replay_tokens([[1], [1, 2]], np.array([4, 3]), "lru", 8, block_size_tokens=4)


class TestFineGrainedReuse:
    """`fine_grained_reuse`."""

    def test_a_remainder_follows_a_match_only(self):
        """No match reuses nothing; k blocks reuse k blocks and the remainder; one token is always computed."""
        reused = fine_grained_reuse(
            np.array([0, 1, 2, 2]),
            np.array([100, 100, 100, 22]),
            remainder_tokens=3,
            after_first_tokens=5,
            block_size_tokens=10,
        )
        assert reused.tolist() == [0, 15, 23, 21]

    def test_the_first_remainder_may_differ_by_request(self):
        """A merged trace can assume another system prompt for each request."""
        lengths = np.array([100, 100])
        reused = fine_grained_reuse(
            np.array([1, 1]),
            lengths,
            remainder_tokens=3,
            after_first_tokens=np.array([5, 7]),
            block_size_tokens=10,
        )
        assert reused.tolist() == [15, 17]


def references():
    """The rows of the reference file, one dict each."""
    lines = [line for line in REFERENCE.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


@pytest.mark.parametrize("every", [14, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "length_aware"])
def test_the_released_traces_have_the_reference_hit_rates(released, policy, every):
    """The hit rates that an older, independent program found on the released traces come out again."""
    rows = [row for row in references() if (row["trace"], row["policy"]) == (released.name, policy)]
    assert len(rows) == (6 if policy == "length_aware" else 42)
    rows = rows[::every]
    requests = [released.blocks_of(i).tolist() for i in range(len(released))]

    unique = len(np.unique(released.block_ids))
    by_blocks = cache(lambda blocks: replay(requests, policy, blocks))
    for row in rows:
        capacity = unique if row["capacity"] == "inf" else int(row["capacity"])
        if row["definition"] == "fine_grained":
            found = replay_tokens(requests, released.input_tokens, policy, capacity)
        else:
            blocks = capacity // released.block_size_tokens if row["capacity_unit"] == "tokens" else capacity
            found = by_blocks(min(blocks, unique))
        ours = rate_of(found, released, row["definition"])
        assert ours == pytest.approx(float(row["hit_rate"]), abs=0.5001e-4), row


def rate_of(found, trace, definition):
    """Our hit rate by a definition of the reference file."""
    if definition == "blocks":
        return found.prefix_hit_rate
    if definition == "tokens":
        reused = hit_rates.covered_tokens(np.array(found.prefix_hits_by_request), trace.input_tokens, 512)
    else:
        reused = fine_grained_reuse(
            np.array(found.prefix_hits_by_request),
            trace.input_tokens,
            remainder_tokens=256,
            after_first_tokens=368 if trace.name == "conversation" else 256,  # the reference file's own definition
        )
    return hit_rates.token_hit_rate(reused, trace.input_tokens)
