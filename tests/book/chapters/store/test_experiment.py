"""The experiments of the chapter on the store: laws on any trace, agreement with the papers on the released."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from missing_here import RELEASED

from mooncake_lab.book.chapters.store import claims as beside
from mooncake_lab.book.chapters.store import experiment as store
from mooncake_lab.book.chapters.store.experiment import live_set, reuse_distances
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.paper import assumption, curve, fact
from mooncake_lab.store import EVICTION_POLICIES
from mooncake_lab.store.replay import replay
from mooncake_lab.workload import Trace, load, statistics

ACCESSES = st.lists(st.integers(0, 15), max_size=80)


@given(accesses=ACCESSES)
def test_a_block_is_live_between_its_first_and_last_use(accesses):
    """After each access the live blocks are those already seen that will be seen again."""
    live, distinct = live_set(accesses)
    for step in range(len(accesses)):
        seen, coming = set(accesses[: step + 1]), set(accesses[step + 1 :])
        assert live[step] == len(seen & coming)
        assert distinct[step] == len(seen)


@given(accesses=ACCESSES)
def test_the_optimum_needs_the_live_set_and_one_block_more(accesses):
    """With room for all live blocks and a newcomer, Belady's optimum hits like an unlimited cache."""
    room = int(live_set(accesses)[0].max(initial=0)) + 1
    assert replay([accesses], "belady", room).hits == replay([accesses], "belady", None).hits


@given(accesses=ACCESSES, capacity=st.integers(1, 16))
def test_lru_hits_where_the_reuse_distance_fits(accesses, capacity):
    """LRU with n blocks hits exactly the repeated accesses whose reuse distance is at most n."""
    assert replay([accesses], "lru", capacity).hits == int((reuse_distances(accesses) <= capacity).sum())


def test_reuse_distances_of_a_short_sequence():
    """The distance counts distinct blocks since the last use, with the block itself."""
    assert reuse_distances([1, 2, 2, 3, 1, 1]).tolist() == [1, 3, 1]
    assert reuse_distances([]).dtype == np.int64


FIRST = 300


def small(name: str, arrivals: list[float], blocks: list[list[int]]) -> Trace:
    """A trace of whole blocks of four tokens."""
    lengths = np.array([len(ids) for ids in blocks])
    return Trace(
        name=name,
        origin="generated",
        block_size_tokens=4,
        arrival_s=np.array(arrivals),
        input_tokens=4 * lengths,
        output_tokens=np.ones(len(blocks), np.int64),
        block_ids=np.concatenate([np.array(ids, np.int64) for ids in blocks]),
        block_starts=np.concatenate([[0], np.cumsum(lengths)]),
        source=name,
    )


def rows(experiment) -> pd.DataFrame:
    """The table of an experiment, computed now."""
    return run(experiment, cache=False)


class TestPolicyHitRates:
    """`PolicyHitRates`."""

    @pytest.mark.parametrize("policy", EVICTION_POLICIES)
    def test_it_is_the_replay_of_the_trace(self, policy):
        """One row says what `replay` says of the same requests."""
        trace = load("conversation").head(FIRST)
        (row,) = store.PolicyHitRates(policy=policy, capacity_blocks=500, first=FIRST).rows()
        found = replay([trace.blocks_of(i) for i in range(len(trace))], policy, 500)
        assert (row["hit_rate"], row["prefix_hit_rate"]) == (found.hit_rate, found.prefix_hit_rate)
        assert row["source"] == trace.source

    def test_without_a_limit_it_is_the_ideal(self):
        """An unlimited cache has the trace's ideal block and token hit rates."""
        ideal = statistics(load("synthetic").head(FIRST))
        (row,) = store.PolicyHitRates(workload="synthetic", first=FIRST).rows()
        assert row["hit_rate"] == pytest.approx(ideal.ideal_block_hit_rate)
        assert row["token_hit_rate"] == pytest.approx(ideal.ideal_token_hit_rate)


class TestCapacityHitRates:
    """`CapacityHitRates`."""

    @pytest.mark.parametrize("workload", beside.FAST_FIG_9.values())
    def test_room_never_hurts_much_and_the_remainder_only_helps(self, workload):
        """More room gives more hits at these steps, and the remainder adds at most its tokens."""
        table = rows(
            vary(
                store.CapacityHitRates(workload=workload, first=FIRST),
                capacity_tokens=(10_000, 100_000, 1_000_000, None),
            )
        )
        assert table["hit_rate"].is_monotonic_increasing
        extra = table["hit_rate"] - table["whole_blocks_hit_rate"]
        assert (extra >= 0).all()
        names = store.MERGED if workload == "all" else (workload,)
        tokens = [load(name).head(FIRST).input_tokens for name in names]
        requests, total = sum(map(len, tokens)), sum(column.sum() for column in tokens)
        assert (extra <= requests * assumption("B11").value / total).all()

    def test_all_is_the_three_together(self):
        """Without a limit the merged hit rate is the token-weighted mean of the three."""
        table = rows(vary(store.CapacityHitRates(first=FIRST), workload=(*store.MERGED, "all")))
        tokens = [load(name).head(FIRST).input_tokens.sum() for name in store.MERGED]
        *parts, together = table["hit_rate"]
        assert together == pytest.approx(np.average(parts, weights=tokens))


class TestMerged:
    """`merged`."""

    def test_arrivals_decide_and_ids_stay_apart(self):
        """Requests come by time, ties in the order of the traces, and no block is shared between traces."""
        left = small("left", [0.0, 2.0], [[0, 1], [0, 2]])
        right = small("right", [0.0, 1.0], [[0], [0, 1]])
        both = store.merged([left, right])
        assert both.arrival_s.tolist() == [0.0, 0.0, 1.0, 2.0]
        assert [both.blocks_of(i).tolist() for i in range(4)] == [[0, 1], [3], [3, 4], [0, 2]]
        assert both.input_tokens.tolist() == [8, 4, 8, 8]
        assert both.source == "left and right"

    def test_block_sizes_must_agree(self):
        """Traces with different block sizes cannot share a cache."""
        with pytest.raises(ValueError, match="one size in common"):
            store.merged([small("left", [0.0], [[0]]), load("synthetic").head(3)])

    def test_ids_may_be_hashes_of_64_bits(self):
        """Blocks of different traces stay apart, whatever unsigned numbers name them."""
        left = small("left", [0.0, 1.0], [[2**63 - 1, -1], [2**63 - 1]])
        right = small("right", [0.5], [[2**63 - 1, 5]])
        first, other, again = (each.request.block_keys for each in store.merged([left, right]).requests())
        assert first[:1] == again
        assert len({*first, *other}) == 4


class TestLiveBlocks:
    """`LiveBlocks` and `LRUNeeds`."""

    def test_the_series_is_the_live_set(self):
        """Every row is the live set after a request, and carries the peak of the whole trace."""
        trace = load("conversation").head(100)
        table = rows(store.LiveBlocks(first=100))
        live, seen = live_set(trace.block_ids.tolist())
        assert len(table) == 100
        assert table["seen_blocks"].tolist() == seen[trace.block_starts[1:] - 1].tolist()
        assert set(table["peak_live_blocks"]) == {live.max()}
        assert table["live_blocks"].iloc[-1] == 0

    def test_lru_of_the_needed_size_reaches_the_share(self):
        """An LRU cache as large as a row says reaches its percentage of all hits, and one block less does not."""
        trace = load("synthetic").head(FIRST)
        requests = [trace.blocks_of(i) for i in range(len(trace))]
        needs = rows(store.LRUNeeds(workload="synthetic", first=FIRST)).set_index("percent")["capacity_blocks"]
        most = replay(requests, "lru", None).hits
        for percent in (50, 90, 100):
            assert replay(requests, "lru", int(needs[percent])).hits >= percent / 100 * most
            assert replay(requests, "lru", int(needs[percent]) - 1).hits < percent / 100 * most

    def test_nothing_reused_needs_nothing(self):
        """Where no block comes back there is no row."""
        assert rows(store.LRUNeeds(workload="synthetic", first=1)).empty


class TestWorkedExamples:
    """`key_table` and `step_by_step`."""

    def test_keys_are_shared_up_to_the_first_difference(self):
        """Blocks before the first difference are shared, all later ones are not, equal tokens or not."""
        prompts = {
            "a": np.array([1, 2, 3, 4, 5, 6], np.int32),
            "b": np.array([1, 2, 9, 4, 5, 6], np.int32),
        }
        table = store.key_table(prompts, 2)
        assert table["shared"].tolist() == [True, False, False] * 2
        assert table["tokens"].tolist() == ["1 2", "3 4", "5 6", "1 2", "9 4", "5 6"]

    def test_steps_say_who_left(self):
        """Each step names what was found, what left and what is held."""
        table = store.step_by_step([[1, 2], [3, 1]], "lru", 2)
        assert table["found"].tolist() == ["miss"] * 4
        assert table["evicted"].tolist() == ["", "", "1", "2"]
        assert table["held"].tolist() == ["1", "1 2", "2 3", "1 3"]
        best = store.step_by_step([[1, 2], [3, 1]], "belady", 2)
        assert best["found"].tolist() == ["miss", "miss", "miss", "hit"]


class TestBesidePapers:
    """`store_beside_papers`."""

    def test_capacities_are_those_of_the_papers(self):
        """The sweeps cover every printed capacity; the dashed line of Fig. 9 is added."""
        assert set(curve("fast_fig09_hit_rate_vs_capacity")["x"]) < set(beside.capacities_of_fig_9())
        assert beside.NODE_TOKENS in beside.capacities_of_fig_9()
        assert beside.capacities_of_table_1()[-1] is None

    def test_the_paper_beside_itself_differs_by_nothing(self):
        """Fed with the paper's own points, every difference is zero and the labels are as drawn."""
        paper = curve("fast_fig09_hit_rate_vs_capacity")
        fed = pd.DataFrame(
            {
                "workload": [beside.FAST_FIG_9[series] for series in paper["series"]],
                "capacity_tokens": paper["x"].astype(int),
                "hit_rate": paper["y"],
                "whole_blocks_hit_rate": 0.0,
                "origin": "released",
            }
        )
        points = beside.beside_fig_9(fed)
        assert len(points) == len(paper)
        assert (beside.largest_differences(points)["with_remainder"] == 0).all()
        at_node = fed[fed["capacity_tokens"] == 4_000_000].assign(capacity_tokens=beside.NODE_TOKENS)
        shares = beside.shares_of_maximum(pd.concat([fed, at_node])).set_index("workload")["as_drawn"]
        printed = curve("fast_fig09_fraction_of_max_at_3m").query("source == 'printed'")
        for row in printed.itertuples():
            assert int(shares[beside.FAST_FIG_9[row.series]]) == row.y

    def test_a_twin_gets_no_verdict(self):
        """Rows that a twin decides wait for the trace, and say so; the others are judged."""
        capacities = rows(
            vary(
                store.CapacityHitRates(first=FIRST),
                workload=tuple(beside.FAST_FIG_9.values()),
                capacity_tokens=beside.capacities_of_fig_9(),
            )
        ).assign(origin="twin")
        policies = rows(
            vary(
                store.PolicyHitRates(first=FIRST),
                workload=("toolagent", "conversation"),
                policy=tuple(beside.ARXIV_TABLE_1.values()),
                capacity_blocks=beside.capacities_of_table_1(),
            )
        ).assign(origin="twin")
        frame = beside.beside_papers(capacities, policies).frame()
        judged = frame[frame["decides"] & ~frame["verdict"].isin(["out of scope", "trace not here"])]
        assert judged["unit"].tolist() == ["tokens", "nodes"]
        assert frame["quantity"].str.contains("twin, made to match").sum() == len(frame) - 4
        released = beside.beside_papers(capacities.assign(origin="released"), policies.assign(origin="released"))
        assert (released.frame()["verdict"] == "out of scope").sum() == 2

    def test_each_cell_of_table_1_is_its_own_claim(self):
        """A claim on a cell has the number of its policy and capacity, and the paper's of the same cell."""
        rows = [
            {"workload": workload, "policy": policy, "capacity_blocks": blocks, "origin": "released",
             "prefix_hit_rate": fact("arxiv_table1_cache_policies", series=series, x=blocks or math.inf).value}
            for workload in ("toolagent", "conversation")
            for series, policy in beside.ARXIV_TABLE_1.items()
            for blocks in beside.capacities_of_table_1()
        ]  # fmt: skip
        found = list(beside._arxiv_table_1(pd.DataFrame(rows).to_dict(orient="records")))
        cells = [row for row in found if row.paper.unit == "fraction" and row.decides and row.claim != "A11"]
        assert len(cells) == 1 + 3 * 5
        assert all(row.ours == row.paper.value for row in cells)


@pytest.mark.slow
@pytest.mark.parametrize("workload", RELEASED)
def test_fig_9_comes_out_on_the_released_traces(workload):
    """On a released trace every point of FAST'25 Fig. 9 is met within 0.006; by whole blocks it is not."""
    table = rows(vary(store.CapacityHitRates(workload=workload), capacity_tokens=beside.capacities_of_fig_9()))
    (difference,) = beside.largest_differences(beside.beside_fig_9(table)).to_dict(orient="records")
    assert difference["with_remainder"] < 0.006 < difference["whole_blocks"]


@pytest.mark.slow
@pytest.mark.traces("conversation")
def test_lru_leads_on_the_released_conversations():
    """From 10,000 blocks up LRU is ahead of LFU, and LFU of LengthAware, until everything fits (arXiv Table 1)."""
    sweep = vary(
        store.PolicyHitRates(), policy=("lru", "lfu", "length_aware"), capacity_blocks=(10_000, 30_000, 100_000)
    )
    for _, table in rows(sweep).groupby("capacity_blocks"):
        lru, lfu, length_aware = table["prefix_hit_rate"]
        assert lru > lfu > length_aware


@pytest.mark.traces("conversation")
def test_the_system_prompt_is_the_shortest_prompt():
    """Assumption B11 is a number of the trace: its shortest prompts less the first block, which all share."""
    trace = load("conversation")
    assert assumption("B11").value == trace.input_tokens.min() - trace.block_size_tokens
    assert len({trace.blocks_of(i)[0] for i in range(len(trace))}) == 1


def test_lru_leads_only_if_it_does_so_everywhere():
    """One finite capacity where a rival is ahead decides, however large the lead is elsewhere."""
    rates = {
        ("lru", 1e3): 0.2,
        ("lfu", 1e3): 0.1,
        ("length_aware", 1e3): 0.25,
        ("lru", 3e4): 0.5,
        ("lfu", 3e4): 0.1,
    }
    rates |= {("length_aware", 3e4): 0.1, ("lru", None): 0.6, ("lfu", None): 0.7, ("length_aware", None): 0.6}
    found = {("conversation", *key): {"prefix_hit_rate": rate} for key, rate in rates.items()}
    assert beside._lead_of_lru(found, "conversation") == pytest.approx(-0.05)
