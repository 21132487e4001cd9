"""Placement experiments: laws at a small scale, agreement with the papers on the released traces."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.chapters.placement import experiment as topic
from mooncake_lab.book.chapters.placement.claims import (
    FAST_FIG_5,
    WORKLOADS,
    _fig_11,
    beside_papers,
    local_and_global,
    means_of_twins,
)
from mooncake_lab.book.chapters.placement.experiment import ClusterCapacity
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.experiments.cache import digest_of
from mooncake_lab.book.paper import Verdict, claims
from mooncake_lab.workload import TraceError, tick_s

BASE = ClusterCapacity(ssd_bytes_per_s=6e9, dram_tokens=150_000, prefill_nodes=2, decode_nodes=2, first=300)


def test_an_ssd_hits_what_as_much_dram_would():
    """Hits grow with either tier; those that the SSD adds are its own."""
    little, with_ssd, much = run(
        [BASE, *vary(BASE, ssd_tokens=[450_000]), *vary(BASE, dram_tokens=[600_000])], cache=False
    ).to_dict(orient="records")
    assert little["token_hit_rate"] < with_ssd["token_hit_rate"]
    assert little["token_hit_rate"] < much["token_hit_rate"]
    assert (little["ssd_hit_rate"], much["ssd_hit_rate"]) == (0, 0)
    assert with_ssd["token_hit_rate"] == pytest.approx(with_ssd["dram_hit_rate"] + with_ssd["ssd_hit_rate"])
    assert with_ssd["prefill_gpu_s"] < little["prefill_gpu_s"]


def test_a_slow_ssd_does_little_harm():
    """A node computes again what its SSD would read more slowly, so such an SSD neither helps nor harms much."""
    fast, slow = run(vary(BASE, ssd_tokens=[450_000], ssd_bytes_per_s=[6e9, 2e8]), cache=False)["ttft_mean_s"]
    none = run(BASE, cache=False)["ttft_mean_s"].iloc[0]
    assert fast < none
    assert slow == pytest.approx(none, rel=0.01)


SMALL = topic.PlacementReplay(first=250, prefill_nodes=3, decode_nodes=3)
FOUR = tuple(FAST_FIG_5)


def replayed(*replays):
    return run(replays, cache=False)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_a_box_holds_half_and_its_whiskers_are_data(values):
    """Quartiles are in order, whiskers are values that occur, and reach at most 1.5 boxes."""
    data = np.array(values)
    found = topic.box(data)
    assert found["whisker_low"] <= found["median"] <= found["whisker_high"]
    assert found["q1"] <= found["median"] <= found["q3"]
    assert {found["whisker_low"], found["whisker_high"]} <= set(values)
    assert found["whisker_high"] <= found["q3"] + 1.5 * (found["q3"] - found["q1"])


class TestReplay:
    def test_a_trace_in_other_blocks(self, tmp_path):
        """The block size of a file that does not say it is a field of the replay."""
        path = tmp_path / "b16.jsonl"
        line = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": list(range(63))}
        path.write_text(json.dumps(line) + "\n")
        mine = dataclasses.replace(SMALL, workload=str(path))
        with pytest.raises(TraceError, match="with a block size of 16"):
            replayed(mine)
        assert replayed(dataclasses.replace(mine, block_size_tokens=16))["requests"][0] == 1

    def test_the_same_row_every_time(self):
        """A replay is a function of its fields."""
        assert replayed(SMALL).equals(replayed(SMALL))

    def test_a_trace_of_ones_own_on_other_nodes(self, tmp_path):
        """A file goes where a workload's name does, its content counts, and faster nodes serve it sooner."""
        path = tmp_path / "mine.jsonl"
        line = {"timestamp": 0, "input_length": 2000, "output_length": 5, "hash_ids": [1, 2, 3, 4]}
        path.write_text(json.dumps(line) + "\n")
        mine = dataclasses.replace(SMALL, workload=str(path))
        slow, fast = (replayed(dataclasses.replace(mine, node=node)) for node in ("a800-node", "h200-node"))
        assert (slow["requests"][0], slow["origin"][0]) == (1, "file")
        assert fast["mean"][0] < slow["mean"][0]
        before = digest_of(mine)
        path.write_text(json.dumps({**line, "input_length": 1500, "hash_ids": [1, 2, 3]}) + "\n")
        assert digest_of(mine) != before
        assert replayed(mine)["mean"][0] != slow["mean"][0]
        with pytest.raises(ValueError, match=r"'nothing.jsonl' is neither a file nor a workload: conversation"):
            dataclasses.replace(SMALL, workload="nothing.jsonl")
        with pytest.raises(ValueError, match="no node 'a801-node'"):
            dataclasses.replace(SMALL, node="a801-node")

    def test_local_policies_never_fetch(self):
        """Only KVCache-centric placement moves prefixes between nodes."""
        rows = replayed(*vary(SMALL, policy=("kvcache_centric", "cache_aware", "load_balance", "random")))
        fetching = rows.set_index("policy")["fetching"]
        assert fetching["kvcache_centric"] > 0
        assert (fetching.drop("kvcache_centric") == 0).all()

    def test_reuse_saves_gpu_time(self):
        """More hits, less computation: over cache sizes the two are ordered oppositely."""
        rows = replayed(*vary(dataclasses.replace(SMALL, policy="cache_aware"), cache_tokens=(20_000, 10**7)))
        assert rows["token_hit_rate"].is_monotonic_increasing
        assert rows["prefill_gpu_s"].is_monotonic_decreasing

    def test_every_knob_moves_the_result(self):
        """No assumption that the chapter varies is without effect, on a trace long enough to show it."""
        base = dataclasses.replace(SMALL, first=700, cache_tokens=1_500_000)
        knobs = topic.one_knob_at_a_time(base)
        assert knobs.pop("as assumed") == base
        # The two editions differ only if the ratio of two matches is exactly the threshold.
        del knobs["Algorithm 1 of the arXiv edition"]
        # Under this load, each prefix arrives before the turn of its prompt.
        del knobs["later prompts may overtake one that waits for its prefix (B51)"]
        before = replayed(base)["mean"][0]
        for name, knob in knobs.items():
            assert replayed(knob)["mean"][0] != before, name

    def test_spreading_keeps_the_order_of_arrival(self):
        """Spread arrivals come no earlier and within the tick, in the same order."""
        trace = topic.traffic(SMALL.workload, SMALL.first)[0]
        assert tick_s(trace) == 3.0
        moved = [traced.request.arrival_s for traced in topic.traffic(SMALL.workload, SMALL.first, spread=True)[1]]
        assert moved == sorted(moved)
        assert (np.array(moved) >= trace.arrival_s).all()
        assert (np.array(moved) <= trace.arrival_s + 3.0).all()

    def test_speed_divides_the_arrivals(self):
        """Twice the speed is half the time."""
        trace = topic.traffic(SMALL.workload, SMALL.first)[0]
        faster = [t.request.arrival_s for t in topic.traffic(SMALL.workload, SMALL.first, speed=2.0)[1]]
        np.testing.assert_allclose(faster, trace.arrival_s / 2)


class TestReplicas:
    def test_counts_stay_within_the_nodes_and_begin_at_none(self):
        """No block is on more nodes than there are, and none before anything was computed."""
        rows = run(topic.Replicas(first=300, ranks=(1, 10), every_s=10.0), cache=False)
        assert rows["replicas"].between(0, 8).all()
        assert (rows[rows["at_s"] == 0]["replicas"] == 0).all()
        assert rows["replicas"].max() > 0

    def test_ids_may_be_hashes_of_64_bits(self, tmp_path):
        """A trace of one's own names blocks by any unsigned 64-bit numbers; only equality of names counts."""
        tables = []
        for name, rename in (
            ("small", lambda k: k),
            ("hashes", lambda k: (k * 0x9E3779B97F4A7C15 + 2**63) % 2**64),
        ):
            path = tmp_path / f"{name}.jsonl"
            lines = [
                {"timestamp": 500 * i, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1 + i % 3]}
                for i in range(60)
            ]
            for line in lines:
                line["hash_ids"] = [rename(k) for k in line["hash_ids"]]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            tables.append(run(topic.Replicas(workload=str(path), ranks=(1,), every_s=5.0), cache=False))
        assert (tables[0]["replicas"] == tables[1]["replicas"]).all()


class TestBesidePapers:
    @pytest.fixture(scope="class")
    @staticmethod
    def tables():
        """All three tables at a very small scale."""
        fast = replayed(*vary(SMALL, policy=FOUR))
        arxiv = replayed(*vary(dataclasses.replace(SMALL, workload="arxiv"), policy=FOUR))
        ten = dataclasses.replace(SMALL, prefill_nodes=4, one_token=True)
        local = vary(ten, workload=tuple(WORKLOADS), policy=("longest_prefix", "load_balance", "cache_aware"))
        shared = vary(ten, workload=tuple(WORKLOADS), shared_cache=(True,))
        spread = replayed(topic.Replicas(first=300, ranks=(10, 100)))
        return fast, arxiv, local_and_global(replayed(*local, *shared)), spread

    def test_every_claim_of_the_chapter_is_graded(self, tables):
        """No claim that the ledger gives to this chapter is left out."""
        shown = " ".join(beside_papers(*tables).frame()["quantity"])
        missing = [c.id for c in claims() if c.chapter == "09_placement" and c.sentence not in shown]
        assert missing == []


def copies(*counts, requests=12_000, origin="released", eviction="lru"):
    """Rows of `Replicas` for ranks 10 and 100 of the conversation trace, one sample a count."""
    rows = [
        {"rank": rank, "at_s": 30.0 * sample, "replicas": count}
        for rank in (10, 100)
        for sample, count in enumerate(counts)
    ]
    return pd.DataFrame(rows).assign(workload="conversation", eviction=eviction, requests=requests, origin=origin)


def test_the_last_sample_decides_how_far_a_block_spreads():
    """The count at the end is judged, the largest one is a detail, and caches under LFU are left out."""
    both = pd.concat([copies(0, 6, 5), copies(0, 1, 1, eviction="lfu")])
    rows = list(_fig_11(both))
    assert [(row.claim, row.ours, row.decides) for row in rows] == [
        ("F104", 5, True), ("F104", 6, False), ("F105", 5, True), ("F105", 6, False)
    ]  # fmt: skip
    assert {row.verdict for row in _fig_11(copies(0, 8, requests=400))} == {Verdict.TOO_SHORT}


def test_local_caches_that_hit_nothing_can_be_set_beside_the_paper():
    """A few requests of a twin may find nothing in local caches: the gain has no bound then, and no verdict."""
    policies = ("kvcache_centric", "cache_aware", "load_balance", "random")
    means = pd.DataFrame({"policy": policies, "mean": (1.0, 2.0, 3.0, 4.0), "origin": "made", "requests": 400})
    ways = (("longest_prefix", False, 0.0), ("load_balance", False, 0.0), ("kvcache_centric", True, 0.2))
    caches = pd.DataFrame(
        [
            {"workload": workload, "policy": policy, "shared_cache": shared, "token_hit_rate": rate}
            for workload in WORKLOADS
            for policy, shared, rate in ways
        ]
    ).assign(prefill_gpu_s=1.0, origin="made", requests=400)
    table = beside_papers(means, means, caches, copies(0, 1)).frame().set_index("quantity")
    gains = table[table.index.str.startswith("hit rate of the global over the local cache")]
    assert set(gains["verdict"]) == {"trace not here"}


def test_the_longest_prefix_decides_what_a_global_cache_gains():
    """The policy that the paper states decides F15 and F16; better and worse local policies are details."""
    ways = (("longest_prefix", False, 0.3), ("load_balance", False, 0.1), ("cache_aware", False, 0.6))
    rows = [
        {"workload": workload, "policy": policy, "shared_cache": shared, "token_hit_rate": rate}
        for workload in WORKLOADS
        for policy, shared, rate in (*ways, ("kvcache_centric", True, 0.66))
    ]
    caches = pd.DataFrame(rows).assign(prefill_gpu_s=1.0, origin="released", requests=24_000)
    policies = ("kvcache_centric", "cache_aware", "load_balance", "random")
    means = pd.DataFrame({"policy": policies, "mean": (1.0, 2.0, 3.0, 4.0), "origin": "made", "requests": 24_000})
    table = beside_papers(means, means, caches, copies(0, 1)).frame()
    hits = table[table["claim"] == "F15"].set_index("decides")["ours"]
    assert hits[True] == pytest.approx(2.2)
    assert sorted(hits[False]) == pytest.approx([1.1, 6.6])


def test_means_of_twins_are_of_each_policy():
    """Numbers are averaged over the twins of a policy, words are kept, and the order of policies stays."""
    rows = pd.DataFrame({"policy": ["b", "a", "b", "a"], "seed": [0, 0, 1, 1], "mean": [1.0, 2.0, 3.0, 6.0]})
    found = means_of_twins(rows.assign(origin="twin"))
    assert found[["policy", "mean", "origin"]].to_numpy().tolist() == [["b", 2.0, "twin"], ["a", 4.0, "twin"]]


def test_the_arxiv_testbed_is_a_setting_of_the_same_replay():
    """Its nodes are those of the fit, so it serves more slowly; it has no nodes of another kind."""
    fast, slow = replayed(SMALL, dataclasses.replace(SMALL, testbed="arxiv"))["mean"]
    assert slow > 1.5 * fast
    with pytest.raises(ValueError, match="nodes of the kind 'a800-node' only, not 'h200-node'"):
        dataclasses.replace(SMALL, testbed="arxiv", node="h200-node")
