"""The cache of whole prefixes: laws, the optimum by brute force, and the numbers of Mooncake's own simulator."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.chapters.store.gap import (
    ON_PREFIXES,
    EvictionGap,
    gap_rows,
    hit_rates,
    recorded_rate,
    second_half_tokens,
)
from mooncake_lab.book.chapters.store.leaves import replay_leaves
from mooncake_lab.store import EVICTION_POLICIES
from mooncake_lab.store.replay import replay
from mooncake_lab.workload import Trace, load

RECORD = json.loads((Path(__file__).parents[4] / "data/measured/kvcache_simulator.json").read_text())["traces"]
ORDERS = [*ON_PREFIXES.values()]
DRAWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=9)


def make_trace(*blocks):
    """A trace of whole blocks of four tokens."""
    counts = [len(ids) for ids in blocks]
    return Trace(
        name="made", origin="file", block_size_tokens=4, arrival_s=np.arange(len(blocks)) * 1.0,
        input_tokens=np.array(counts) * 4, output_tokens=np.ones(len(blocks), np.int64),
        block_ids=np.array([one for ids in blocks for one in ids]),
        block_starts=np.cumsum([0, *counts]), source="made",
    )  # fmt: skip


def chained(draws):
    """Requests whose keys name their prefix: the tuple of draws so far, numbered."""
    names = {}
    return [[names.setdefault(tuple(draw[: i + 1]), len(names)) for i in range(len(draw))] for draw in draws]


@given(DRAWS, st.integers(0, 8))
def test_no_more_than_ever_seen_and_no_less_than_the_last_request(draws, capacity):
    """Found blocks are a prefix that an earlier request had; a repeated request that fits is found whole."""
    requests = chained(draws)
    for order in ORDERS:
        found = replay_leaves(requests, capacity, order)
        seen = set()
        for keys, blocks in zip(requests, found.tolist(), strict=True):
            assert {*keys[:blocks]} <= seen
            seen |= {*keys}
    again = [keys for keys in requests for _ in range(2) if len(keys) <= capacity]
    assert replay_leaves(again, capacity)[1::2].tolist() == [len(keys) for keys in again[1::2]]


@given(DRAWS)
def test_a_cache_without_limit_has_one_rule(draws):
    """Where nothing leaves, all orders find what plain replay finds."""
    requests = chained(draws)
    plain = replay(requests, "lru", None).prefix_hits_by_request
    for order in ORDERS:
        assert replay_leaves(requests, 1000, order).tolist() == plain


@given(DRAWS, st.integers(0, 8))
def test_no_eviction_policy_finds_more_than_the_optimum_of_prefixes(draws, capacity):
    """What is of use in any cache is whole prefixes, so none finds longer ones; Belady's blocks do not either."""
    requests = chained(draws)
    most = replay_leaves(requests, capacity, "optimum").sum()
    for name in EVICTION_POLICIES:
        assert replay(requests, name, capacity).prefix_hits <= most, name


def test_hit_rates_are_of_the_second_half():
    """The first half fills the cache and counts nothing."""
    trace = make_trace([0, 1], [0, 1], [0, 1], [0, 2])
    rates = hit_rates(trace, 10)
    assert {*rates.values()} == {0.75}
    assert rates.keys() == {*EVICTION_POLICIES, *ON_PREFIXES}


def best(requests, capacity):
    """The most blocks that any sequence of prefix-closed contents can find, by trying all."""
    parents = {key: before for keys in requests for before, key in zip([None, *keys[:-1]], keys, strict=True)}

    def closed(contents):
        return all(parents[key] is None or parents[key] in contents for key in contents)

    def subsets(keys):
        chosen = [frozenset()]
        for key in keys:
            chosen += [one | {key} for one in chosen]
        return [one for one in chosen if len(one) <= capacity and closed(one)]

    @cache
    def most(number, contents):
        if number == len(requests):
            return 0
        keys = requests[number]
        found = next((i for i, key in enumerate(keys) if key not in contents), len(keys))
        return found + max(most(number + 1, kept) for kept in subsets(sorted(contents | {*keys})))

    return most(0, frozenset())


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=5), st.integers(0, 4))
def test_the_optimum_is_one(draws, capacity):
    """No way to keep whole prefixes finds more blocks, and LRU finds no more."""
    requests = chained(draws)
    found = int(replay_leaves(requests, capacity, "optimum").sum())
    assert found == best(requests, capacity)
    assert int(replay_leaves(requests, capacity).sum()) <= found


def counted(name, sizes):
    """Our hit tokens under the rules of kvcache-simulator, by policy and capacity."""
    trace = load(name)
    requests = [trace.blocks_of(i).tolist() for i in range(len(trace))]
    told = RECORD[name]
    assert told["measured_from"] == len(trace) // 2
    assert told["measured_tokens"] == trace.input_tokens[told["measured_from"] :].sum()
    ways = {
        "fifo": lambda size: replay(requests, "fifo", size).prefix_hits_by_request,
        "lru": lambda size: replay_leaves(requests, size),
        "optimal": lambda size: replay_leaves(requests, size, "optimum"),
    }
    return {
        policy: {size: second_half_tokens(trace, way(int(size))) for size in sizes} for policy, way in ways.items()
    }


def check(name, sizes):
    assert counted(name, sizes) == {
        policy: {size: hits[size] for size in sizes} for policy, hits in RECORD[name]["hits"].items()
    }


@pytest.mark.traces("conversation", "synthetic")
@pytest.mark.parametrize("name", RECORD)
def test_three_capacities_equal_those_of_mooncakes_simulator(name):
    """Under its rules FIFO, LRU and the optimum hit as many tokens, to the last one."""
    sizes = list(RECORD[name]["hits"]["lru"])
    check(name, [sizes[0], sizes[7], "6553"])


@pytest.mark.traces("synthetic")
def test_the_table_of_the_gap_has_these_numbers():
    """Its rates at a capacity are the recorded hit tokens over all prompt tokens of the second half."""
    told = RECORD["synthetic"]
    (row,) = gap_rows(["synthetic"], [6553])
    for name, policy in (("lru on prefixes", "lru"), ("optimum on prefixes", "optimal"), ("fifo", "fifo")):
        assert row[name] == told["hits"][policy]["6553"] / told["measured_tokens"]


def test_a_leaf_that_was_found_again_stays_longer():
    """With room for two, segmented LRU keeps the block that was found again, which LRU evicts."""
    requests = [[1], [1], [2], [3], [1]]
    assert replay_leaves(requests, 2, "lru").tolist() == [0, 1, 0, 0, 0]
    assert replay_leaves(requests, 2, "slru").tolist() == [0, 1, 0, 0, 1]


@pytest.mark.traces("conversation")
def test_the_gap_at_a_nodes_memory_is_that_of_mooncakes_simulator():
    """LRU and the optimum have its rates, LRU closes nothing of the gap, the optimum all, and no policy more."""
    rows = {row["policy"]: row for row in EvictionGap().rows()}
    assert rows["lru on prefixes"]["hit_rate"] == recorded_rate("conversation", "lru", 6553)
    assert rows["optimum on prefixes"]["hit_rate"] == recorded_rate("conversation", "optimal", 6553)
    assert (rows["lru on prefixes"]["gap_closed"], rows["optimum on prefixes"]["gap_closed"]) == (0, 1)
    assert all(row["gap_closed"] <= 1 for row in rows.values())


@pytest.mark.slow
@pytest.mark.traces("conversation", "synthetic")
@pytest.mark.parametrize("name", RECORD)
def test_all_capacities_equal_those_of_mooncakes_simulator(name):
    """So they do at each of 15 capacities."""
    sizes = list(RECORD[name]["hits"]["lru"])
    assert len(sizes) == 15
    check(name, sizes)
