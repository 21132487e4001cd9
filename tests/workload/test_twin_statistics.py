"""The twins have the statistics of the traces they stand in for; what they must meet is a table of data."""

import csv
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mooncake_lab.book.paper import fact
from mooncake_lab.store.replay import replay
from mooncake_lab.workload import conversation_sizes, reusable_blocks, statistics, use_counts
from mooncake_lab.workload.twin import make_twin

TARGETS = Path(__file__).parents[2] / "data" / "measured" / "twin_targets.csv"
TWINS = ("conversation", "synthetic", "toolagent")
OTHER_SEEDS = [
    pytest.param(name, seed, marks=() if (name, seed) == ("synthetic", 1) else pytest.mark.slow)
    for name in TWINS
    for seed in (1, 2, 3, 4)
]
"""One of them is cheap."""


def read_targets(trace):
    """The rows of one trace: statistic, value, band, and what the band is a share of."""
    with TARGETS.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [row for row in rows if row["trace"] == trace]


def hit_rate(trace, capacity_blocks):
    """Share of block accesses that an LRU cache of this size serves."""
    return replay([trace.blocks_of(i) for i in range(len(trace))], "lru", capacity_blocks).hit_rate


summary = cache(statistics)
"""Computed once a trace."""

NUMBERED = {
    "lru_hit_rate": lambda trace, n: hit_rate(trace, int(n)),
    "lru_hit_rate_percent": lambda trace, n: hit_rate(trace, summary(trace).unique_blocks * int(n) // 100),
    "input": lambda trace, p: getattr(summary(trace).input_tokens, p),
    "output": lambda trace, p: getattr(summary(trace).output_tokens, p),
    "share_of_blocks_used_at_most": lambda trace, n: (use_counts(trace) <= int(n)).mean(),
    "share_of_requests_reusing": lambda trace, n: (reusable_blocks(trace) == int(n)).mean(),
    "requests_of_first_block": lambda trace, n: sorted(first_block_uses(trace), reverse=True)[int(n) - 1],
}
"""Statistics whose names end in a number or a percentile."""

NAMED = {
    "lru_hit_rate_unlimited": lambda trace: hit_rate(trace, None),
    "share_of_requests_reusing_5_or_more": lambda trace: (reusable_blocks(trace) >= 5).mean(),
    "distinct_first_blocks": lambda trace: len(first_block_uses(trace)),
    "ticks_of_3_s": lambda trace: len(np.unique(np.rint(trace.arrival_s / 3))),
    "mean_session_requests": lambda trace: conversation_sizes(trace).mean(),
}
"""Statistics that `statistics` does not have; all others are its attributes."""


def measure(trace, statistic):
    """One statistic of a trace by its name in the table."""
    kind, _, last = statistic.rpartition("_")
    if statistic in NAMED:
        return float(NAMED[statistic](trace))
    if kind in NUMBERED:
        return float(NUMBERED[kind](trace, last))
    return float(getattr(summary(trace), statistic))


def first_block_uses(trace):
    """How many requests begin with each first block."""
    return np.unique(trace.block_ids[trace.block_starts[:-1]], return_counts=True)[1].tolist()


@cache
def twin(name, seed):
    """Twins are drawn once."""
    return make_twin(name, seed=seed)


def outside(name, seed, slack):
    """The statistics of a twin that miss their band, widened by `slack`."""
    misses = {}
    for row in read_targets(name):
        target, found = float(row["value"]), measure(twin(name, seed), row["statistic"])
        band = float(row["band"]) * (abs(target) if row["band_of"] == "value" else 1)
        if abs(found - target) > slack * band:
            misses[row["statistic"]] = (found, target)
    return misses


class TestTargets:
    @pytest.mark.parametrize("name", TWINS)
    def test_seed_0(self, name):
        """With the default seed every statistic lies in its band."""
        assert outside(name, 0, slack=1) == {}

    @pytest.mark.parametrize(("name", "seed"), OTHER_SEEDS)
    def test_other_seeds(self, name, seed):
        """With any other seed they lie in one twice as wide: the process fits, not one lucky draw."""
        assert outside(name, seed, slack=2) == {}

    def test_a_miss_is_seen(self):
        """The check is able to fail: the synthetic twin is no twin of the conversation trace."""
        target = {row["statistic"]: float(row["value"]) for row in read_targets("conversation")}
        found = measure(twin("synthetic", 0), "lru_hit_rate_unlimited")
        assert abs(found - target["lru_hit_rate_unlimited"]) > 0.1

    def test_arxiv_is_the_tool_and_agent_twin(self):
        """The arXiv trace is the same hour, so its twin has the same requests."""
        one, other = make_twin("arxiv", requests=500), make_twin("toolagent", requests=500)
        assert one.block_ids.tolist() == other.block_ids.tolist()
        assert one.source != other.source


class TestTable:
    def test_measured_targets(self, released, request):
        """What the table calls measured is what the released file gives."""
        name = request.node.callspec.params["released"]
        for row in read_targets(name):
            assert row["source"] == "measured"
            assert measure(released, row["statistic"]) == pytest.approx(float(row["value"]), rel=1e-6), row[
                "statistic"
            ]

    @pytest.mark.parametrize(
        ("name", "series"),
        [("conversation", "Conversation"), ("synthetic", "Synthetic"), ("toolagent", "Tool&Agent")],
    )
    def test_it_agrees_with_the_paper(self, name, series):
        """Requests and mean lengths are those of FAST'25 Table 2, which prints whole tokens."""
        target = {row["statistic"]: float(row["value"]) for row in read_targets(name)}
        printed = {"num_requests": "requests", "avg_input_tokens": "mean_input_tokens"}
        printed["avg_output_tokens"] = "mean_output_tokens"
        for x, statistic in printed.items():
            assert fact("fast_table2_workloads", series=series, x=x).value == pytest.approx(
                target[statistic], abs=0.5
            )
