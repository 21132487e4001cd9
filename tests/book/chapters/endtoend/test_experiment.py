"""End-to-end experiments: laws at a small scale, agreement with the paper on the released traces."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.chapters.endtoend import experiment as topic
from mooncake_lab.book.chapters.endtoend.claims import (
    REAL,
    SYSTEMS,
    WORKLOADS,
    beside_papers,
    best_split,
    throughput_gain,
)
from mooncake_lab.book.chapters.endtoend.experiment import (
    Goodput,
    coupled_log,
    hidden_overload,
    split_log,
)
from mooncake_lab.book.chapters.endtoend.rates import (
    PUBLIC,
    SIMULATED,
    AtRate,
    highest_rate,
    normalised,
    points,
    printed_rates,
)
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.paper import claims, curve
from mooncake_lab.metrics import token_times_s


def test_coupled_by_hand():
    """Prompts stop answers: one prompt stops the first request for a second, two the second request for two."""
    found = dict(token_times_s(coupled_log()))
    by_hand = {
        0: [1.0, 1.1, 1.2, 2.3, 2.4, 2.5],
        1: [2.2, 2.3, 2.4, 2.5, 4.6, 4.7],
        2: [4.5, 4.6, 4.7, 4.8, 4.9, 5.0],
        3: [4.5, 4.6, 4.7, 4.8, 4.9, 5.0],
    }
    for request_id, times in by_hand.items():
        np.testing.assert_allclose(found[request_id], times, atol=1e-9)


def test_split_by_hand():
    """Prompts wait for prompts only, and every gap is one step."""
    found = dict(token_times_s(split_log()))
    for request_id, first_s in enumerate((1.0, 2.15, 3.45, 4.45)):
        np.testing.assert_allclose(found[request_id], first_s + 0.1 * np.arange(6), atol=1e-9)


SMALL = topic.EndToEnd(first=60, prefill_nodes=3, decode_nodes=3)
FOUR = tuple(SYSTEMS)


def served(*points):
    return run(points, cache=False)


@given(st.lists(st.floats(0, 2) | st.just(float("nan")), min_size=1, max_size=50))
def test_shares_are_a_distribution(values):
    """Shares rise along the grid, count a value at the grid point itself, and never count what never came."""
    data = np.array(values)
    found = topic.shares(data, (0.5, 1.0, 2.0))
    assert found == sorted(found)
    assert found[-1] == pytest.approx(1 - np.isnan(data).mean())


class TestEndToEnd:
    @pytest.mark.parametrize("system", FOUR)
    def test_capacity_rises_with_the_limit_and_is_the_recorded_one(self, system):
        """A looser limit lets more requests through, and the printed limits lie on the curve."""
        (row,) = served(dataclasses.replace(SMALL, system=system)).to_dict(orient="records")
        assert row["capacity"] == sorted(row["capacity"])
        for limit in topic.LIMITS_MS:
            around = np.interp([limit * 0.9, limit * 1.1], topic.TBT_GRID_MS, row["capacity"])
            assert around[0] <= row[f"capacity_{limit}_ms"] <= around[1]
        assert row["effective"] == row["capacity_100_ms"]

    def test_vllm_v1_reuses_prefixes(self):
        """On three instances it finds some, and more behind a router that knows the caches."""
        base = topic.EndToEnd(first=200, prefill_nodes=2, decode_nodes=1)
        alone, aware = (next(row.rows())["token_hit_rate"] for row in topic.todays_vllm(base).values())
        assert 0 < alone < aware

    def test_every_knob_moves_the_result(self):
        """No assumption that the chapter varies is without effect."""
        base = topic.EndToEnd(first=200, prefill_nodes=2, decode_nodes=1, host_s=0.004, host_free=1.5)
        knobs = {
            "mooncake": (
                {"host_s": 0.0},
                {"testbed": "arxiv"},
                {"host_free": 0.0},
                {"prefill_nodes": 1},
                {"device_tokens": 130_000},
                {"pack_tokens": 131_072},
                {"spread": False},
                {"seed": 1},
            ),
            "vllm": (
                {"router": "random"},
                {"router": "round_robin"},
                {"router": "load_balance"},
                {"router": "least_tokens"},
                {"speed": 2.0},
                {"spread": False},
            ),
            "vllm_chunked": ({"chunk_tokens": 2048},),
            "vllm_prefix": ({"hash_s_per_token": 4e-8},),
        }
        for system, changes in knobs.items():
            point = dataclasses.replace(base, system=system)
            before = served(point)["tbt_fast_mean_s"][0]
            for change in changes:
                assert served(dataclasses.replace(point, **change))["tbt_fast_mean_s"][0] != before, change

    def test_a_replay_of_some_requests_is_the_start_of_the_whole(self):
        """The first requests arrive when they do among all, and a faster replay scales the times."""
        whole, part = (topic.EndToEnd(first=first, seed=3).trace().arrival_s for first in (None, 60))
        assert (whole[:60] == part).all()
        assert topic.EndToEnd(first=60, seed=3, speed=2.0).trace().arrival_s == pytest.approx(part / 2)

    def test_hashing_costs_prefix_caching_alone(self):
        """The quadratic hash is paid where prefixes are cached and nowhere else."""
        slow = {"hash_s_per_token": 4e-8}
        for system in FOUR:
            plain, hashing = (
                topic.clock(dataclasses.replace(SMALL, system=system, **more)) for more in ({}, slow)
            )
            assert (plain.hybrid != hashing.hybrid) == (system == "vllm_prefix")

    def test_disaggregation_takes_prefills_out_of_the_gaps(self):
        """With the same nodes, Mooncake's P99 of TBT is shorter than any prefill-first engine's."""
        p99 = served(*vary(SMALL, system=("mooncake", "vllm", "vllm_prefix")))["tbt_fast_p99_s"].tolist()
        assert p99[0] < min(p99[1:])


class TestRates:
    @pytest.mark.parametrize("dataset", PUBLIC + SIMULATED)
    def test_the_numbers_of_table_2_are_met(self, dataset):
        """Generated requests have the printed lengths: exactly, or in the mean where they are drawn."""
        trace = AtRate(dataset=dataset, requests=2700).trace()
        printed = curve("arxiv_table2_datasets")
        series = dataset if dataset in PUBLIC else "Simulated data"
        key = "avg_input_tokens" if dataset in PUBLIC else f"input_tokens_{SIMULATED.index(dataset) + 1}"
        numbers = printed[printed["series"] == series].set_index("x")["y"]
        assert trace.input_tokens.mean() == pytest.approx(numbers[key], rel=0.07)
        assert (trace.output_tokens == numbers["avg_output_tokens"]).all()

    def test_l_eval_shares_four_fifths(self):
        """Nine questions a document with nine tenths of the prompt shared: 0.9 * 8 / 9 of all tokens, if kept."""
        trace = AtRate(dataset="L-Eval", requests=900).trace()
        seen, reused = set(), 0
        for i in range(len(trace)):
            blocks = trace.blocks_of(i).tolist()
            reused += sum(block in seen for block in blocks)
            seen.update(blocks)
        assert reused / len(trace.block_ids) == pytest.approx(0.8, abs=0.03)

    def test_without_sharing_nothing_repeats(self):
        """`cached=False` leaves no block in common."""
        for dataset in ("L-Eval", "16k"):
            ids = AtRate(dataset=dataset, requests=40, cached=False).trace().block_ids
            assert len(np.unique(ids)) == len(ids)

    def test_the_mean_at_the_lowest_rate_is_a_tenth_and_a_fifth(self):
        """The papers' normaliser: 10 and 5 times the mean of the three systems at the lowest rate."""
        table = normalised(run(points("16k", AtRate(dataset="16k", requests=12)), cache=False))
        lowest = table[table["requests_per_s"] == min(printed_rates("16k"))]
        assert lowest["ttft"].mean() == pytest.approx(0.1)
        assert lowest["tbt"].mean() == pytest.approx(0.2)

    def test_the_normaliser_is_the_papers(self):
        """Read off their figures, the same means are 0.1 and 0.2 within 3 % in all twelve panels."""
        for name, datasets in (("arxiv_fig11_public_datasets", PUBLIC), ("arxiv_fig12_simulated_data", SIMULATED)):
            table = curve(name)
            for dataset in datasets:
                for metric, expected in (("TTFT", 0.1), ("TBT", 0.2)):
                    mine = table[table["series"].str.startswith(f"{dataset}/{metric}/")]
                    lowest = mine[mine["x"].astype(float) == min(printed_rates(dataset))]
                    assert lowest["y"].mean() == pytest.approx(expected, rel=0.03)

    def test_a_rate_counts_only_if_all_below_pass(self):
        """The highest rate stops at the first that fails, and TBT counts only where asked."""
        table = pd.DataFrame(
            {
                "dataset": "16k",
                "system": "4M",
                "requests_per_s": [1.0, 0.5, 2.0, 3.0],
                "ttft": [0.9, 0.1, 1.1, 0.9],
                "tbt": [1.1, 0.5, 0.1, 0.1],
            }
        )
        assert highest_rate(table, "16k", "4M") == 1.0
        assert highest_rate(table, "16k", "4M", both=True) == 0.5
        assert highest_rate(table, "16k", "3P+1D") == 0.0


@pytest.mark.parametrize("first", [150, 1200])
def test_goodput_is_at_most_what_the_nodes_can_compute(first):
    """A found rate exceeds what the prefill nodes compute per second by no more than the search says it may."""
    search = Goodput(first=first, prefill_nodes=2, decode_nodes=4, relative_tolerance=0.2)
    for row in run(search, cache=False).to_dict(orient="records"):
        sustained = search.prefill_nodes / row["prefill_gpu_s"]
        assert 0 < row["requests_per_s"] <= sustained * (1 + row["hidden_overload"])


@given(st.floats(1, 1e4), st.floats(0.1, 100), st.floats(0.5, 1))
def test_hidden_overload_is_what_fails_the_least_share(lasts_s, limit_s, attained):
    """At the hidden overload the queue reaches the limit when the attained share of requests has arrived."""
    overload = hidden_overload(lasts_s, limit_s, attained)
    assert overload * attained * lasts_s == pytest.approx(limit_s)


class TestBesidePapers:
    @pytest.fixture(scope="class")
    @staticmethod
    def tables():
        """All tables at a very small scale."""
        traces = served(*vary(SMALL, workload=tuple(WORKLOADS), system=FOUR))
        splits = served(*(dataclasses.replace(SMALL, prefill_nodes=p, decode_nodes=16 - p) for p in (5, 8, 11)))
        real = served(*vary(SMALL, workload=("arxiv",), system=tuple(REAL)))
        rates = [p for d in PUBLIC + SIMULATED for p in points(d, AtRate(dataset=d, requests=3))]
        return traces, splits, real, normalised(run(rates, cache=False))

    def test_each_claim_is_decided_once(self, tables):
        """Every claim of the chapter has one row that decides it."""
        decided = beside_papers(*tables).frame().query("decides")["claim"].tolist()
        assert sorted(decided) == sorted(c.id for c in claims() if c.chapter == "10_endtoend")

    def test_the_best_split_is_the_middle_of_the_plateau(self):
        """Splits within half a point of the best count as equally good."""
        table = pd.DataFrame({"prefill_nodes": [6, 7, 9, 11], "decode_nodes": [10, 9, 7, 5]})
        assert best_split(table.assign(effective=[0.9, 0.99, 0.991, 0.8])) == (1.0, "exact")
        assert best_split(table.assign(effective=[0.9, 0.91, 0.99, 0.8]))[0] == pytest.approx(9 / 7)


def test_a_rate_at_the_end_of_the_grid_is_a_lower_bound():
    """A system that passes the highest tested rate may pass more; one that fails it does not."""
    rows = [
        {"dataset": "16k", "system": system, "requests_per_s": rate, "ttft": ttft, "tbt": 0.1}
        for system, passed in (("3P+1D", 1.5), ("4M", 0.2))
        for rate, ttft in ((0.2, 0.5), (1.5, 0.9 if passed == 1.5 else 2.0))
    ]
    assert throughput_gain(pd.DataFrame(rows), "16k") == (pytest.approx(650.0), "at least")
    failed = pd.DataFrame(rows).assign(ttft=[0.5, 2.0, 0.5, 2.0])
    assert throughput_gain(failed, "16k") == (pytest.approx(0.0), "exact")


def test_a_sweep_that_ends_on_its_plateau_gives_a_lower_bound():
    """The middle of a plateau is known only if the sweep goes on beyond it."""
    rows = pd.DataFrame({"prefill_nodes": [7, 8, 9], "decode_nodes": [9, 8, 7], "effective": [0.5, 0.99, 0.99]})
    assert best_split(rows)[1] == "at least"
    ratio, bound = best_split(rows.assign(effective=[0.99, 0.99, 0.5]))
    assert (ratio, bound) == (7.5 / 8.5, "exact")
